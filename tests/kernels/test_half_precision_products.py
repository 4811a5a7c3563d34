"""Products in bf16 and fp16 on processors without instructions for them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from meshwright.kernels import attention_cpu_kernel, half_precision_products
from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.kernels.half_precision_products import SUPPORTED, products_in_fp32
from meshwright.rank.world import groups_of
from meshwright.spec.load import load

CPU = torch.device("cpu")


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A format whose products the processor is said to lack."""
    with (
        patch.dict(SUPPORTED, {request.param: lambda: False}),
        products_in_fp32(CPU, request.param) as replaced,
    ):
        assert replaced
        yield request.param


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_products_are_those_of_fp32_rounded_once(dtype: torch.dtype) -> None:
    a, b, c = drawn(dtype, 5, 300), drawn(dtype, 300, 7), drawn(dtype, 5, 7)
    wide = a.float() @ b.float()
    out = torch.empty(0, dtype=dtype)
    into = torch.empty(9, 5, 7, dtype=dtype)
    torch.mm(a, b, out=out)
    torch.mm(a, b, out=into[3])
    for found in (a @ b, out, into[3]):
        assert torch.equal(found, wide.to(dtype)) and found.dtype == dtype
    expected = (0.5 * wide + 2 * c.float()).to(dtype)
    assert torch.equal(torch.addmm(c, a, b, beta=2, alpha=0.5), expected)
    assert torch.equal(torch.addmm(c, a, b, beta=2, alpha=0.5, out=out), expected)
    assert torch.equal(c.clone().addmm_(a, b, beta=2, alpha=0.5), expected)


def test_batched_products_are_those_of_fp32_rounded_once(dtype: torch.dtype) -> None:
    a, b, c = drawn(dtype, 3, 5, 300), drawn(dtype, 3, 7, 300).mT, drawn(dtype, 3, 5, 7)
    wide = a.float() @ b.float()
    assert torch.equal(a @ b, wide.to(dtype))
    expected = (wide - c.float()).to(dtype)
    assert torch.equal(torch.baddbmm(c, a, b, beta=-1), expected)
    assert torch.equal(c.clone().baddbmm_(a, b, beta=-1), expected)


def test_attention_is_that_of_fp32_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's operators; the kernel in C++ reads the rounded output again in its backward."""
    monkeypatch.setattr(attention_cpu_kernel, "takes", lambda *_: False)
    q, k, v, grad = (drawn(dtype, 2, 70, heads, 8) for heads in (4, 2, 2, 4))
    bias = torch.zeros(1, 1, 70, 70, dtype=dtype).masked_fill_(torch.ones(70, 70).triu(1) > 0, -torch.inf)
    for given in (None, bias):
        inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        wide = [each.float().requires_grad_() for each in (q, k, v)]
        found, expected = (
            blocked_attention(*each, mask)
            for each, mask in ((inputs, given), (wide, None if given is None else given.float()))
        )
        assert torch.equal(found, expected.to(dtype)) and found.dtype == dtype
        found.backward(grad)
        expected.backward(grad.float())
        for mine, theirs in zip(inputs, wide, strict=True):
            assert torch.equal(mine.grad, theirs.grad.to(dtype))


def test_a_summand_times_zero_is_not_read(dtype: torch.dtype) -> None:
    a, b, c = drawn(dtype, 5, 3), drawn(dtype, 3, 7), torch.full((5, 7), torch.nan, dtype=dtype)
    assert torch.equal(c.addmm_(a, b, beta=0), a @ b)


