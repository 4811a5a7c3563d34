"""A mixture of experts against loops over tokens, sequences and experts, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.model.decoder import Decoder
from meshwright.model.grouped_mm import grouped_mm, grouped_outer
from meshwright.model.init import init_whole_
from meshwright.model.moe import Moe
from meshwright.model.router import Router, within_capacity
from meshwright.model.token_dispatcher import ALIGN, RowGroups, TokenDispatcher
from meshwright.spec import ModelSpec, MoeSpec

DEEPSEEK = {"router": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "bias": True}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3": {"renormalise": False, "top_k": 3},
    "deepseek": {**DEEPSEEK, "shared_ffn": 16},
    "capacity": {"capacity_factor": 0.5},
    "switch": {"top_k": 1, "renormalise": False},
}


def mixture(**moe: Any) -> Moe:
    model = {"preset": "moe-tiny", "vocab_size": 64, "hidden": 32, "heads": 4, "kv_heads": 2, "layers": 2}
    given = {"experts": 8, "top_k": 2, "ffn": 24, "shared_ffn": 0, **moe}
    spec = ModelSpec.model_validate({**model, "moe": given})
    decoder = init_whole_(Decoder(spec).double(), 0)
    ((_, found),) = decoder.each_mixture()
    for parameter in found.parameters():
        parameter.data.mul_(10)
    return found


def scores_of(moe: MoeSpec, logits: Tensor) -> Tensor:
    return logits.sigmoid() if moe.router == "sigmoid" else logits.softmax(0)


def chosen(moe: MoeSpec, scores: Tensor, bias: Tensor | None) -> list[int]:
    """The experts of one token, best first, by sorting."""
    value = scores.detach() if bias is None else scores.detach() + bias
    size = moe.experts // moe.groups
    groups = [value[first : first + size] for first in range(0, moe.experts, size)]
    best = sorted(range(moe.groups), key=lambda g: -float(groups[g].sort(descending=True).values[:2].sum()))
    allowed = [e for e in range(moe.experts) if e // size in best[: moe.top_groups]]
    return sorted(allowed, key=lambda e: -float(value[e]))[: moe.top_k]


def by_hand(layer: Moe, x_BTD: Tensor) -> Tensor:
    moe, experts = layer.moe, layer.experts
    out = []
    for sequence in x_BTD:
        taken = [0] * moe.experts
        for x in sequence:
            scores = scores_of(moe, layer.router.weight @ x)
            picked = chosen(moe, scores, layer.router.bias)
            total = scores[picked].sum() if moe.renormalise else 1.0
            y = torch.zeros_like(x)
            for e in picked:
                taken[e] += 1
                limit = moe.capacity_factor
                if limit is not None and taken[e] > math.ceil(
                    limit * moe.top_k * len(sequence) / moe.experts
                ):
                    continue
                inner = F.silu(experts.gate[e] @ x) * (experts.up[e] @ x)
                y = y + moe.scale * scores[e] / total * (experts.down[e] @ inner)
            out.append(y)
    routed = torch.stack(out).view(x_BTD.shape)
    return routed if layer.shared is None else routed + layer.shared(x_BTD)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_loops(kind: str, parts: int) -> None:
    layer = mixture(**KINDS[kind])
    if layer.router.bias is not None:
        layer.router.bias.copy_(torch.linspace(-0.2, 0.2, 8))
    layer.hooks = replace(layer.hooks, chunks=parts)
    x = torch.randn(2, 13, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted_by = [x.requires_grad_(), *layer.parameters()]
    ours, theirs = layer(x), by_hand(layer, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    weigh = torch.randn(ours.shape, dtype=torch.float64)
    found = torch.autograd.grad((ours * weigh).sum(), wanted_by)
    expected = torch.autograd.grad((theirs * weigh).sum(), wanted_by)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_experts_that_nobody_takes_have_zero_gradients() -> None:
    layer = mixture(**DEEPSEEK)
    assert layer.router.bias is not None
    layer.router.bias.copy_(torch.tensor([9.0, 9, 9, 9, 0, 0, 0, 0]))
    layer(torch.randn(1, 20, 32, dtype=torch.float64)).sum().backward()
    for weight in (layer.experts.gate, layer.experts.up, layer.experts.down):
        assert weight.grad is not None
        assert (weight.grad[4:] == 0).all() and (weight.grad[:4].abs().amax((1, 2)) > 0).all()


@given(st.data())
def test_first_come_first_served(data: st.DataObject) -> None:
    batch, length, top_k = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 3)))
    experts, capacity = data.draw(st.integers(top_k, 6)), data.draw(st.integers(1, 5))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    picked = torch.rand(batch, length, experts, generator=draw).argsort(-1)[..., :top_k]
    room = within_capacity(picked, experts, capacity).view(batch, length, top_k)
    for b in range(batch):
        taken = [0] * experts
        for t in range(length):
            for choice in range(top_k):
                expert = int(picked[b, t, choice])
                assert bool(room[b, t, choice]) == (taken[expert] < capacity)
                taken[expert] += 1


@given(st.integers(1, 40), st.integers(1, 4), st.integers(4, 9), st.booleans())
def test_every_copy_has_a_row_of_its_expert_and_comes_home(
    tokens: int, top_k: int, experts: int, limited: bool
) -> None:
    draw = torch.Generator().manual_seed(tokens)
    picked = torch.rand(tokens, experts, generator=draw).argsort(-1)[:, :top_k]
    admitted = torch.rand(tokens, top_k, generator=draw) < 0.7 if limited else None
    dispatcher = TokenDispatcher(picked, admitted, experts)
    assert dispatcher.groups.sizes is not None
    sizes = torch.tensor(dispatcher.groups.sizes)
    assert torch.equal(dispatcher.groups.ends, sizes.cumsum(0, dtype=torch.int32))
    assert (sizes % ALIGN == 0).all()
    owner = torch.arange(experts).repeat_interleave(sizes)
    assert torch.equal(picked.flatten()[dispatcher.copy[dispatcher.row]], owner[dispatcher.row])
    x = torch.randn(tokens, 5, dtype=torch.float64, generator=draw)
    (rows,) = dispatcher.receive(dispatcher.send((x, dispatcher.token)))
    home = dispatcher.sum_copies(*dispatcher.receive_back(dispatcher.send_back(rows)))
    copies = torch.full((tokens,), top_k) if admitted is None else admitted.sum(1)
    torch.testing.assert_close(home, x * copies.unsqueeze(1), rtol=1e-14, atol=1e-14)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(3, 9), st.booleans())
def test_rows_whose_number_stays_on_the_device_hold_every_copy(
    tokens: int, top_k: int, experts: int, limited: bool
) -> None:
    draw = torch.Generator().manual_seed(tokens)
    picked = torch.rand(tokens, experts, generator=draw).argsort(-1)[:, :top_k]
    admitted = torch.rand(tokens, top_k, generator=draw) < 0.7 if limited else None
    exact, bounded = (TokenDispatcher(picked, admitted, experts, takes_ends) for takes_ends in (False, True))
    assert bounded.groups.sizes is None and torch.equal(bounded.groups.ends, exact.groups.ends)
    assert torch.equal(bounded.row[bounded.row >= 0], exact.row)
    assert len(bounded.copy) % ALIGN == 0 and len(bounded.copy) >= len(exact.copy)
    x = torch.randn(tokens, 5, dtype=torch.float64, generator=draw)
    homes = []
    for dispatcher in (exact, bounded):
        (rows,) = dispatcher.receive(dispatcher.send((x, dispatcher.token)))
        homes.append(dispatcher.sum_copies(*dispatcher.receive_back(dispatcher.send_back(rows))))
    assert torch.equal(*homes)
    assert (rows[bounded.copy < 0] == 0).all()


def uncomputed(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """CUDA's grouped product by the CPU's: rows behind the last group's are left as memory was."""

    def product(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
        end = int(offs[-1])
        if right.ndim == 2:  # the sum over rows
            return honest(left[:, :end], right[:end], offs=offs)
        found = left.new_full((len(left), right.shape[2]), float("nan"))
        found[:end] = honest(left[:end].contiguous(), right, offs=offs)
        return found

    return product


GPT_OSS = {"router_bias": True, "expert_bias": True, "activation": "clamped_swiglu"}


@pytest.mark.parametrize(
    "moe",
    [KINDS["mixtral"], KINDS["deepseek"], KINDS["capacity"], GPT_OSS],
    ids=["mixtral", "deepseek", "capacity", "gpt-oss"],
)
def test_one_kernel_for_all_experts_gives_the_same(
    moe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's grouped product stands in for CUDA's, in fp32: no expert's rows are counted on the host, and
    rows that are not computed, which are NaN, reach no result."""
    layer = mixture(**moe).float()
    x = torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(1))
    weigh = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    wanted_by, results = [x.requires_grad_(), *layer.parameters()], []
    for replaced in (False, True):
        if replaced:
            monkeypatch.setattr("meshwright.model.moe.one_kernel", lambda _x: True)
            monkeypatch.setattr("meshwright.model.grouped_mm.one_kernel", lambda _x: True)
            monkeypatch.setattr(torch, "_grouped_mm", uncomputed(torch._grouped_mm))
            monkeypatch.setattr(TokenDispatcher, "_to_host", None)
        y = layer(x)
        results.append([y, *torch.autograd.grad((y * weigh).sum(), wanted_by)])
    for one_by_one, together in zip(*results, strict=True):
        torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-5)


def test_adapters_of_any_rank_go_with_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's kernel takes rows of whole words alone; to products of a rank of 3 zeros are added."""
    draw = torch.Generator().manual_seed(3)
    x, a, b = (torch.randn(*shape, generator=draw) for shape in ((32, 20), (2, 3, 20), (2, 12, 3)))
    groups = RowGroups(torch.tensor([16, 32], dtype=torch.int32), (16, 16))
    grad = torch.randn(32, 12, generator=draw)

    def products() -> list[torch.Tensor | None]:
        low = grouped_mm(x, a, groups)
        back = grouped_mm(grad, b.mT, groups)
        of_b, of_a = grouped_outer(grad, low, groups), grouped_outer(back, x, groups)
        return [grouped_mm(low, b, groups), of_a, of_b, grouped_mm(back, a.mT, groups, onto=x.clone())]

    one_by_one, honest = products(), torch._grouped_mm
    given: list[torch.Tensor] = []

    def whole_words(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        given.extend((left, right))
        return honest(left, right, offs=offs)

    monkeypatch.setattr("meshwright.model.grouped_mm.one_kernel", lambda _x: True)
    monkeypatch.setattr(torch, "_grouped_mm", whole_words)
    for found, wanted in zip(products(), one_by_one, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    strides = [stride for each in given for stride in each.stride() if stride != 1]
    assert strides and all(stride % 8 == 0 for stride in strides)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_copies_are_summed_exactly_and_rounded_once(top_k: int, dtype: torch.dtype) -> None:
    """A half is rounded to even: rounded up, sums of two copies in bf16 would be 0.08% too large."""
    draw = torch.Generator().manual_seed(0)
    picked = torch.rand(64, 8, generator=draw).argsort(-1)[:, :top_k]
    dispatcher = TokenDispatcher(picked, None, 8)
    rows = torch.randn(len(dispatcher.copy), 40, generator=draw).to(dtype)
    exact = rows[dispatcher.copy_rows].double().sum(1)
    found = dispatcher.sum_copies(rows)
    if dtype.itemsize == 2:
        assert torch.equal(found, exact.to(dtype))
    else:
        torch.testing.assert_close(found, exact.to(dtype))


def test_grouped_products_of_empty_groups() -> None:
    maps = torch.randn(3, 4, 5, dtype=torch.float64)
    nowhere = RowGroups(torch.zeros(3, dtype=torch.int32), (0, 0, 0))
    assert grouped_mm(torch.randn(0, 5, dtype=torch.float64), maps, nowhere).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_grouped_products_add_to_sums(dtype: torch.dtype) -> None:
    """In the sum's own format within the product, in another after it; an expert without rows has zeros."""
    sizes = (3, 0, 5)
    groups = RowGroups(torch.tensor(sizes).cumsum(0, dtype=torch.int32), sizes)
    x, grad = torch.randn(8, 5).to(dtype), torch.randn(8, 4).to(dtype)
    whole = grouped_outer(grad, x, groups)
    total = torch.full((3, 4, 5), torch.nan, dtype=torch.float64)
    for begun in (False, True):
        assert grouped_outer(grad, x, groups, RunningSum(total, begun)) is None
        torch.testing.assert_close(total, (1 + begun) * whole.double())
    maps = torch.randn(3, 4, 5).to(dtype)
    rows = torch.randn(8, 4).to(dtype)
    wanted = rows + grouped_mm(x, maps, groups)
    assert grouped_mm(x, maps, groups, onto=rows) is rows
    close = 2**-6 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(rows, wanted, rtol=close, atol=close)


def test_the_bias_keeps_its_format_when_a_model_changes_its_own() -> None:
    router = Router(MoeSpec(experts=4, top_k=1, ffn=8, bias=True), 6)
    assert router.bias is not None
    router.bias.fill_(1.001)
    moved = router.to(torch.bfloat16)
    assert moved.weight.dtype == torch.bfloat16
    assert (
        moved.bias is not None
        and moved.bias.dtype == torch.float32
        and float(moved.bias[0]) == pytest.approx(1.001)
    )


def test_bf16_is_near_fp64() -> None:
    layer, x = mixture(shared_ffn=16), torch.randn(2, 64, 32, dtype=torch.float64)
    exact = layer(x)
    rounded = layer.bfloat16()(x.bfloat16()).double()
    near = (rounded - exact).norm(dim=-1) <= 0.03 * exact.norm(dim=-1)
    assert near.double().mean() > 0.9  # a token whose best experts are nearly tied may take another
