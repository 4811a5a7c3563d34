"""A mixture of experts against loops over tokens, sequences and experts, in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.model.decoder import Decoder
from meshwright.model.experts import grouped_mm
from meshwright.model.init import init_whole_
from meshwright.model.moe import Moe
from meshwright.model.router import Router, within_capacity
from meshwright.model.token_dispatcher import ALIGN, TokenDispatcher
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
    assert all(size % ALIGN == 0 for size in dispatcher.sizes)
    owner = torch.arange(experts).repeat_interleave(torch.tensor(dispatcher.sizes))
    assert torch.equal(picked.flatten()[dispatcher.copy[dispatcher.row]], owner[dispatcher.row])
    x = torch.randn(tokens, 5, dtype=torch.float64, generator=draw)
    home = dispatcher.sum_copies(
        dispatcher.receive_back(
            dispatcher.send_back(dispatcher.receive(dispatcher.send(x, dispatcher.token)))
        )
    )
    copies = torch.full((tokens,), top_k) if admitted is None else admitted.sum(1)
    torch.testing.assert_close(home, x * copies.unsqueeze(1), rtol=1e-14, atol=1e-14)


def test_grouped_products_of_empty_groups() -> None:
    maps = torch.randn(3, 4, 5, dtype=torch.float64)
    assert grouped_mm(torch.randn(0, 5, dtype=torch.float64), maps, (0, 0, 0)).shape == (0, 4)


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
