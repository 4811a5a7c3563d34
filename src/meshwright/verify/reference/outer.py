"""Training steps of islands, written apart from what `meshwright verify` checks.

Each island is a run of one device by itself, on its share of each batch. Between their steps the outer rule
is applied by hand, as the papers state it: DiLoCo (Douillard et al. 2023, algorithm 1) and Streaming DiLoCo
(Douillard et al. 2025, algorithm 2); what a compressed exchange sends is in `compression.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.spec import RunSpec
from meshwright.spec.outer import scripted_arrivals
from meshwright.verify.reference.batches import batch_sizes
from meshwright.verify.reference.compression import Messages
from meshwright.verify.reference.groups import is_frozen
from meshwright.verify.reference.steps import SAMPLES, ReferenceStep, reference_steps
from meshwright.verify.reference.sums import PHASES

Weights = dict[str, Tensor]
"""Parameters and routers' biases by name."""
OF_ISLANDS = ("loss", "gradient", "grad norm", "parameter", "router bias")
"""Kinds of values that, beside moments, each island has by itself, as `island.<number>/<name>`."""


class _Result(NamedTuple):
    """A fragment's mean of what the islands moved by, which is used after step `due`."""

    due: int
    mean: Weights


class OuterRule:
    """The weights that the islands last agreed on, and the steps that the outer optimiser takes from them."""

    def __init__(self, spec: RunSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec, self.outer = spec, spec.outer
        self.agreed = {name: weight.detach().clone() for name, weight in weights.items()}
        self.momentum = {
            name: torch.zeros_like(weight)
            for name, weight in weights.items()
            if not name.endswith(".router.bias")
        }
        self._results: list[_Result] = []
        self.messages = Messages(spec)

    @torch.no_grad()
    def after(self, step: int, islands: list[Weights]) -> None:
        """Change the islands' weights as the exchanges that begin and end after a step change them."""
        period, parts, delay = self.outer.every, self.outer.fragments, self.outer.delay
        own = self.outer.alpha
        if own is None:
            own = 0.5 if delay > 0 else 0.0
        if step == self.spec.train.total_steps:
            for result in self._results:
                self._use(result.mean, islands, own)
            self._results = []
            self._use(self._mean(list(self.agreed), islands), islands, 0.0)
            return
        for result in [result for result in self._results if result.due == step]:
            self._use(result.mean, islands, own)
            self._results.remove(result)
        for part in range(parts):
            if (step - part * period // parts) % period == 0:
                mean = self._mean([name for name in self.agreed if self._fragment(name) == part], islands)
                if delay:
                    self._results.append(_Result(step + delay, mean))
                else:
                    self._use(mean, islands, own)

    def _fragment(self, name: str) -> int:
        words = name.split(".")
        if words[0] == "blocks":
            return int(words[1]) % self.outer.fragments
        first = words[0] == "embed" or self.spec.model.tied or self.spec.model.mtp_num_layers > 0
        return 0 if first else self.outer.fragments - 1

    def _mean(self, names: list[str], islands: list[Weights]) -> Weights:
        told = {
            name: [
                self.messages.sent(place, name, self.agreed[name] - island[name])
                for place, island in enumerate(islands)
            ]
            for name in names
        }
        return {name: torch.stack(each).mean(0) for name, each in told.items()}

    def _use(self, mean: Weights, islands: list[Weights], own: float) -> None:
        for name, moved in mean.items():
            if name in self.momentum:
                velocity = self.momentum[name] = self.outer.momentum * self.momentum[name] + moved
                step = moved + self.outer.momentum * velocity if self.outer.nesterov else velocity
                self.agreed[name] = self.agreed[name] - self.outer.lr * step
            else:
                self.agreed[name] = (self.agreed[name] - moved).to(self.agreed[name].dtype)
            for island in islands:
                island[name].copy_(own * island[name] + (1 - own) * self.agreed[name])


class QuorumRule(OuterRule):
    """Exchanges of the islands that come in the order of a script, late by those that came in between."""

    def __init__(self, spec: RunSpec, weights: Mapping[str, Tensor]) -> None:
        super().__init__(spec, weights)
        islands, first = spec.step_groups, self.agreed
        self._taken = [dict(first) for _ in range(islands)]
        self._exchanges_before = [0] * islands
        self._steps_before = [0] * islands
        self._exchanges = 0

    @torch.no_grad()
    def after(self, step: int, islands: list[Weights]) -> None:
        """Change the weights of the islands that come after a step, one exchange after the other."""
        script = scripted_arrivals(step, len(islands), self.outer)
        came = [island for exchange in script for island in exchange]
        moved = {
            place: {name: self._taken[place][name] - islands[place][name] for name in self.agreed}
            for place in came
        }
        for exchange in script:
            tokens = {place: self._tokens(self._steps_before[place], step) for place in exchange}
            factors = {place: tokens[place] / sum(tokens.values()) for place in exchange}
            for place in exchange:
                late = self._exchanges - self._exchanges_before[place]
                if self.outer.staleness_lr == "inverse" and late > 1:
                    factors[place] /= late
            mean = {
                name: torch.stack([factors[place] * moved[place][name].double() for place in exchange]).sum(0)
                for name in self.agreed
            }
            self._use(mean, [], 0.0)
            self._exchanges += 1
        for place in came:
            self._taken[place] = dict(self.agreed)
            self._exchanges_before[place], self._steps_before[place] = self._exchanges, step
            for name, value in self.agreed.items():
                islands[place][name].copy_(value)

    def _tokens(self, begun: int, step: int) -> int:
        sizes = list(islice(batch_sizes(self.spec.of_step_group().train), step))
        return sum(sizes[begun:])


def island_steps(
    spec: RunSpec, weights: Mapping[str, Tensor], batches: Iterable[Batch]
) -> Iterator[ReferenceStep]:
    """Take an optimiser step of every island on each batch, and exchange; yields what `reference_steps` does.

    Kinds of `OF_ISLANDS`, moments and `outer error` have the values of every island; `outer parameter` and
    `outer momentum` are those of the exchange. Routers' statistics and modules' sums are the first island's.
    """
    alone = spec.of_step_group()
    shares: list[deque[Batch]] = [deque() for _ in range(spec.step_groups)]
    live: list[Weights] = [{} for _ in shares]
    runs = [
        reference_steps(alone, weights, iter(share.popleft, None), held)
        for share, held in zip(shares, live, strict=True)
    ]
    rule: OuterRule | None = None
    for number, batch in enumerate(batches, 1):
        rows = batch.tokens.shape[0] // spec.step_groups
        for place, share in enumerate(shares):
            share.append(batch.rows(place * rows, (place + 1) * rows))
        found = [next(run) for run in runs]
        if rule is None:
            moving = {name: value for name, value in weights.items() if not is_frozen(spec, name)}
            rule = (QuorumRule if spec.outer.quorum else OuterRule)(spec, {**moving, **_zero_biases(live[0])})
        rule.after(number, live)
        yield _joined(batch, found, live, rule)


def _zero_biases(held: Weights) -> Weights:
    """Routers' biases as they are before the first step."""
    return {name: torch.zeros_like(value) for name, value in held.items() if name.endswith(".router.bias")}


def _joined(batch: Batch, found: list[ReferenceStep], live: list[Weights], rule: OuterRule) -> ReferenceStep:
    step: ReferenceStep = {"samples": {name: getattr(batch, name) for name in SAMPLES}}
    step |= {kind: found[0][kind] for kind in (*PHASES, "balance")}
    for kind in (*OF_ISLANDS, *rule.spec.train.moments):
        values: dict[str, Tensor] = {}
        for place, (own, held) in enumerate(zip(found, live, strict=True)):
            for name, value in own.get(kind, {}).items():
                now = held[name].detach().clone() if kind in ("parameter", "router bias") else value
                values[f"island.{place}/{name}"] = now
        if values:
            step[kind] = values
    step["outer parameter"] = {name: value.clone() for name, value in rule.agreed.items()}
    step["outer momentum"] = dict(rule.momentum)
    if rule.messages.decay:
        names = [f"island.{place}/{name}" for place in range(len(live)) for name in rule.momentum]
        nothing = {name: torch.zeros_like(rule.agreed[name.partition("/")[2]]) for name in names}
        step["outer error"] = nothing | rule.messages.errors
        step["outer message"] = dict(rule.messages.last)
    return step
