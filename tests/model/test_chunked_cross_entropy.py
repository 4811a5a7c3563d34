"""The chunked loss equals the plain one, and never holds more than a chunk of logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model.chunked_cross_entropy import IGNORE, linear_cross_entropy
from meshwright.model.soft_targets import SoftTargets
from meshwright.parallel.loss_normalization import count_targets, weight_of_a_target
from meshwright.spec.distil import DistilSpec


def draw(tokens: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 24, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, 24, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[::3] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.T, targets, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 7, 50, 64, None])
def test_equals_plain_cross_entropy_in_float64(chunk: int | None) -> None:
    x, weight, targets = draw(50, 31)
    expected = plain(x, weight, targets)
    found = linear_cross_entropy(x, weight, targets, chunk=chunk)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(expected * 0.37, (x, weight))
    for grad, other in zip(torch.autograd.grad(found * 0.37, (x, weight)), wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [0.8, 30.0])
@pytest.mark.parametrize("chunk", [7, None])
def test_capped_logits_equal_the_definition(softcap: float, chunk: int | None) -> None:
    x, weight, targets = draw(50, 31)
    capped = softcap * torch.tanh(x @ weight.T / softcap)
    expected = F.cross_entropy(capped, targets, ignore_index=IGNORE, reduction="sum")
    found = linear_cross_entropy(x, weight, targets, chunk=chunk, softcap=softcap)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(expected * 0.37, (x, weight))
    for grad, other in zip(torch.autograd.grad(found * 0.37, (x, weight)), wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-12)


def test_capped_logits_with_a_teacher_equal_the_definition() -> None:
    x, weight, targets = draw(50, 31)
    teacher = torch.randn(50, 31, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    log_p = teacher.log_softmax(-1)
    how = DistilSpec(teacher="of a test", weight=0.25, temperature=2.0)
    capped = 0.8 * torch.tanh(x @ weight.T / 0.8)
    counted = targets != IGNORE
    kl = (log_p.exp() * (log_p - (capped / 2).log_softmax(-1))).sum(-1)[counted].sum()
    expected = 0.75 * F.cross_entropy(capped[counted], targets[counted], reduction="sum") + 0.25 * 4 * kl
    found = linear_cross_entropy(x, weight, targets, 7, soft=SoftTargets(how, log_p), softcap=0.8)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(expected, (x, weight))
    for grad, other in zip(torch.autograd.grad(found, (x, weight)), wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-12)


def test_bf16_sums_in_fp32() -> None:
    x, weight, targets = draw(400, 31, torch.bfloat16)
    found = linear_cross_entropy(x, weight, targets, chunk=16)
    assert found.dtype == torch.float32
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = plain(x64, weight64, targets)
    found.backward()
    exact.backward()
    assert abs(float(found.detach()) / float(exact.detach()) - 1) < 2e-3
    for parameter, reference in ((x, x64), (weight, weight64)):
        assert parameter.grad.dtype == torch.bfloat16
        assert float((parameter.grad.double() - reference.grad).norm() / reference.grad.norm()) < 1e-2


def test_without_gradients_only_the_loss_is_computed() -> None:
    x, weight, targets = draw(50, 31)
    with torch.no_grad():
        found = linear_cross_entropy(x, weight, targets, chunk=7)
    assert not found.requires_grad
    torch.testing.assert_close(found, plain(x, weight, targets).detach(), rtol=1e-12, atol=0)


def test_only_ignored_targets_give_zero() -> None:
    x, weight, targets = draw(9, 31)
    none = torch.full_like(targets, IGNORE)
    loss = linear_cross_entropy(x, weight, none, scale=weight_of_a_target(0))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not bool(x.grad.any()) and not bool(weight.grad.any())


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("with_grad", [True, False])
def test_no_tensor_is_larger_than_a_chunk_of_logits(with_grad: bool) -> None:
    tokens, vocab, chunk = 640, 100, 32
    x, weight, targets = draw(tokens, vocab)
    assert chunk * vocab < x.numel() < tokens * vocab
    with _Largest() as largest, torch.set_grad_enabled(with_grad):
        loss = linear_cross_entropy(x, weight, targets, chunk=chunk)
        if with_grad:
            loss.backward()
    assert largest.elements <= x.numel()


def test_parts_of_a_batch_add_up_to_its_mean() -> None:
    """Uneven parts, each divided by the global number of targets, sum to the mean over the whole."""
    x, weight, targets = draw(50, 31)
    total = count_targets(targets)
    expected = F.cross_entropy(x @ weight.T, targets, ignore_index=IGNORE)
    parts = [
        linear_cross_entropy(x[a:b], weight, targets[a:b], scale=weight_of_a_target(total))
        for a, b in ((0, 11), (11, 50))
    ]
    torch.testing.assert_close(parts[0] + parts[1], expected, rtol=1e-12, atol=0)
