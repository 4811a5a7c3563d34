"""Bounds of the messages to experts: how many rows one rank sends to another, whatever the routing.

Splits nothing. Messages of a fixed size need no numbers on the host, so the host launches a step without
waiting for the device, and plans know their bytes. `layout.expert_buffer_factor` f bounds the copies that a
rank sends to the experts of one rank, in even shares of its copies. More are not dropped: the device notes
that some had no room, leaves the parameters alone, and the step is computed again with exact messages. So are
validation and all else that is no step.

Wire          f times what even routing sends, instead of what is due.
Takes         f times the rows of even routing at the experts, kept for the backward as without a bound. Only
              rows that hold copies, and their padding, are multiplied.
Saves         a wait of the host in each dispatch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.comm.collectives import start_all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.parallel.fsdp_unit import Unit
from meshwright.parallel.step_part import StepPart
from meshwright.spec import RunSpec


class ExpertBuffers(StepPart):
    """The bound of a run's messages to experts, and whether the copies of a step were within it."""

    component = "balance"

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        bounds = spec.model.moe is not None and spec.layout.bounds_dispatch
        factor = spec.layout.expert_buffer_factor if bounds else None
        self._moe, self._factor, self._mesh = spec.model.moe, factor, mesh
        self._open = self._exact = self._warned = self._even = False
        self._lacking: Tensor | None = None
        if factor is not None:
            self.numbers = 1
            self._lacking = torch.zeros((), device=mesh.device)
            """Most copies without room in a dispatch of this step, in even shares."""
        self.overflowed = False
        """True if the numbers taken last are of a step whose copies had no room on some rank."""
        self.needed = 0.0
        """A factor by which the last step would have had room; 0 where it had."""

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute the gradients of a step in bounded messages, if the run has any, and count from 0 what has
        no room."""
        if self._lacking is not None:
            self._lacking.zero_()
            self._open = not self._exact
        if self._open:
            self.needed = 0.0
        try:
            yield
        finally:
            self._open = False

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Compute gradients without a bound, also where the run has one."""
        before, self._exact = self._exact, True
        try:
            yield
        finally:
            self._exact = before

    def rows(self, tokens: int) -> int | None:
        """Rows that a dispatch of `tokens` sends to each rank; None where they are those that are due."""
        if not self._open or self._moe is None or self._factor is None:
            return None
        return self._moe.buffer_rows(tokens, self._mesh.layout.ep, self._factor)

    def constants(self) -> bool:
        """True in bounded messages."""
        return self._open

    def note(self, due: Tensor, rows: int, share: float) -> None:
        """Note how many copies are `due` at each rank, of which there are `rows` at most; `share` is an even
        share."""
        assert self._lacking is not None
        torch.maximum(self._lacking, due.max().sub_(rows) / share, out=self._lacking)

    def judged(self, loss: Tensor) -> Tensor:
        """A rank's share of the loss: NaN, by which the device updates nothing, where copies lacked room."""
        return loss if self._lacking is None else loss.masked_fill(self._lacking > 0, math.nan)

    def own_numbers(self, factor: float, following: object) -> list[Tensor]:
        """1 where copies of this rank had no room."""
        return [] if self._lacking is None else [(self._lacking > 0).double().view(1)]

    def take(self, numbers: Sequence[float]) -> None:
        """Learn whether any rank's copies had no room, and then what bound would have had it.

        All ranks take the same numbers.
        """
        self.overflowed = numbers[0] > 0 and not self._even
        if not self.overflowed or self._lacking is None or self._factor is None:
            return
        start_all_reduce(self._lacking, self._mesh.world, "amax").wait()
        self.needed = math.ceil((self._factor + float(self._lacking)) * 100 + 1) / 100
        if not self._warned and self._mesh.rank == 0:
            warnings.warn(
                f"layout.expert_buffer_factor: {self._factor:g} has no room for all copies of a step, whose "
                f"most uneven dispatch needs {self.needed:g}; it is computed again without a bound, as is "
                f"every further step of the kind, of which metrics tell by expert_buffer_needed",
                stacklevel=2,
            )
        self._warned = True

    def metrics(self) -> Mapping[str, float]:
        """`expert_buffer_needed`, the factor that a step needed that had to be computed again."""
        return {"expert_buffer_needed": self.needed} if self.needed else {}

    def assume(self, number: int) -> None:
        """Route evenly, as dry runs do, whose numbers are not known: every copy has room."""
        self._even = True

    def held(self) -> Iterator[tuple[Unit | None, Tensor]]:
        """The number of copies without room."""
        return iter([] if self._lacking is None else [(None, self._lacking)])

    def of_gradients(self) -> tuple[list[object], list[Tensor]]:
        """The number of copies without room."""
        return [self], [] if self._lacking is None else [self._lacking]


def expert_buffers_of(buffers: ExpertBuffers) -> list[ExpertBuffers]:
    """The part of a step, where its messages to experts are bounded."""
    return [buffers] if buffers.numbers else []
