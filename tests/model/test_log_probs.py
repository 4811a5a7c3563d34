"""Log-probabilities of a linear head equal the plain ones, with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.model.chunked_cross_entropy import IGNORE, VocabularyPart
from meshwright.model.log_probs import linear_log_probs


def draw(tokens: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 24, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, 24, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[::3] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets


def plain(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    logits = x @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logs, valid = logits.log_softmax(-1), targets != IGNORE
    found = logs.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(valid, found, 0), torch.where(valid, -(logs.exp() * logs).sum(-1), 0)


def weighted(found: tuple[Tensor, Tensor]) -> Tensor:
    """A scalar to which each log-probability and entropy has another weight."""
    weights = torch.arange(2 * len(found[0]), dtype=torch.float64).cos()
    return (torch.cat(found).double() * weights).sum()


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("chunk", [1, 7, 50, None])
def test_equals_the_definition_in_float64(chunk: int | None, softcap: float | None) -> None:
    x, weight, targets = draw(50, 31)
    expected = plain(x, weight, targets, softcap)
    found = linear_log_probs(x, weight, targets, chunk, softcap=softcap, entropy=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(weighted(expected), (x, weight))
    for grad, other in zip(torch.autograd.grad(weighted(found), (x, weight)), wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-11, atol=1e-12)


def test_without_entropies_their_numbers_and_gradients_are_nothing() -> None:
    x, weight, targets = draw(50, 31)
    found = linear_log_probs(x, weight, targets)
    assert not found[1].any()
    wanted = torch.autograd.grad(plain(x, weight, targets, None)[0].sum(), (x, weight))
    for grad, other in zip(torch.autograd.grad(found[0].sum(), (x, weight)), wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-11, atol=1e-12)


def test_parts_of_a_vocabulary_with_padding_join_to_the_whole() -> None:
    x, weight, targets = draw(50, 31)
    rows = [weight[:16], torch.cat([weight[16:], torch.full((1, 24), 7.0, dtype=torch.float64)])]
    numbers: list[Tensor] = []

    def run(rank: int, gather: object) -> tuple[Tensor, Tensor]:
        part = VocabularyPart(16 * rank, (16, 15)[rank], gather, rank, 2)  # type: ignore[arg-type]
        return linear_log_probs(x, rows[rank], targets, 8, part, entropy=True)

    def keep(own: Tensor) -> Tensor:
        numbers.append(own.clone())
        return torch.stack([own, own])

    for rank in range(2):
        run(rank, keep)
    found = [run(rank, lambda _: torch.stack(numbers)) for rank in range(2)]
    expected = plain(x, weight, targets, None)
    for both in found:
        for one, other in zip(both, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(weighted(expected), (x, weight))
    grads = [torch.autograd.grad(weighted(both), (x, weight)) for both in found]
    for index, other in enumerate(wanted):  # each part's share of both
        torch.testing.assert_close(grads[0][index] + grads[1][index], other, rtol=1e-11, atol=1e-12)


def test_a_target_that_is_all_but_certain_keeps_its_gradient() -> None:
    """1 - p is taken from the logarithm, and no difference of numbers close to 1."""
    x = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[20.0], [0.0]])
    (found,) = torch.autograd.grad(linear_log_probs(x, weight, torch.tensor([0]))[0].sum(), x)
    torch.testing.assert_close(found, torch.tensor([[20 / (1 + torch.tensor(20.0).exp())]]))
