"""The Triton kernels of the loss, interpreted, against float64, with bounds that follow from the formats.

With unit roundoff u, exponentials and sums in fp32 leave a probability off by some u(fp32) for each unit of
its logarithm; a gradient is then rounded once, to the format of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.model.chunked_cross_entropy import VocabularyPart

IGNORED = -100
FORMATS = (torch.bfloat16, torch.float16, torch.float32)
FP32 = torch.finfo(torch.float32).eps / 2
WIDTHS = (1, 31, 1003, 16384, 20001)
"""Less than a block, one, and several with a rest."""


def case_of(columns: int, dtype: torch.dtype, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits (N, V), and targets: the first and the last column, an ignored one, and a likely one."""
    generator = torch.Generator().manual_seed(columns)
    logits = (torch.randn(6, columns, generator=generator) * spread).to(dtype)
    targets = torch.randint(0, columns, (6,), generator=generator)
    targets[0], targets[1], targets[2] = 0, columns - 1, IGNORED
    logits[3, targets[3]] = 5 * spread  # its probability is close to 1
    return logits, targets


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def exact(logits: Tensor, targets: Tensor, factor: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Losses and the gradient by logits in float64."""
    leaf = logits.double().requires_grad_()
    logs = capped(leaf, softcap).log_softmax(-1)
    valid = targets != IGNORED
    losses = -logs.gather(1, targets.clamp(min=0)[:, None]).squeeze(1).where(valid, 0)
    (gradient,) = torch.autograd.grad(losses[valid].sum() * factor, leaf)
    return losses.detach(), gradient


def hold(found: Tensor, wanted: Tensor, logits: Tensor, factor: float, what: object) -> None:
    """Assert that gradients are those of float64 within the roundings of fp32 and of their own format."""
    width = float((logits.double().amax(-1) - logits.double().amin(-1)).nan_to_num(posinf=0).max())
    format = torch.finfo(found.dtype)
    relative = format.eps / 2 + (16 + 4 * width) * FP32
    allowed = relative * wanted.abs() + format.smallest_normal * format.eps / 2 + FP32 * 2e-3 * abs(factor)
    wrong = (found.double() - wanted).abs() > allowed
    assert not wrong.any(), (what, found[wrong][:4], wanted[wrong][:4])


def whole_vocabulary() -> None:
    from meshwright.kernels.triton.cross_entropy import cross_entropy_

    for dtype in FORMATS:
        for columns in WIDTHS:
            for softcap in (None, 8.0):
                logits, targets = case_of(columns, dtype)
                losses, gradient = exact(logits, targets, 0.25, softcap)
                found = logits.clone()
                ours = cross_entropy_(found, targets, IGNORED, 0.25, softcap)
                largest = float(capped(logits.double(), softcap).abs().max())
                assert ours.dtype == torch.float32 and ours[2] == 0
                error = float((ours.double() - losses).abs().max())
                assert error <= (16 + 4 * largest) * FP32, (dtype, columns, softcap, error)
                hold(found, gradient, logits, 0.25, (dtype, columns, softcap))
                assert not found[2].any()


def edges() -> None:
    from meshwright.kernels.triton.cross_entropy import cross_entropy_

    inf, nan = float("inf"), float("nan")
    for dtype in FORMATS:
        # All logits -inf but one, which is the target, or is not.
        logits = torch.full((2, 300), -inf, dtype=dtype)
        logits[:, 7] = 2.0
        losses = cross_entropy_(logits, torch.tensor([7, 8]), IGNORED, 1.0, None)
        assert losses.tolist() == [0.0, inf]
        assert not logits[0].any()
        assert logits[1].nonzero().squeeze(1).tolist() == [7, 8] and logits[1, 7] == 1 and logits[1, 8] == -1
        # Large logits, of which the softmax is one number.
        logits = torch.full((2, 300), -1e4, dtype=dtype)
        logits[:, 9] = 1e4
        expected, gradient = exact(logits, torch.tensor([9, 0]), 1.0, None)
        losses = cross_entropy_(logits, torch.tensor([9, 0]), IGNORED, 1.0, None)
        assert torch.equal(losses.double(), expected) and torch.equal(logits.double(), gradient)
        # Ignored rows are not read; a target of no column and logits that are not numbers give none.
        logits = torch.full((4, 300), nan, dtype=dtype)
        logits[1:3] = 0
        logits[3, 250] = 0
        losses = cross_entropy_(logits, torch.tensor([IGNORED, 300, -1, 250]), IGNORED, 1.0, None)
        assert losses[0] == 0 and not logits[0].any() and losses[1:].isnan().all()
    # The share of the others is exact also where the target's probability rounds to 1.
    logits = torch.zeros(1, 3)
    logits[0, 0] = 20.0
    losses, gradient = exact(logits, torch.tensor([0]), 1.0, None)
    found = logits.clone()
    cross_entropy_(found, torch.tensor([0]), IGNORED, 1.0, None)
    torch.testing.assert_close(found.double(), gradient, rtol=4e-6, atol=0)
    # Rows that are not adjacent, none at all, and targets of another width.
    wide = torch.randn(4, 64)
    part, targets = wide[:, :40].clone(), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    rest = wide[:, 40:].clone()
    cross_entropy_(wide[:, :40], targets, IGNORED, 1.0, None)
    cross_entropy_(part, targets.long(), IGNORED, 1.0, None)
    assert torch.equal(wide[:, :40], part) and torch.equal(wide[:, 40:], rest)
    assert len(cross_entropy_(torch.empty(0, 40), torch.empty(0, dtype=torch.int64), IGNORED, 1.0, None)) == 0


def parts_of_a_vocabulary() -> None:
    from meshwright.kernels.triton.cross_entropy import softmax_gradient_, softmax_statistics

    for dtype in FORMATS:
        for softcap in (None, 8.0):
            logits, targets = case_of(1003, dtype)
            logits[4, :400] = float("-inf")  # nothing of a part, where nothing is capped
            bounds, padding = [(0, 400), (400, 950), (950, 1003)], 5
            junk = torch.full((6, padding), 77.0, dtype=dtype)
            parts = [torch.cat([logits[:, a:b], junk], 1) for a, b in bounds]
            given = [(a, b - a, softcap) for a, b in bounds]
            numbers = torch.stack(
                [softmax_statistics(z, targets, IGNORED, *g, True) for z, g in zip(parts, given, strict=True)]
            ).double()
            log_sum, target = numbers[:, 0].logsumexp(0), numbers[:, 1].sum(0)
            mean = ((numbers[:, 0] - log_sum).exp() * numbers[:, 2]).sum(0)
            z = capped(logits.double(), softcap)
            p, valid = z.softmax(-1), targets != IGNORED
            bound = (16 + 4 * float(z.nan_to_num(neginf=0).abs().max())) * FP32
            torch.testing.assert_close(log_sum[valid], z.logsumexp(-1)[valid], rtol=0, atol=bound)
            own = z.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
            torch.testing.assert_close(target[valid], own[valid], rtol=0, atol=bound)
            expected = torch.where(p > 0, p * z, 0).sum(-1)
            torch.testing.assert_close(mean[valid], expected[valid], rtol=0, atol=8 * bound)
            assert not numbers[:, :, 2].any()
            without = softmax_statistics(parts[0], targets, IGNORED, *given[0], False)
            assert torch.equal(without.double(), numbers[0, :2])
            for slopes in (None, torch.tensor([0.5, -2, 0, 1, 0.25, 3])):
                factors = torch.tensor([1.0, 0.5, 0, 2, -1, 0.25])
                at_targets = torch.tensor([-1.0, -0.5, 0, -0.125, 1, 4])
                by_row = log_sum.float(), factors, at_targets, slopes
                pieces = []
                for part, (first, rows, _) in zip(parts, given, strict=True):
                    piece = part.clone()
                    softmax_gradient_(piece, targets, *by_row, first, rows, softcap)
                    assert not piece[:, rows:].any()
                    pieces.append(piece[:, :rows])
                found = torch.cat(pieces, 1)
                logs = z - z.logsumexp(-1, keepdim=True)
                by = factors.double()[:, None]
                if slopes is not None:
                    by = by + slopes.double()[:, None] * logs.nan_to_num(neginf=0)
                wanted = p * by
                here = valid.nonzero().squeeze(1)
                wanted[here, targets[here]] = at_targets.double()[here]
                if softcap is not None:
                    wanted *= 1 - (z / softcap) ** 2
                hold(found, wanted, logits.nan_to_num(neginf=0), 4.0, (dtype, softcap, slopes))


def products() -> None:
    from meshwright.kernels.triton import cross_entropy as kernels

    for dtype in FORMATS:
        for elements in (1, 2048, 5000, 2048 * 3 + 1):
            x = torch.randn(elements).to(dtype)
            found = x.clone()
            kernels.multiply_(found, torch.tensor(0.37))
            assert torch.equal(found, (x.float() * torch.tensor(0.37)).to(dtype))
            kernels.multiply_(found, torch.tensor(1.0))
            assert torch.equal(found, (x.float() * torch.tensor(0.37)).to(dtype))
    kernels._MOST_PROGRAMS = 2  # each takes several pieces
    x = torch.randn(9000)
    found = x.clone()
    kernels.multiply_(found, torch.tensor(2.0))
    assert torch.equal(found, 2 * x)


def _drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, D), a weight (V, D), and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 24, generator=generator).to(dtype) for n in (10, 131))
    targets = torch.randint(0, 131, (10,), generator=generator)
    targets[::3] = IGNORED
    return x, weight, targets


def _in_parts(
    compute: Callable[[VocabularyPart, Tensor], list[Tensor]], weight: Tensor
) -> list[list[Tensor]]:
    """Results of `compute` for two parts of a vocabulary, the second padded by a row, which exchange numbers:
    it is called once for each to send them, and once more to receive."""
    rows = [weight[:70], torch.cat([weight[70:], torch.full_like(weight[:1], 7.0)])]
    sent: list[list[Tensor]] = [[], []]

    def gather(rank: int, received: Iterator[Tensor] | None, own: Tensor) -> Tensor:
        sent[rank] += [] if received else [own.clone()]
        return torch.stack([own, own]) if received is None else next(received)

    def run(rank: int, received: Iterator[Tensor] | None) -> list[Tensor]:
        part = VocabularyPart(70 * rank, (70, 61)[rank], partial(gather, rank, received), rank, 2)
        return compute(part, rows[rank])

    for rank in range(2):
        run(rank, None)
    both = [torch.stack(numbers) for numbers in zip(*sent, strict=True)]
    return [run(rank, iter(both)) for rank in range(2)]


def _whole_gradients(parts: list[list[Tensor]]) -> list[Tensor]:
    """Gradients of x, summed over parts, and of the weight, without the padding, whose gradient is 0."""
    (x_first, first), (x_second, second) = ([each.double() for each in part[-2:]] for part in parts)
    assert not second[61:].any()
    return [x_first + x_second, torch.cat([first, second[:61]])]


def head() -> None:
    """The heads that the program calls take the kernels."""
    from meshwright.kernels import cross_entropy
    from meshwright.kernels.triton import cross_entropy as kernels
    from meshwright.model.chunked_cross_entropy import linear_cross_entropy
    from meshwright.model.log_probs import linear_log_probs

    for name in ("cross_entropy_", "softmax_statistics", "softmax_gradient_", "multiply_"):
        torch.library.impl(f"meshwright::{name}", "CPU", getattr(kernels, name))
    cross_entropy.takes_triton = lambda _device: True

    def loss(x: Tensor, targets: Tensor, chunk: Any, softcap: Any, part: Any, weight: Tensor) -> list[Tensor]:
        x, weight = (each.detach().clone().requires_grad_() for each in (x, weight))
        found = linear_cross_entropy(x, weight, targets, chunk, part, 0.125, softcap=softcap)
        return [found.detach(), *torch.autograd.grad(found * 0.37, (x, weight))]

    def log_probs(
        x: Tensor, targets: Tensor, chunk: Any, softcap: Any, part: Any, weight: Tensor
    ) -> list[Tensor]:
        x, weight = (each.detach().clone().requires_grad_() for each in (x, weight))
        found = linear_log_probs(x, weight, targets, chunk, part, softcap, entropy=True)
        by = 2 + torch.arange(2 * len(x)).cos()
        value = (torch.cat(found).double() * by).sum()
        return [value.detach(), *torch.autograd.grad(value, (x, weight))]

    for dtype in (torch.bfloat16, torch.float32):
        x, weight, targets = _drawn(dtype)
        # Gradients of entropies are differences, of which more is lost.
        for compute, times in ((loss, 1), (log_probs, 2)):
            for softcap in (None, 8.0):
                exact = compute(x.double(), targets, None, softcap, None, weight.double())
                roundings = 2 * float((x.double() @ weight.double().T).abs().max()) + 4
                bound = times * roundings * torch.finfo(dtype).eps / 2
                for chunk in (None, 4):
                    found = compute(x, targets, chunk, softcap, None, weight)
                    assert found[1].dtype == found[2].dtype == dtype
                    _close(found, exact, bound)
                parts = _in_parts(partial(compute, x, targets, 4, softcap), weight)
                for part in parts:
                    _close([part[0], *_whole_gradients(parts)], exact, bound)
        with torch.no_grad():
            alone = linear_cross_entropy(x, weight, targets, 4, scale=0.125)
        assert not alone.requires_grad
        _close([alone], loss(x.double(), targets, None, None, None, weight.double())[:1], bound)


def _close(found: list[Tensor], exact: list[Tensor], bound: float) -> None:
    """Assert that relative errors in norm are within a bound."""
    for ours, wanted in zip(found, exact, strict=True):
        error = float((ours.double() - wanted).norm() / wanted.norm())
        assert error <= bound, (error, bound, ours.dtype)


@pytest.mark.parametrize("check", [whole_vocabulary, edges, parts_of_a_vocabulary, products, head])
def test_kernels_equal_float64(interpreted: Callable[..., Any], check: Callable[[], None]) -> None:
    interpreted(check)
