"""Dropout of adapters: the share that is dropped, and that parts of an input drop what the whole does."""

from __future__ import annotations

import pytest
import torch

from meshwright.model.lora_dropout import Dropout, TokenKeys, token_keys


def dropout(share: float, seed: int = 0, update: int = 3, name: str = "blocks.0.attn.q.weight") -> Dropout:
    keys = TokenKeys()
    keys.current = token_keys(seed, update, torch.arange(5, 9), torch.arange(16))
    return Dropout(share, name, keys)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_share_is_dropped_and_the_mean_stays(share: float) -> None:
    found = dropout(share)(torch.ones(4, 16, 4096, dtype=torch.float64))
    assert (found == 0).double().mean().item() == pytest.approx(share, abs=0.005)
    assert found.mean().item() == pytest.approx(1, rel=0.03)


def test_ranks_drop_their_part_of_what_one_device_drops() -> None:
    x = torch.randn(4, 16, 36, dtype=torch.float64)
    drop = dropout(0.4)
    whole = drop(x)
    pieces, dropped = (each.view(4, 4, 4, 36) for each in (x, whole))  # of all samples' tokens, by rank
    for shard in range(4):
        assert torch.equal(drop(pieces[shard], shard=shard), dropped[shard])
    for first, channels in ((0, 18), (18, 18), (5, 7)):
        columns = slice(first, first + channels)
        assert torch.equal(drop(x[..., columns], first=first), whole[..., columns])


def test_layers_updates_and_seeds_drop_others_and_the_backward_the_same() -> None:
    x = torch.ones(4, 16, 64, dtype=torch.float64, requires_grad=True)
    once = dropout(0.5)(x)
    once.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, once)
    for other in (dropout(0.5, seed=1), dropout(0.5, update=4), dropout(0.5, name="blocks.1.attn.q.weight")):
        assert (other(x) == once).double().mean().item() == pytest.approx(0.5, abs=0.05)
    assert dropout(0.0)(x) is x


def test_nothing_is_dropped_without_keys() -> None:
    x = torch.ones(1, 2, 8)
    assert Dropout(0.5, "blocks.0.attn.q.weight", TokenKeys())(x) is x
