"""The section `[outer]` of a run file: islands, which exchange parameters now and then, or late gradients."""

from __future__ import annotations

from hashlib import sha256
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from meshwright.spec.base import FrozenModel

OuterFormat = Literal["fp32", "bf16", "int8", "int4", "fp4"]
"""Formats of the numbers of an exchange; "fp32" stands for exact numbers, in fp64 those of fp64."""


class OuterSpec(FrozenModel):
    """Islands: each of the `layout.replicate` groups of ranks trains by itself between two exchanges; or
    gradients that replicas sum in each step, and apply some steps late.

    The defaults are DiLoCo's (Douillard et al. 2023). With `lr` = 1 and `momentum` = 0 an exchange is the
    mean of the islands' parameters: local SGD (Stich 2019).
    """

    every: NonNegativeInt = Field(
        0,
        description="steps between two exchanges of a parameter over layout.replicate, whose ranks train by "
        "themselves in between; 0 sums their gradients in each step",
    )
    lr: PositiveFloat = Field(
        0.7, description="learning rate of the outer optimiser: SGD on how far the islands moved, in the mean"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the outer optimiser")
    nesterov: bool = Field(True, description="Nesterov's form of the momentum")
    fragments: PositiveInt = Field(
        1, description="parts of the model, each exchanged at steps of its own (Streaming DiLoCo)"
    )
    delay: NonNegativeInt = Field(
        0, description="steps that islands take while an exchange is under way, before they use its result"
    )
    alpha: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of an island's own parameters in those that it goes on with after an exchange; "
        "by default 0.5 with a delay and 0 without",
    )
    format: OuterFormat = Field(
        "fp32",
        description="format in which islands send how far matrices moved; fp32 is exact, and int8, int4 and "
        "fp4 (E3M0) have a scale for each block of at most 256 numbers of a row",
    )
    top_k: float | None = Field(
        None, gt=0, lt=1, description="share of each block's numbers that is sent, the largest (SparseLoCo)"
    )
    error_decay: float | None = Field(
        None,
        ge=0,
        le=1,
        description="error feedback: factor of what earlier exchanges did not send, which is added to what "
        "an island moved by; by default 0.95 with top_k and 0, which is none, without",
    )

    quorum: PositiveInt | None = Field(
        None,
        description="islands that are enough for an exchange, each a world of its own that may fail and come "
        "back: with 1 each is free-running; 'none' for all of them, in one world",
    )
    grace_seconds: float = Field(
        0.0, ge=0, description="time that an exchange waits for the other islands once the quorum has come"
    )
    max_staleness: NonNegativeInt | None = Field(
        None,
        description="exchanges that an island may be ahead of the slowest one, before it waits for it",
    )
    island: NonNegativeInt | None = Field(
        None, description="the island that this command trains, where others train the others in one --out"
    )
    staleness: NonNegativeInt = Field(
        0,
        description="steps between the computation of gradients and their use, in which they are summed over "
        "layout.replicate; goes with every = 0",
    )
    staleness_lr: Literal["none", "inverse"] = Field(
        "none",
        description="factor on what comes late, with quorum or staleness: 'inverse' divides it by the "
        "exchanges, or the learning rate by the steps, that it is late (Zhang et al. 2016)",
    )

    @property
    def own_share(self) -> float:
        """`alpha`, or its default."""
        if self.alpha is not None:
            return self.alpha
        return 0.5 if self.delay else 0.0

    @property
    def compressed(self) -> bool:
        """True if islands send anything but exact numbers, all of them."""
        return self.format != "fp32" or self.top_k is not None

    @property
    def has_blocks(self) -> bool:
        """True if numbers of a block share a scale, or compete for being sent."""
        return self.format in ("int8", "int4", "fp4") or self.top_k is not None

    @property
    def kept_error(self) -> float:
        """`error_decay`, or its default."""
        if self.error_decay is not None:
            return self.error_decay
        return 0.0 if self.top_k is None else 0.95

    def in_time(self, steps: int) -> OuterSpec:
        """A copy with such periods and delays that results are used within so many steps."""
        most = max(1, steps - 1)
        every = min(self.every, most)
        changed = {"staleness": min(self.staleness, most), "every": every}
        if every:
            changed |= {"delay": min(self.delay, every - 1), "fragments": min(self.fragments, every)}
        return self.model_copy(update=changed)

    def sent_of(self, block: int) -> int:
        """How many numbers of a block are sent."""
        return block if self.top_k is None else max(1, round(self.top_k * block))

    def block_bytes(self, block: int, exact: int = 4) -> int:
        """Bytes of a block's message: values, one scale, and indices, with `exact` bytes an exact number."""
        sent = self.sent_of(block)
        values = {
            "fp32": exact * sent,
            "bf16": 2 * sent,
            "int8": sent + exact,
            "int4": (sent + 1) // 2 + exact,
            "fp4": (sent + 1) // 2 + exact,
        }[self.format]
        return values + (0 if self.top_k is None else sent)

    def begins(self, step: int, last: int) -> tuple[int, ...]:
        """Fragments whose exchange begins after optimiser step `step`, from 1, of a run of `last` steps.

        Exchanges are spread over the period (Douillard et al. 2025, Streaming DiLoCo); after the last step
        all fragments are exchanged.
        """
        every = range(self.fragments)
        if step == last:
            return tuple(every)
        return tuple(part for part in every if step % self.every == part * self.every // self.fragments)

    def under_way(self, step: int) -> list[tuple[int, int]]:
        """(fragment, the step after which its result is due) of the exchanges that a step finds under way.

        The step is one of a run without an end, in the order in which exchanges were begun.
        """
        steps = range(max(1, step - self.delay), step)
        return [(part, at + self.delay) for at in steps for part in self.begins(at, last=0)]

    def fragment_of(self, parameter: str, tied: bool) -> int:
        """The fragment of a parameter, by its name: blocks are dealt in turn, the embedding goes with the
        first fragment and the head with the last, or with the first where it is `tied`."""
        part, _, rest = parameter.partition(".")
        if part == "blocks":
            return int(rest.partition(".")[0]) % self.fragments
        return 0 if part == "embed" or tied else self.fragments - 1

    def lateness_factor(self, late: int) -> float:
        """Factor on what an island moved by, that comes so many exchanges late."""
        return 1.0 / max(1, late) if self.staleness_lr == "inverse" else 1.0


def scripted_arrivals(step: int, islands: int, outer: OuterSpec) -> list[list[int]]:
    """The islands of each exchange after optimiser step `step` of a script, in order, for `outer.quorum`.

    Hashes draw, once in `outer.every` steps in the mean, when an island comes, and with a quorum of several
    when so many islands or more exchange together.
    """
    assert outer.quorum is not None
    draws = {island: sha256(f"{step} {island}".encode()).digest() for island in range(islands)}
    order = sorted(draws, key=lambda island: draws[island][1:])
    if outer.quorum == 1:
        return [[island] for island in order if draws[island][0] % outer.every == 0]
    drawn = sha256(f"{step}".encode()).digest()
    come = outer.quorum + drawn[1] % (islands - outer.quorum + 1)
    return [sorted(order[:come])] if drawn[0] % outer.every == 0 else []
