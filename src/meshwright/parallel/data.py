"""Data parallelism: replicas that see different samples, and ZeRO's three stages of sharing their states.

Splits        samples over replicate x dp, states over the shard axis, dp x cp (Rajbhandari et al. 2020).
              `replicate` copies of that sharded group make the hybrid (Zhao et al. 2023, FSDP, §3.2.2).
Wire          for P parameters over n ranks, each rank and step, with b bytes to compute and r to reduce in,
              a microbatches, f = (n-1)/n:
                ZeRO-0  all-reduce       2 P r f        once a step
                ZeRO-1  all-gather + reduce-scatter     P b f + P r f          once a step
                ZeRO-2  all-gather once, reduce-scatter each microbatch        P b f + a P r f
                ZeRO-3  two all-gathers and a reduce-scatter each microbatch   2 a P b f + a P r f
                        (less what is still whole at the backward: the first unit and the last)
              replicate adds one all-reduce of P/n.
              Routed experts likewise, over the n ranks that hold the same ones.
              In a pipeline microbatches are under way together, so a unit is gathered once a step and reduced
              once a step, in every stage: a rank's stages are whole while it runs, and P is theirs.
Saves         optimiser states (1), and gradients (2), and parameters (3), to 1/n of their size.

A gather is started one unit ahead of its use, and a reduction is waited for one unit later, so both run
beside the computation, on gloo as on NCCL. All sums; the one division is in `loss.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from meshwright.parallel.collectives import Pending, start_all_reduce, start_reduce_scatter, sum_scalars
from meshwright.parallel.mesh import Axis, Mesh
from meshwright.parallel.precision import Formats
from meshwright.parallel.slots import Owners, Slot, Stored, make_slots
from meshwright.parallel.unit import Unit
from meshwright.spec.parameters import Piece

UnitModules = Sequence[nn.Module]
"""The modules of one unit, in the order in which the forward runs them."""


MakeUnit = Callable[[list[Slot], Mesh, Axis | None, Axis, Formats], Unit]
"""What makes a unit: `Unit`, or one that tells what it holds."""


class DataParallel:
    """Stores the parameters of a decoder for one rank, and moves them and their gradients as it runs.

    The decoder may be on the meta device: its parameters are replaced by views of the units' buffers. After
    construction the values are zeros; fill them through `stored_slots` or a checkpoint. `names` are those of
    the decoder's parameters. `apart` names a parameter that the first and the last rank of a pipeline each
    hold: tied embeddings.
    """

    def __init__(
        self,
        units: Sequence[UnitModules],
        mesh: Mesh,
        formats: Formats,
        pieces: Mapping[str, Piece],
        names: Mapping[nn.Parameter, str],
        apart: str | None = None,
        make_unit: MakeUnit = Unit,
    ) -> None:
        self._new_unit = make_unit
        self.mesh, self.formats, self._pieces, self._names, self._apart = mesh, formats, pieces, names, apart
        self.zero = mesh.layout.zero if max(mesh.shard.size, mesh.expert_data.size) > 1 else 0
        self.each_microbatch = mesh.pipeline.size == 1
        """Whether units are gathered and reduced for each microbatch, where the stage of ZeRO says so."""
        self.modules = units
        """What computes with the units of each group, in the order of the forward."""
        self._groups = [list(self._make_units(modules)) for modules in units]
        self.units = [unit for group in self._groups for unit in group]
        self._places = {
            unit.parameters[slot.name]: (unit, slot) for unit in self.units for slot in unit.slots
        }
        self._pending: deque[tuple[Pending, Callable[[], None]]] = deque()
        self._last_microbatch = True
        self._gradient_bytes = 0
        for index in range(len(units)):
            self._hook(index)

    def _make_units(self, modules: UnitModules) -> Iterator[Unit]:
        """What moves together with these modules: their parameters, and apart from them routed experts."""
        owners: dict[str, list[tuple[nn.Module, str]]] = {}
        for root in modules:
            for module in root.modules():
                for attribute, parameter in module.named_parameters(recurse=False):
                    owners.setdefault(self._names[parameter], []).append((module, attribute))
        listed: list[tuple[str, Piece, Owners]] = [
            (name, self._pieces[name], tuple(places)) for name, places in owners.items()
        ]
        mesh = self.mesh
        for routed, shards in ((False, mesh.shard), (True, mesh.expert_data)):
            own = [parameter for parameter in listed if (parameter[1].experts is not None) == routed]
            if own:
                yield self._make_unit(own, shards)

    def _make_unit(self, listed: list[tuple[str, Piece, Owners]], ranks: Axis) -> Unit:
        mesh = self.mesh
        if self.zero and ranks.size > 1:
            slots = make_slots(listed, ranks.size, ranks.rank)
            return self._new_unit(slots, mesh, ranks, mesh.replicate, self.formats)
        replicas = mesh.replicate if mesh.replicate.size > 1 else ranks
        return self._new_unit(make_slots(listed, 1, 0), mesh, None, replicas, self.formats)

    # When things move -------------------------------------------------------------------------------

    def _hook(self, index: int) -> None:
        for module in self.modules[index]:
            module.register_forward_pre_hook(lambda _module, _args, index=index: self._before_forward(index))
            module.register_forward_hook(
                lambda module, _args, output, index=index: self._after_forward(index, module, output)
            )
        on_gradient = _weak(self._on_gradient)
        for unit in self._groups[index]:
            for parameter in unit.parameters.values():
                parameter.register_post_accumulate_grad_hook(on_gradient)

    def _gather(self, index: int, ahead: int) -> None:
        """Wait for what modules `index` need, and begin to gather for modules `ahead`, if there are any."""
        for unit in self._groups[index]:
            unit.finish_gather()
        if 0 <= ahead < len(self._groups):
            for unit in self._groups[ahead]:
                unit.start_gather()

    def _before_forward(self, index: int) -> None:
        self._gather(index, index + 1)

    def _after_forward(self, index: int, module: nn.Module, output: Tensor) -> None:
        modules = self.modules[index]
        if self.zero < 3 or module is not modules[-1]:
            return
        if not (torch.is_grad_enabled() and output.requires_grad):
            self._release(index)
            return
        if not self.each_microbatch:
            return
        # The head's backward comes next, and tied ends are one unit: they stay whole until their gradients.
        if index == len(self._groups) - 1 or len(modules) > 1:
            return
        self._release(index)
        if index > 0:  # the backward of an embedding reads no weights
            output.register_hook(lambda _grad: self._before_backward(index))

    def _release(self, index: int) -> None:
        for unit in self._groups[index]:
            unit.release()

    def _before_backward(self, index: int) -> None:
        self._gather(index, index - 1 if index > 1 else -1)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None:  # else the backward left it to `take`
            self.take(parameter, grad)

    def take(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Add a gradient that was found apart from the backward."""
        unit, slot = self._places[parameter]
        unit.pack(slot, grad)
        unit.waiting[slot.name] -= 1
        if not unit.waiting[slot.name]:
            del unit.waiting[slot.name]
        if not unit.waiting:
            self._unit_done(unit)

    def begin_step(self, microbatches: int) -> None:
        """Call before a step's first forward: so many gradients of each parameter will come."""
        self._expect(1 if self.each_microbatch else microbatches)

    def begin_microbatch(self, last: bool) -> None:
        """Call before each microbatch's forward; `last` says that the step's gradients are due after it."""
        if self.each_microbatch:
            self._last_microbatch = last
            self._expect(1)

    def _expect(self, gradients: int) -> None:
        for unit in self.units:
            # What two stages of a rank read, tied ends, has a gradient from each.
            unit.waiting = {
                slot.name: gradients * (1 if self.each_microbatch else len(slot.owners))
                for slot in unit.slots
            }

    def finish_step(self) -> None:
        """Call after the last microbatch's backward: every gradient is summed over every rank."""
        for unit in self.units:
            if unit.waiting:  # a parameter that the loss does not depend on
                unit.waiting = {}
                self._unit_done(unit)
        self._drain(0)
        self._sum_over_tensor()
        if self._apart is not None and self.mesh.ends is not None:
            for part in self._gradients_apart():
                start_all_reduce(part, self.mesh.ends).wait()

    def _gradients_apart(self) -> Iterator[Tensor]:
        """This rank's gradient of the parameter that the other end of the pipeline holds too."""
        for unit in self.units:
            for slot in unit.slots:
                if slot.name == self._apart:
                    yield unit.gradient_of(slot)

    def _sum_over_tensor(self) -> None:
        """Add up the gradients of pieces that several tensor ranks hold, each with a part of the sum."""
        for unit in self.units:
            for axis, flats in unit.shared_gradients():
                joined = torch.cat(flats)
                start_all_reduce(joined, axis).wait()
                for flat, summed in zip(flats, joined.split([flat.numel() for flat in flats]), strict=True):
                    flat.copy_(summed)

    # What moves -------------------------------------------------------------------------------------

    def _unit_done(self, unit: Unit) -> None:
        if self.zero == 3:
            unit.release()
        due = self._last_microbatch
        if not due and (self.zero < 2 or unit.shards is None):
            return
        packed = unit.take_packed(keep=unit.shards is None)
        if unit.shards is None:
            self._start(start_all_reduce(packed, unit.replicas), lambda: self._reduced(unit, packed))
            return
        part = unit.new_part()
        work = start_reduce_scatter(part, packed, unit.shards)
        self._start(work, lambda: self._scattered(unit, part, packed, due))

    def _reduced(self, unit: Unit, packed: Tensor) -> None:
        unit.gradient = packed.to(self.formats.master)

    def _scattered(self, unit: Unit, part: Tensor, _packed: Tensor, due: bool) -> None:
        """A reduce-scatter has ended; `_packed`, its input, had to live until now."""
        if unit.gradient is None:
            unit.gradient = part.to(self.formats.master)
        else:
            unit.gradient.add_(part)
        if due and unit.replicas.size > 1:
            self._start(start_all_reduce(unit.gradient, unit.replicas), lambda: None)

    def _start(self, work: Pending, done: Callable[[], None]) -> None:
        self._pending.append((work, done))
        self._drain(1)

    def _drain(self, leave: int) -> None:
        while len(self._pending) > leave:
            work, done = self._pending.popleft()
            work.wait()
            done()

    # After the step ---------------------------------------------------------------------------------

    def gradients(self) -> Iterator[tuple[str, Stored]]:
        """(name, gradient) of every parameter, between `finish_step` and `end_step`."""
        for unit in self.units:
            assert unit.gradient is not None
            yield from unit.tensors(unit.gradient)

    def parameters(self) -> Iterator[tuple[str, Stored]]:
        """(name, parameter) as stored; they share the memory that the optimiser updates."""
        for unit in self.units:
            yield from unit.tensors(unit.stored)

    def gradient_norm(self) -> float:
        """Norm of the whole gradient: every element of every parameter once, over all ranks."""
        ends = self.mesh.ends
        elsewhere = self._apart if ends is not None and ends.rank > 0 else None
        mesh, total = self.mesh, 0.0
        for routed, shards, others in (
            (False, mesh.shard, mesh.tensor),
            (True, mesh.expert_data, mesh.expert),
        ):
            units = [unit for unit in self.units if unit.routed == routed]
            square = _sum_of_squares([flat for unit in units for flat in unit.counted_gradients(elsewhere)])
            if self.zero:
                (square,) = sum_scalars([square], shards)
            total += sum_scalars([square], others)[0]
        (total,) = sum_scalars([total], mesh.pipeline)
        return float(total**0.5)

    def _flat_gradients(self) -> list[Tensor]:
        return [unit.gradient for unit in self.units if unit.gradient is not None]

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient, in place."""
        if factor != 1.0 and self.units:
            torch._foreach_mul_(self._flat_gradients(), factor)

    def end_step(self) -> None:
        """Call after the optimiser: gradients are dropped, parameters are gathered anew when next used."""
        self._gradient_bytes = self._bytes_of_gradients()
        for unit in self.units:
            unit.gradient = None
            unit.arrived = set()
            unit.expire()

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds: stored parameters, their whole copies, gradients at the last update."""
        copies = sum(0 if u.aliased else u.full.untyped_storage().nbytes() for u in self.units)
        return {
            "parameters": sum(u.stored.untyped_storage().nbytes() for u in self.units),
            "compute copies": copies,
            "gradients": max(self._gradient_bytes, self._bytes_of_gradients()),
        }

    def _bytes_of_gradients(self) -> int:
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for unit in self.units
            for tensor in (unit.packed, unit.gradient)
            if tensor is not None
        }
        return sum(storages.values())


def _weak(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """The method as a hook that does not hold its object: autograd's hooks are not garbage-collected."""
    reference = WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        bound = reference()
        assert bound is not None, "a backward through parameters whose `DataParallel` is gone"
        bound(parameter)

    return hook


_ROW = 1024


def _sum_of_squares(flats: Sequence[Tensor]) -> float:
    """In float64. A row whose norm is beyond float32 does not make it infinite, only an element does."""
    for square_of in (_square, _exact_square):
        square = float(torch.stack([square_of(flat) for flat in flats]).sum()) if flats else 0.0
        if math.isfinite(square):
            break
    return square


def _square(flat: Tensor) -> Tensor:
    """The sum of squares in float64, of norms of rows: a tenth of the time of converting every element."""
    rows, rest = flat.split([len(flat) // _ROW * _ROW, len(flat) % _ROW])
    norms = torch.linalg.vector_norm(rows.view(-1, _ROW), dim=1).double()
    return norms.square().sum() + _exact_square(rest)


def _exact_square(flat: Tensor) -> Tensor:
    return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
