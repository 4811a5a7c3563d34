"""Norms, SwiGLU, rotary positions and cross-entropy in C++ are torch's operators in float64, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import cpu_kernels, elementwise_cpu
from meshwright.model.chunked_cross_entropy import IGNORE, linear_cross_entropy
from meshwright.model.expert_activations import _swiglu as inner
from meshwright.model.expert_activations import _swiglu_backward_ as inner_backward_
from meshwright.model.mlp import _SiluProduct, swiglu
from meshwright.model.norm import RmsNorm
from meshwright.model.rope import rotate, with_signs

pytestmark = pytest.mark.skipif(
    cpu_kernels.library() is None, reason="kernels in C++ need g++, Linux and a processor with AVX2"
)
ROUNDED = {torch.float32: 5e-7, torch.bfloat16: 3e-3}
"""Largest relative errors of results that are rounded once, or are products of such."""
kernels_take = elementwise_cpu.takes
FORMATS = pytest.mark.parametrize("dtype", ROUNDED, ids=["fp32", "bf16"])


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def compare(compute: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Hold the output and the gradients of a function by kernels to those by operators in float64."""
    taken = []

    def takes(*tensors: Tensor) -> bool:
        taken.append(kernels_take(*tensors))
        return taken[-1]

    def results(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = compute(*leaves)
        grad = drawn(inputs[0].dtype, *out.shape).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    with patch.object(elementwise_cpu, "takes", takes):
        found = results(inputs[0].dtype)
    assert taken and all(taken)  # in the forward and in the backward
    for mine, exact in zip(found, results(torch.float64), strict=True):
        assert mine.dtype in (inputs[0].dtype, torch.float32)
        assert (mine.double() - exact).norm() <= ROUNDED[inputs[0].dtype] * exact.norm()


@FORMATS
@pytest.mark.parametrize("shape", [(300, 64), (2, 3, 130), (1, 5)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        module = RmsNorm(shape[-1], 1e-2).to(x.dtype)
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    compare(norm, drawn(dtype, *shape), drawn(dtype, shape[-1]))


@FORMATS
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    x, grad, weight = drawn(dtype, 1000, 96), drawn(dtype, 1000, 96) + 1, drawn(dtype, 96)
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y, scale = elementwise_cpu.rms_norm(x, weight, 1e-5)
            found.append((y, scale, *elementwise_cpu.rms_norm_backward(grad, x, weight, scale)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))


@FORMATS
def test_swiglu(dtype: torch.dtype) -> None:
    compare(_SiluProduct.apply, 8 * drawn(dtype, 7, 3001), drawn(dtype, 7, 3001))


def test_swiglu_of_any_number() -> None:
    """Where its exponential leaves fp32 either way, and of what is not finite."""
    gate = torch.tensor([-1e30, -200.0, -88.0, -87.0, -0.0, 0.0, 87.0, 88.0, 200.0, 1e30, torch.nan])
    wanted = torch.nn.functional.silu(gate.double()).float()
    torch.testing.assert_close(swiglu(gate, torch.ones(11)), wanted, equal_nan=True, rtol=1e-6, atol=1e-35)


@FORMATS
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "operators"])
def test_weighted_swiglu(dtype: torch.dtype, kernel: bool) -> None:
    """The activation of experts, whose backward computes its result again in the place of the gradient."""
    gate, up, weight = 8 * drawn(dtype, 70, 301), drawn(dtype, 70, 301), drawn(torch.float32, 70)
    weight[3] = 0
    grad = drawn(dtype, 70, 301)
    exact = [x.double().requires_grad_() for x in (gate, up, weight)]
    y = F.silu(exact[0]) * exact[1] * exact[2].unsqueeze(1)
    wanted = [y.detach(), *torch.autograd.grad(y, exact, grad.double())]
    with patch.object(elementwise_cpu, "takes", lambda *given: kernel and kernels_take(*given)):
        out = inner(gate, up, weight)
        *found, again = inner_backward_(grad, gate, up, weight)
    assert torch.equal(again, out) and (again is grad) == kernel
    assert [x.dtype for x in found] == [dtype, dtype, torch.float32]
    for mine, right in zip([out, *found], wanted, strict=True):
        bound = ROUNDED[dtype] * (1 if kernel else 3)  # operators round between
        assert (mine.double() - right).norm() <= bound * right.norm()


@FORMATS
@pytest.mark.parametrize("turned", [48, 32])
@pytest.mark.parametrize("tables", [(), (1,), (3,)], ids=["shared", "one", "each"])
@pytest.mark.parametrize("signs", [False, True])
def test_rotary_positions(dtype: torch.dtype, turned: int, tables: tuple[int, ...], signs: bool) -> None:
    angles = drawn(dtype, *tables, 70, 1, turned // 2).double()
    rope = torch.cat([angles.cos()] * 2, -1).to(dtype), angles.sin().to(dtype)
    if signs:
        rope = with_signs(rope)

    def turn(x: Tensor) -> Tensor:
        return rotate(x, (rope[0].to(x.dtype), rope[1].to(x.dtype)))

    compare(turn, drawn(dtype, 3, 70, 4, 48))


@FORMATS
@pytest.mark.parametrize("graded", [False, True])
def test_cross_entropy(dtype: torch.dtype, graded: bool) -> None:
    logits, targets = 4 * drawn(dtype, 50, 1000), torch.randint(1000, (50,))
    targets[3] = IGNORE
    logits[5, targets[5]] = 60  # a probability that rounds to 1
    exact = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, targets, reduction="none", ignore_index=IGNORE)
    wanted.sum().backward()
    given = logits.clone()
    losses = elementwise_cpu.cross_entropy_(given, targets, IGNORE, graded, 0.125)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-5, atol=1e-25)
    assert losses[3] == 0
    if not graded:
        assert torch.equal(given, logits)
        return
    assert exact.grad is not None
    slopes = 0.125 * exact.grad
    assert (given.double() - slopes).norm() <= ROUNDED[dtype] * slopes.norm() and not given[3].any()
    # The target's gradient p - 1 keeps its digits where p is almost 1.
    torch.testing.assert_close(given[5, targets[5]].double(), slopes[5, targets[5]], rtol=5e-3, atol=0)


