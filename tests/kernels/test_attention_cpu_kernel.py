"""Attention in C++ is that of float64 in each format."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from attention_kernel_cases import ROUNDED, SHAPES, documents, draw, with_gradients
from meshwright.cpp_library import cache_folder
from meshwright.kernels import attention_cpu_kernel as kernel
from meshwright.kernels import cpu_kernels
from meshwright.kernels.processor import SUPPORTED

pytestmark = pytest.mark.skipif(
    cpu_kernels.library() is None, reason="kernels in C++ need g++, Linux and a processor with AVX2"
)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.fixture(params=["fp32", "bf16_by_fp32", "fp16_by_fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The format of tensors for one of the source's functions. On processors without products in bf16 those
    of oneDNN are replaced by loops."""
    one = {"fp32": torch.float32, "fp16_by_fp32": torch.float16}.get(request.param, torch.bfloat16)
    library = cpu_kernels.library()
    if request.param == "bf16" and not SUPPORTED[one]():
        library = ctypes.CDLL(str(cpu_kernels.KERNELS.build(cache_folder(), "-DPLAIN_PRODUCTS")))

    def name(dtype: torch.dtype) -> str | None:
        return request.param if dtype == one else None

    with patch.multiple(kernel, _name=name, library=lambda: library, _works=lambda _: True):
        yield one


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_attention_in_float64_rounded(dtype: torch.dtype, shape: tuple[int, ...], masked: bool) -> None:
    inputs, grad = draw(dtype, *shape)
    batch, queries, keys = shape[:3]
    mask = documents(dtype, queries, keys, batch) if masked and queries == keys else None
    assert (mask is not None) == (masked and queries == keys)
    assert kernel.takes(*inputs, None)
    exact = [x.double() for x in inputs]
    wanted = with_gradients(exact, None if mask is None else mask.double(), grad.double())
    for found, value in zip(with_gradients(inputs, mask, grad), wanted, strict=True):
        assert found.dtype == dtype and error(found, value) < ROUNDED[dtype]


def test_log_sums_are_those_of_the_scores(dtype: torch.dtype) -> None:
    """From the kernel, and from torch's operators in float64."""
    inputs, _ = draw(dtype, *SHAPES["cached keys, narrow values"])
    q, k, v = (x.double() for x in inputs)
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(4, 2)) * q.shape[-1] ** -0.5
    later = torch.ones(33, 130, dtype=torch.bool).triu_(130 - 33 + 1)
    wanted = scores.masked_fill(later, -torch.inf).logsumexp(-1)
    forward = torch.ops.meshwright.blocked_attention
    assert error(forward(*inputs, None)[1], wanted) < 1e-6
    with patch.object(kernel, "takes", lambda *_: False):
        torch.testing.assert_close(forward(q, k, v, None)[1], wanted)


def test_threads_change_no_bit() -> None:
    inputs, grad = draw(torch.float32, *SHAPES["four tiles"])
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(with_gradients(inputs, None, grad))
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    inputs, grad = draw(torch.float32, *SHAPES["four tiles"])
    inputs[0][1, 100, 3, 5] = value
    out, grad_q, *_ = with_gradients(inputs, None, grad)
    assert out[1, 100, 3].isnan().all() and grad_q[1, 100, 3].isnan().all()
    out[1, 100, 3] = 0
    assert out.isfinite().all()


def test_scores_of_any_size_are_softened() -> None:
    inputs, grad = draw(torch.float32, *SHAPES["several tiles of keys"])
    inputs[0] *= 1000
    wanted = with_gradients([x.double() for x in inputs], None, grad.double())
    for found, value in zip(with_gradients(inputs, None, grad), wanted, strict=True):
        assert error(found, value) < 1e-3  # scores of thousands have errors of some 1e-4


def test_what_it_leaves_to_operators() -> None:
    inputs, _ = draw(torch.float32, *SHAPES["parts of tiles"])
    assert kernel.takes(*inputs, None)
    assert not kernel.takes(*(x.double() for x in inputs), None)
    assert not kernel.takes(*(x[..., :15] for x in inputs), None)
    mask = torch.zeros(1, 1, 77, 77)
    assert kernel.takes(*inputs, mask)
    for other in (mask.double(), mask[..., :76], mask.expand(1, 4, 77, 77)):
        assert not kernel.takes(*inputs, other)
    with patch("torch.get_num_threads", lambda: 5):  # four key heads of one sequence
        assert not kernel.takes(*inputs, None)


def test_where_onednn_has_no_kernel_operators_compute() -> None:
    """A run is told once, and goes on."""
    inputs, grad = draw(torch.float32, *SHAPES["parts of tiles"])
    wanted = with_gradients([x.double() for x in inputs], None, grad.double())
    kernel._works.cache_clear()
    failing = Mock(spec_set=["fp32_forward"], fp32_forward=lambda *_: False)
    with (
        patch.object(kernel, "library", lambda: failing),
        pytest.warns(UserWarning, match="no kernel of oneDNN's.*as is done now") as told,
    ):
        found = with_gradients(inputs, None, grad)
    kernel._works.cache_clear()
    assert len(told) == 1
    for mine, exact in zip(found, wanted, strict=True):
        assert error(mine, exact) < ROUNDED[torch.float32]
