"""The experts that a layout's tokens chose, put together from all ranks, and whether rounding explains them.

A token whose scores are nearly equal chooses others in another rounding, and that moves gradients by far more
than rounding does. So the reference computes with the experts that the run chose, and each choice is held to
the exact scores: what is chosen is among the largest, but for the rounding of scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from meshwright.model.router import Router, Routing
from meshwright.parallel.pipeline_parallel import ActionHook
from meshwright.schedule import Action, Kind
from meshwright.spec import MoeSpec, RunSpec
from meshwright.train.step import Trainer
from meshwright.verify.measured import MARGIN, Measurements
from meshwright.verify.module_sums import own_tokens
from meshwright.verify.reference.decoder import scores_of_groups
from meshwright.verify.rounding import Gradients

Row = tuple[int, int, list[list[int]]]
"""Layer, microbatch, and the experts (N, k) of the rank's tokens."""
Found = list[tuple[list[int], list[Row]]]
"""(data rank, context rank, tensor rank) and rows of each rank."""


class ChosenExperts(ActionHook):
    """The experts that this rank's tokens choose in the forward of a step within the `with` block."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._rows = trainer, list[tuple[int, int, Tensor]]()
        self._action: Action | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        pipeline = self._trainer.pipeline
        watch, pipeline.watch = pipeline.watch, self
        self._stack.callback(lambda: vars(pipeline).update(watch=watch))
        for name, module in self._trainer.decoder.named_modules():
            if isinstance(module, Router):
                note = partial(self._note, int(name.split(".")[1]))
                self._stack.callback(module.register_forward_hook(note).remove)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def before(self, action: Action) -> None:
        """Note which action computes next."""
        self._action = action

    def _note(self, layer: int, _module: nn.Module, _inputs: Any, routing: Routing) -> None:
        action = self._action
        if action is not None and action.kind is Kind.F:  # and not a forward that is computed again
            self._rows.append((layer, action.microbatch, routing.experts.detach()))

    def gathered(self) -> Found:
        """Return what all ranks have found; collective over the mesh."""
        mesh = self._trainer.mesh
        rows = [(layer, micro, experts.tolist()) for layer, micro, experts in self._rows]
        return mesh.control.gather([[mesh.data_rank, mesh.context.rank, mesh.tensor.rank], rows])


def whole(found: Found, spec: RunSpec) -> dict[int, Tensor]:
    """The experts (n, T, k) of all tokens of a step's batch by layer; -1 where ranks chose different ones."""
    length, count = spec.data.seq_len, spec.batch_sequences
    chosen: dict[int, Tensor] = {}
    for (data, context, tensor), rows in found:
        for layer, microbatch, listed in rows:
            experts = torch.tensor(listed)
            first = data * spec.rank_sequences + microbatch * spec.micro_batch
            slots = torch.arange(first, first + spec.micro_batch)
            places = slots.unsqueeze(1) * length + torch.arange(length)
            own = own_tokens(places, spec, context, tensor, len(experts) // spec.micro_batch)
            into = chosen.setdefault(layer, torch.full((count * length, experts.shape[1]), -2))
            before = into[own]
            same = (before == experts) | (before == -2)
            into[own] = torch.where(same, experts, torch.full_like(experts, -1))
    return {layer: each.view(count, length, -1) for layer, each in sorted(chosen.items())}


def compare_routing(
    into: Measurements,
    step: int,
    moe: MoeSpec,
    biases: Mapping[str, Tensor],
    exact: Gradients,
    draws: Sequence[Gradients],
) -> None:
    """Compare the chosen experts of each layer with those of the largest exact scores, beside the largest
    difference of scores that `draws` have."""
    for layer, routing in exact.routings.items():
        noise = max(float((draw.routings[layer].scores - routing.scores).abs().max()) for draw in draws)
        bias = biases.get(f"blocks.{layer}.mlp.router.bias")
        values = routing.scores if bias is None else routing.scores + bias
        off, tolerance = _beyond(moe, values, routing.experts, MARGIN * noise), MARGIN * noise
        name = f"blocks.{layer}.mlp.router"
        into.add(
            step, "routing", name, off, tolerance,
            f"step {step}: {name} chose experts whose scores are {off:.1e} below those of others; rounding "
            f"explains {tolerance:.1e}",
        )  # fmt: skip


def _beyond(moe: MoeSpec, values: Tensor, experts: Tensor, slack: float) -> float:
    """How far the least value of a chosen expert is below that of another, at most over all tokens.

    Experts of groups that may be hidden, or not, within `slack` count in a token's favour.
    """
    if bool((experts < 0).any()):  # ranks disagree
        return math.inf
    taken = torch.zeros_like(values, dtype=torch.bool).scatter_(-1, experts, True)
    if bool((taken.sum(-1) != moe.top_k).any()):
        return math.inf
    others = values.masked_fill(taken, -math.inf)
    off = 0.0
    if moe.top_groups < moe.groups:
        of_group, summed = scores_of_groups(moe, values), 2 if moe.group_score == "top2" else 1
        least = of_group.topk(moe.top_groups).values[..., -1:]
        with_taken = taken.unflatten(-1, (moe.groups, -1)).any(-1)
        off = float((least - of_group).masked_fill(~with_taken, 0).max()) / summed
        surely = of_group > least + summed * slack
        others = others.masked_fill(~surely.repeat_interleave(moe.experts // moe.groups, -1), -math.inf)
    lowest = values.masked_fill(~taken, math.inf).amin(-1)
    return max(off, float((others.amax(-1) - lowest).max()), 0.0)
