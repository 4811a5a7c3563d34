"""Data parallelism: replicas that see different samples, and ZeRO's three stages of sharing their states.

Splits        samples over replicate x dp, states over the shard axis, dp x cp (Rajbhandari et al. 2020).
              `replicate` copies of that sharded group make the hybrid (Zhao et al. 2023, FSDP, §3.2.2).
Wire          for P parameters over n ranks, each rank and step, with b bytes to compute and r to reduce in,
              a microbatches, f = (n-1)/n:
                ZeRO-0  all-reduce       2 P r f        once a step
                ZeRO-1  all-gather + reduce-scatter     P b f + P r f          once a step
                ZeRO-2  all-gather once, reduce-scatter each microbatch        P b f + a P r f
                ZeRO-3  two all-gathers and a reduce-scatter each microbatch   2 a P b f + a P r f
                        (less what is kept whole, see below)
              replicate adds one all-reduce of P/n.
              Routed experts likewise, over the n ranks that hold the same ones.
              In a pipeline microbatches are under way together, so a unit is gathered once a step and reduced
              once a step, in every stage: a rank's stages are whole while it runs, and P is theirs.
Saves         optimiser states (1), and gradients (2), and parameters (3), to 1/n of their size.

A gather is started one unit ahead of its use (prefetch), so that it runs during the computation, and only a
step's first is waited for at once. With ZeRO-3 the head and the last block stay whole from their forward to
their backward, which comes next; the first block stays whole from its backward to its forward in the next
microbatch, and during that backward the embedding is gathered for it. Tied ends are one unit, which stays
whole for the step.

Parameters that are not trained are units of their own (`fsdp_unit.py`). With ZeRO-3 they are gathered with
the rest of their group, and released when the backward has passed it; otherwise they never move. Those that
are quantised are dequantised so, too, without ZeRO-3 and in a pipeline one group at a time.

`gradient_reduction.py` waits for reductions and takes the norm of what is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.parallel.flat_param import Stored, make_slots
from meshwright.parallel.fsdp_unit import Encoding, Unit, UnitObserver
from meshwright.parallel.gradient_reduction import GradientReduction
from meshwright.parallel.precision import Formats
from meshwright.parallel.quantised_weights import QuantisedWeights
from meshwright.spec.parameters import UNIT_KINDS, Piece

UnitModules = Sequence[nn.Module]
"""The modules of one unit, in the order in which the forward runs them."""


class DataParallel:
    """Stores the parameters of a decoder for one rank, and moves them and their gradients as it runs.

    The decoder may be on the meta device: its parameters are replaced by views of the units' buffers. After
    construction the values are zeros; fill them through `stored_slots` or a checkpoint. `names` are those of
    the decoder's parameters. `apart` names a parameter that the first and the last rank of a pipeline each
    hold: tied embeddings. With `stale` gradients are left as sums over the ranks of a replica, without
    squares, for `stale_gradients.py`. Modules before `first_trained` have no backward. The last units, one
    for each layer `beyond` the head, run within its forward, and in training only.
    """

    def __init__(
        self,
        units: Sequence[UnitModules],
        mesh: Mesh,
        formats: Formats,
        pieces: Mapping[str, Piece],
        names: Mapping[nn.Parameter, str],
        apart: str | None = None,
        observer: UnitObserver | None = None,
        encoding: Encoding | None = None,
        stale: bool = False,
        first_trained: int = 0,
        beyond: range = range(0),
    ) -> None:
        self._observer, self._encoding = observer, encoding
        self.mesh, self.formats, self._pieces, self._names, self.apart = mesh, formats, pieces, names, apart
        self.zero = mesh.layout.zero if max(mesh.shard.size, mesh.expert_data.size) > 1 else 0
        self.each_microbatch = mesh.pipeline.size == 1
        """True if the ZeRO stage decides what moves in each microbatch; False in a pipeline, where all moves
        once."""
        self.modules = units
        """Modules that use the units of each group, in the order of the forward."""
        self._groups = [list(self._make_units(modules)) for modules in units]
        self.units = [unit for group in self._groups for unit in group]
        self.trained = [unit for unit in self.units if unit.trainable]
        """Units of parameters that are trained."""
        gathers = self.zero == 3 and self.each_microbatch
        self._local = [unit for unit in self.units if unit.quantised is not None and not gathers]
        """Units that are dequantised for each pass and released after it, without a message."""
        self._first_trained = first_trained
        self._places = {
            unit.parameters[slot.key]: (unit, slot) for unit in self.trained for slot in unit.slots
        }
        depth = {id(unit): sum(each.trainable for each in group) for group in self._groups for unit in group}
        self._at = {_memory(each): each for unit in self.units for each in unit.parameters.values()}
        ends = mesh.ends
        self.elsewhere = {apart} if apart and ends is not None and ends.rank > 0 else set()
        """Names of parameters that this rank holds but another pipeline rank counts in the norm."""
        self._reduction = GradientReduction(self.trained, depth, mesh, formats, apart, self.elsewhere, stale)
        self._microbatches, self._last_microbatch = 1, True
        self._in_place: set[nn.Parameter] = set()
        """Parameters with a gradient that was added where it is packed, and was not counted yet."""
        self.unreached: list[str] = []
        """Names of parameters that had no gradient in the last step, of which zeros took the place."""
        self._gradient_bytes = 0
        self._beyond = range(len(units) - len(beyond), len(units))
        """Groups of what runs within the head."""
        turns = [(index, modules[0]) for index, modules in enumerate(units)]
        turns += [(index, module) for index, modules in enumerate(units) for module in modules[1:]]
        for place, (index, module) in enumerate(turns):
            self._hook(index, module, turns[place + 1][0] if place + 1 < len(turns) else None)
        self._before_head = {index for index, _ in turns[-2 - len(beyond) :]}
        """Groups whose backward comes next after the last forward: the last block, the head, and what runs
        within it."""
        self._head = turns[-1][0] if turns else None  # a stage may hold nothing
        on_gradient = _weak(self._on_gradient)
        for unit in self.trained:
            for parameter in unit.parameters.values():
                parameter.register_post_accumulate_grad_hook(on_gradient)

    def _make_units(self, modules: UnitModules) -> Iterator[Unit]:
        """Units of these modules: one of their parameters, and a second one of their routed experts; of both
        those that are not trained are apart, and of these those that are quantised."""
        owners: dict[str, list[tuple[nn.Module, str]]] = {}
        for root in modules:
            for module in root.modules():
                for attribute, parameter in module.named_parameters(recurse=False):
                    owners.setdefault(self._names[parameter], []).append((module, attribute))
        mesh = self.mesh
        pieces = [(self._pieces[name], tuple(places)) for name, places in owners.items()]
        for kind in UNIT_KINDS:
            own = [each for each in pieces if each[0].kind == kind]
            if not own:
                continue
            ranks = mesh.expert_data if kind.routed else mesh.shard
            shards = ranks if mesh.layout.shards(kind.trainable) and ranks.size > 1 else None
            replicas = mesh.replicate if shards is not None or mesh.replicate.size > 1 else ranks
            slots = make_slots(own, ranks.size, ranks.rank) if shards is not None else make_slots(own, 1, 0)
            form = slots[0].piece.quantised
            quantised = None if form is None else QuantisedWeights(form, self.formats)
            how = self._observer, self._encoding, quantised
            yield Unit(slots, mesh, shards, replicas, self.formats, *how)

    # When things move -------------------------------------------------------------------------------

    def _hook(self, index: int, module: nn.Module, after: int | None) -> None:
        """Make a module of group `index` gather its units, and start to gather those of `after`, the next
        group."""
        module.register_forward_pre_hook(lambda _module, _args: self._gather(index, after))
        module.register_forward_hook(lambda module, _args, output: self._after_forward(index, module, output))

    def _gather(self, index: int, ahead: int | None) -> None:
        """Wait for the units of group `index`, and begin to gather those of `ahead`, if there is one that
        runs."""
        for unit in self._groups[index]:
            unit.finish_gather()
        if ahead is not None and (torch.is_grad_enabled() or ahead not in self._beyond):
            for unit in self._groups[ahead]:
                unit.start_gather()

    def _after_forward(self, index: int, module: nn.Module, output: Tensor) -> None:
        modules = self.modules[index]
        if module is not modules[-1]:
            return
        self._release_local(index, output)
        if self.zero < 3:
            return
        if not torch.is_grad_enabled():
            self._release(index)
            return
        if not self.each_microbatch:
            return
        if not output.requires_grad:  # nothing up to here is trained
            self._release(index)
            return
        if index not in self._before_head:
            self._release(index)
        if index not in (0, self._head):
            output.register_hook(lambda _grad: self._before_backward(index))

    def _release_local(self, index: int, output: Tensor) -> None:
        """Release what was dequantised for the forward of a group until its backward."""
        own = [unit for unit in self._groups[index] if unit in self._local]
        for unit in own:
            unit.release()
        if own and output.requires_grad and torch.is_grad_enabled():
            output.register_hook(lambda _grad: self._dequantise(own))

    def _dequantise(self, own: Sequence[Unit]) -> None:
        """Dequantise a group's units for its backward, in the place of those of another."""
        for unit in self._local:
            if unit not in own:
                unit.release()
        for unit in own:
            unit.finish_gather()

    def _release(self, index: int) -> None:
        for unit in self._groups[index]:
            unit.release()

    def _before_backward(self, index: int) -> None:
        """Gather for the backward of block `index`, and for what comes next.

        The embedding's backward reads no weights, but its forward in the next microbatch does, and that comes
        next where no module before the block has a backward.
        """
        self._release_frozen(index + 1)
        if index > max(1, self._first_trained):
            self._gather(index, index - 1)
        else:
            self._gather(index, None if self._last_microbatch else 0)

    def _release_frozen(self, index: int) -> None:
        """Release what is not trained of group `index`, whose backward is over; trained units are released
        when they are done."""
        for unit in self._groups[index] if index < len(self._groups) else ():
            if not unit.trainable:
                unit.release()

    def _stays(self, unit: Unit) -> bool:
        """True if a unit stays gathered after its backward for the next forward: tied ends, the first
        block."""
        if not self.each_microbatch or self._last_microbatch:
            return False
        return unit in self._groups[1] or (len(self.modules[0]) > 1 and unit in self._groups[0])

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        # Autograd calls this after each backward that reaches a parameter, with or without a gradient of it.
        grad, parameter.grad = parameter.grad, None
        self.take(parameter, grad)

    def take(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Add a parameter's gradient, or None: then it is in its place already, or will be taken later.

        For gradients computed outside autograd's hooks, too, such as deferred ones.
        """
        unit, slot = self._places[parameter]
        if grad is not None:
            unit.pack(slot, grad)
        elif parameter not in self._in_place:
            return
        self._in_place.discard(parameter)
        unit.waiting[slot.key] -= 1
        if not unit.waiting[slot.key]:
            del unit.waiting[slot.key]
        if not unit.waiting:
            self._unit_done(unit)

    def gradient_sum(self, parameter: nn.Parameter) -> RunningSum:
        """Where a backward adds a parameter's gradient, which `take` then need not copy."""
        unit, slot = self._places[parameter]
        self._in_place.add(parameter)
        return unit.gradient_sum(slot)

    def parameter_at(self, weight: Tensor) -> nn.Parameter:
        """The parameter whose memory a tensor has: a compiled block knows its weights by nothing else.

        Raises KeyError for other memory.
        """
        return self._at[_memory(weight)]

    def begin_step(self, microbatches: int) -> None:
        """Call before a step's first forward."""
        self._microbatches = microbatches
        self._expect(1 if self.each_microbatch else microbatches)

    def begin_microbatch(self, last: bool) -> None:
        """Call before each microbatch's forward; `last` says that the step's gradients are due after it."""
        if self.each_microbatch:
            if self._first_trained > 1:  # the first block stays, as `_stays` says
                self._release_frozen(self._first_trained)
            self._last_microbatch = last
            self._expect(1)

    def _expect(self, gradients: int) -> None:
        """Expect so many gradients of each parameter from each stage that reads it before a unit is done."""
        for unit in self.trained:
            # In a pipeline two stages of a rank may each have a gradient of tied ends.
            readers = {slot.key: 1 if self.each_microbatch else len(slot.owners) for slot in unit.slots}
            waits = not self.each_microbatch or self.zero < 2 or unit.shards is None
            several = (waits and self._microbatches > 1) or max(readers.values()) > 1
            unit.expect({name: gradients * count for name, count in readers.items()}, several)

    def finish_step(self) -> None:
        """Call after the last microbatch's backward: every gradient is summed over every rank.

        Norms of parts of them are taken while the last reductions run.
        """
        self.unreached = []
        for unit in self.units:
            if (self.zero == 3 and not unit.trainable) or unit.quantised is not None:
                unit.release()
        for unit in self.trained:
            if unit.waiting:  # a parameter that the loss does not depend on
                self.unreached += [name for name in unit.waiting if name not in unit.arrived]
                unit.waiting = {}
                self._unit_done(unit)
        self._reduction.finish()

    def _unit_done(self, unit: Unit) -> None:
        """Start to reduce a unit whose gradients of a microbatch are complete.

        A sharded unit is reduced in each microbatch with ZeRO-2 and 3, all others in the last one only.
        """
        if self.zero == 3 and not self._stays(unit):
            unit.release()
        last = self._last_microbatch
        if last or (self.zero >= 2 and unit.shards is not None):
            self._reduction.start(unit, last)

    def settle(self) -> None:
        """End what is under way between two microbatches: gathers, reductions, and copies of gradients."""
        for unit in self.units:
            unit.settle()
        self._reduction.settle()

    def of_gradients(self) -> list[object]:
        """Objects whose attributes change while gradients are computed."""
        return [self, self._reduction, *self.units]

    def squares(self, exact: bool = False) -> Tensor:
        """This rank's share of the square of the gradient's norm (`GradientReduction.squares`)."""
        return self._reduction.squares(exact)

    # Stale gradients --------------------------------------------------------------------------------

    def take_gradients(self) -> list[Tensor]:
        """Each trained unit's gradient as `finish_step` left it; units keep none, nor its memory."""
        taken = []
        for unit in self.trained:
            assert unit.gradient is not None
            taken.append(unit.gradient)
            unit.gradient = unit.packed = None
        return taken

    def put_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Give each trained unit a gradient, which is summed over all ranks, and take its norm."""
        for unit, gradient in zip(self.trained, gradients, strict=True):
            unit.set_gradient(gradient)
        self._reduction.measure()

    # After the step ---------------------------------------------------------------------------------

    def gradients(self) -> Iterator[tuple[str, Stored]]:
        """(name, gradient) of every trained parameter, between `finish_step` and `end_step`."""
        for unit in self.trained:
            assert unit.gradient is not None
            yield from unit.tensors(unit.gradient)

    def parameters(self) -> Iterator[tuple[str, Stored]]:
        """(name, parameter) as stored; they share the memory that the optimiser updates, but for those of a
        quantised base, which are copies."""
        return self._stored(self.units)

    def trained_parameters(self) -> Iterator[tuple[str, Stored]]:
        """Those of `parameters` that are trained."""
        return self._stored(self.trained)

    def frozen_parameters(self) -> Iterator[tuple[str, Stored]]:
        """Those of `parameters` that are not trained."""
        return self._stored(unit for unit in self.units if not unit.trainable)

    @staticmethod
    def _stored(units: Iterable[Unit]) -> Iterator[tuple[str, Stored]]:
        for unit in units:
            yield from unit.parameters_stored()

    def end_step(self) -> None:
        """Call after the optimiser: gradients and their memory are dropped, which the next step's activations
        take before its own gradients come; parameters are gathered anew when next used."""
        self._gradient_bytes = self._bytes_of_gradients()
        self._in_place.clear()
        self._reduction.clear()
        for unit in self.trained:
            unit.drop_gradients()
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
        held = [
            tensor for unit in self.trained for tensor in (unit.packed, unit.gradient) if tensor is not None
        ]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
        return sum(storages.values())


def _memory(x: Tensor) -> tuple[int, int]:
    """A tensor's storage, which stays while its memory comes and goes, and its place there."""
    return x.untyped_storage()._cdata, int(x.storage_offset())


def _weak(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """The method as a hook that does not hold its object: autograd's hooks are not garbage-collected."""
    reference = WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        bound = reference()
        assert bound is not None, "a backward through parameters whose `DataParallel` is gone"
        bound(parameter)

    return hook