@FORMATS
def test_loss_of_the_head(dtype: torch.dtype) -> None:
    targets = torch.randint(100, (90,), generator=torch.Generator().manual_seed(1))

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, chunk=32)

    x, weight = drawn(dtype, 90, 64), drawn(dtype, 100, 64)
    with patch.dict(ROUNDED, {torch.float32: 1e-6, torch.bfloat16: 1e-2}):  # logits are rounded, too
        compare(loss, x, weight)


@pytest.mark.parametrize("wrong", [8, -1, -99])
def test_a_target_beyond_the_vocabulary_is_refused(wrong: int) -> None:
    logits = torch.zeros(3, 8)
    with pytest.raises(IndexError, match=f"target {wrong} is not one of 8 logits, nor -100"):
        elementwise_cpu.cross_entropy_(logits, torch.tensor([7, IGNORE, wrong]), IGNORE, True, 1.0)
    assert not logits.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_not_hidden(value: float) -> None:
    logits = torch.ones(2, 40)
    logits[1, 20] = value
    losses = elementwise_cpu.cross_entropy_(logits, torch.tensor([3, 3]), IGNORE, True, 1.0)
    assert losses[0].isfinite() and not losses[1].isfinite()
    assert logits[0].isfinite().all() and not logits[1].isfinite().all()


def test_tables_of_other_sizes_are_left_to_operators() -> None:
    """A kernel would read beyond them: those that broadcast compute, and others are refused."""
    x, cosine, sine = drawn(torch.float32, 3, 70, 4, 48), torch.ones(70, 1, 48), torch.ones(70, 1, 24)
    assert elementwise_cpu.tables_fit(x, cosine, sine)
    one = cosine[:1], sine[:1]
    assert not elementwise_cpu.tables_fit(x, *one)
    assert torch.equal(rotate(x, one), rotate(x, (cosine, sine)))
    with pytest.raises(RuntimeError, match="must match the size"):
        rotate(x, (cosine[:69], sine[:69]))


def test_what_is_left_to_operators() -> None:
    x = torch.ones(4, 6)
    assert elementwise_cpu.takes(x, x)
    for other in (x.double(), x.bfloat16(), x.t(), x[:, ::2], torch.empty(4, 6, device="meta")):
        assert not elementwise_cpu.takes(x, other)
    assert not elementwise_cpu.takes(x.half()) and not elementwise_cpu.takes(x.double())
    compiled = torch.compile(lambda y: swiglu(y, y) + 1, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), swiglu(x, x) + 1)
