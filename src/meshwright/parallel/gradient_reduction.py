"""Gradients are summed over the ranks that compute parts of them, and their norms taken, while backwards run.

A reduction is waited for one block later, those over the shard axis and those over replicas each in a queue
of its own, and the last ones while the gradient's norm is computed. All are sums; the one division is that
of `train/step.py` (`gradient_factor`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.comm.collectives import start_all_reduce
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.traffic_counter import Pending
from meshwright.parallel.fsdp_unit import Unit
from meshwright.parallel.grad_norm import norms, sum_of_squares
from meshwright.parallel.precision import Formats

_Reductions = deque[tuple[Pending, Callable[[], None]]]
"""Reductions in flight, each with the callback to run when it has ended."""


def _finish_first(reductions: _Reductions) -> None:
    work, then = reductions.popleft()
    work.wait()
    then()


class GradientReduction:
    """The reductions of the gradients of `units`, the trained ones of a rank, and the norms of the sums.

    `depth` gives for each unit, by identity, the trained units of its group. `apart`, `elsewhere` and `stale`
    are those of `DataParallel`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        depth: Mapping[int, int],
        mesh: Mesh,
        formats: Formats,
        apart: str | None,
        elsewhere: set[str],
        stale: bool,
    ) -> None:
        self._units, self._depth, self._mesh, self._formats = units, depth, mesh, formats
        self._apart, self._elsewhere, self._stale = apart, elsewhere, stale
        self._reducing: _Reductions = deque()
        self._replicating: _Reductions = deque()
        self._norms: list[Tensor] = []
        self._unmeasured: list[Unit] = []

    def start(self, unit: Unit, last: bool) -> None:
        """Start to reduce what a unit has packed; `last` says that its gradients of the step are complete."""
        packed = unit.take_packed()
        alone = self._stale and unit.replicas is self._mesh.replicate
        if unit.shards is None and (alone or unit.replicas.size == 1):
            unit.set_gradient(packed.to(self._formats.exact))
            self._unmeasured.append(unit)
            return
        sent = unit.to_send(packed)
        if unit.shards is None:
            work = start_all_reduce(sent, unit.replicas)
            self._reducing.append((work, lambda: self._replicated(unit, sent, packed)))
        else:
            work, part = unit.start_reduce(sent)
            self._reducing.append((work, lambda: self._scattered(unit, part, sent, last)))
        depth = self._depth[id(unit)]
        while len(self._replicating) >= depth:  # first, since finished reductions below append to it
            _finish_first(self._replicating)
        while len(self._reducing) > depth:
            _finish_first(self._reducing)

    def _replicated(self, unit: Unit, summed: Tensor, packed: Tensor) -> None:
        """The all-reduce of a unit that is not sharded has ended."""
        if packed.dtype == self._formats.exact:
            unit.set_gradient(packed if summed is packed else packed.copy_(summed))
        else:
            unit.set_gradient(summed.to(self._formats.exact))
        self._unmeasured.append(unit)

    def _scattered(self, unit: Unit, part: Tensor, _sent: Tensor, last: bool) -> None:
        """A reduce-scatter has ended; `_sent`, its input, had to live until now."""
        if unit.gradient is None:
            unit.set_gradient(part.to(self._formats.exact))
        else:
            unit.gradient.add_(part)
        assert unit.gradient is not None
        if last and unit.replicas.size > 1 and not self._stale:
            work = start_all_reduce(unit.gradient, unit.replicas)
            self._replicating.append((work, lambda: self._unmeasured.append(unit)))
        elif last:
            self._unmeasured.append(unit)

    def settle(self) -> None:
        """End the reductions over the ranks that share the storage."""
        while self._reducing:
            _finish_first(self._reducing)

    def finish(self) -> None:
        """Wait until every gradient is summed over every rank; its norms are taken meanwhile."""
        self._measure_finished()
        self.settle()
        while self._replicating:
            _finish_first(self._replicating)
            self._measure_finished()
        self._measure_finished()
        self._sum_over_tensor()
        self._sum_over_ends()
        self._measure_late()

    def _sum_over_ends(self) -> None:
        """Sum the gradients of the parameter that the first and the last rank of a pipeline each hold."""
        if self._apart is None or self._mesh.ends is None:
            return
        for unit in self._units:
            for slot in unit.slots:
                if slot.key == self._apart:
                    start_all_reduce(unit.gradient_of(slot), self._mesh.ends).wait()

    def _sum_over_tensor(self) -> None:
        """Sum the partial gradients of pieces that several tensor ranks, or slices of experts, hold."""
        of_axis: dict[int, tuple[Axis, list[Tensor]]] = {}
        for unit in self._units:
            for axis, slot in unit.slots_summed():
                of_axis.setdefault(id(axis), (axis, []))[1].append(unit.gradient_of(slot))
        for axis, flats in of_axis.values():
            joined = torch.cat(flats)
            start_all_reduce(joined, axis).wait()
            torch._foreach_copy_(flats, list(joined.split([flat.numel() for flat in flats])))

    def _measure_finished(self) -> None:
        """Take the norms of gradients that have arrived, but for what is still to be summed."""
        if self._stale:
            self._unmeasured.clear()
        flats = [flat for unit in self._unmeasured for flat in unit.counted_gradients(self._late(unit))]
        self._unmeasured.clear()
        self._norms += norms(flats)

    def _measure_late(self) -> None:
        """Take the norms of what the tensor axis and the ends of the pipeline have summed."""
        if self._stale:
            return
        flats = []
        for unit in self._units:
            early = {slot.key for slot in unit.slots} - self._late(unit)
            flats += unit.counted_gradients(early | self._elsewhere)
        self._norms += norms(flats)

    def _late(self, unit: Unit) -> set[str]:
        """Names of a unit's parameters whose gradients are summed again after the units' reductions."""
        summed = {slot.key for _, slot in unit.slots_summed()}
        return summed | ({self._apart} if self._apart and self._mesh.ends is not None else set())

    def squares(self, exact: bool = False) -> Tensor:
        """This rank's share of the square of the gradient's norm, a scalar in float64 on the device.

        The sum over all ranks is the square of the norm. It is that of the gradients as `finish` left
        them; `exact` takes it anew, and is finite wherever every element is.
        """
        if not exact:
            return sum_of_squares(self._norms, self._mesh.device)
        return sum_of_squares(norms(self._counted(), exact=True), self._mesh.device)

    def measure(self) -> None:
        """Take the norms of gradients that are there already, summed over all ranks."""
        self._norms = norms(self._counted())

    def _counted(self) -> list[Tensor]:
        """The parts of all gradients that this rank counts."""
        return [flat for unit in self._units for flat in unit.counted_gradients(self._elsewhere)]

    def clear(self) -> None:
        """Forget the norms of a step."""
        self._norms.clear()