def test_gradients_pass_and_other_formats_are_left_alone(dtype: torch.dtype) -> None:
    linear, x = torch.nn.Linear(30, 20).to(dtype), drawn(dtype, 4, 6, 30).requires_grad_()
    linear(x).sum().backward()
    assert x.grad is not None and linear.weight.grad is not None
    ones = torch.ones(24, 20)
    torch.testing.assert_close(linear.weight.grad, (ones.T @ x.detach().view(24, 30).float()).to(dtype))
    torch.testing.assert_close(x.grad.view(24, 30), (ones @ linear.weight.detach().float()).to(dtype))
    a, b, out = drawn(torch.float64, 5, 3), drawn(torch.float64, 3, 7), torch.empty(5, 7, dtype=torch.float64)
    inside = [a @ b, torch.mm(a, b, out=out).clone(), torch.addmm(out, a, b, beta=2), out.addmm_(a, b)]
    outside = [a @ b, a @ b, 3 * (a @ b), 2 * (a @ b)]
    for mine, theirs in zip(inside, outside, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_compiled_products_are_those_of_fp32_rounded_once(dtype: torch.dtype) -> None:
    a, b = drawn(dtype, 5, 300), drawn(dtype, 300, 7)
    compiled = torch.compile(lambda x, y: (x @ y).relu(), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a, b), (a.float() @ b.float()).to(dtype).relu())


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp8", "fp32"])
def test_runs_compute_so_in_their_format(compute: str) -> None:
    """A run's process replaces the operators for its 16 bits, and those of fp32 are left alone."""
    spec = load(None, [("model.preset", "tiny"), ("precision.compute", compute)])
    replaced = Mock(wraps=half_precision_products._widened)
    with (
        patch.dict(SUPPORTED, dict.fromkeys(SUPPORTED, lambda: False)),
        patch.object(half_precision_products, "_widened", replaced),
        groups_of(spec),
    ):
        a, b = drawn(torch.bfloat16, 5, 300), drawn(torch.bfloat16, 300, 7)
        if compute in ("bf16", "fp8"):
            assert torch.equal(a @ b, (a.float() @ b.float()).bfloat16())
    found = {call.args[2] for call in replaced.call_args_list}
    assert found == {{"fp16": torch.float16, "fp32": None}.get(compute, torch.bfloat16)} - {None}


def test_operators_are_put_back() -> None:
    a, b = drawn(torch.bfloat16, 5, 3), drawn(torch.bfloat16, 3, 7)
    before = a @ b
    with (
        patch.object(half_precision_products, "_widened", return_value=Mock(side_effect=LookupError)),
        patch.dict(SUPPORTED, {torch.bfloat16: lambda: False}),
        products_in_fp32(CPU, torch.bfloat16),
        pytest.raises(LookupError),
    ):
        a @ b
    assert torch.equal(a @ b, before)


@pytest.mark.parametrize("given", [("cuda", torch.bfloat16), ("cpu", torch.float32)], ids=str)
def test_nothing_is_replaced_where_products_are_there(given: tuple[str, torch.dtype]) -> None:
    with products_in_fp32(torch.device(given[0]), given[1]) as replaced:
        assert not replaced
    with (
        patch.dict(SUPPORTED, {torch.bfloat16: lambda: True}),
        products_in_fp32(CPU, torch.bfloat16) as replaced,
    ):
        assert not replaced


@pytest.mark.parametrize("has", [(), ("_is_avx512_bf16_supported",), ("_is_amx_tile_supported",)], ids=str)
def test_avx512_without_bf16_has_no_products_in_it(
    monkeypatch: pytest.MonkeyPatch, has: tuple[str, ...]
) -> None:
    """oneDNN says that it has products in bf16 on every processor with AVX-512; most widen the numbers."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name in has)
    with products_in_fp32(CPU, torch.bfloat16) as replaced:
        assert replaced == (not has)


def test_builds_without_onednn_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their torch lacks the operators that tell: to ask for them would be an error."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    missing = Mock(side_effect=AttributeError)
    monkeypatch.setattr(half_precision_products, "SUPPORTED", dict.fromkeys(SUPPORTED, missing))
    with products_in_fp32(CPU, torch.bfloat16) as replaced:
        assert not replaced
