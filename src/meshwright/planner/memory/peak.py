"""The moment of a step without a pipeline at which a rank of this program holds most.

Bytes beyond the states rise and fall: at the head's backward all activations are held and no gradients of a
single microbatch; at the embedding's backward the reverse. So a step is followed as
`parallel/data_parallel.py` runs it: which units are gathered, packed and being reduced, block by block.

Gradients that are stored whole keep their memory from step to step: the first step holds less than others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.planner.activations import Activations, at_mask, backward_peaks
from meshwright.planner.activations_head import head_peaks, weight_width
from meshwright.planner.activations_sizes import Sizes
from meshwright.planner.group_shapes import step_axes
from meshwright.planner.memory.states import StateShard, packed_width, waits
from meshwright.planner.rank_view import RankView, widths
from meshwright.planner.traffic import exchange
from meshwright.spec.stages import first_trained
from meshwright.spec.training_flops import head_is_trained


@dataclass(frozen=True)
class Moment:
    """Bytes held at one time, beyond parameters and optimiser states."""

    gradients: int
    activations: int
    temporaries: int
    buffers: int

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.gradients + self.activations + self.temporaries + self.buffers


def fullest_moment(view: RankView, shards: Sequence[StateShard], kept: Activations, on_cpu: bool) -> Moment:
    """The fullest moment of a rank that holds `shards`."""
    step = _Step(view, shards, kept, on_cpu)
    # The first microbatch, one that finds the gradients of others, and the last, which reduces them.
    for left in reversed(range(min(view.spec.microbatches, 3))):
        step.forward()
        step.backward(last=left == 0)
    step.finish()
    return step.most


class _Step:
    """A step, microbatch by microbatch, and the buffers of units as they are filled and freed."""

    def __init__(self, view: RankView, shards: Sequence[StateShard], kept: Activations, on_cpu: bool) -> None:
        self.spec, self.width, self.kept, self.on_cpu = view.spec, widths(view.spec), kept, on_cpu
        self.groups: dict[str, list[StateShard]] = {}
        for unit in shards:
            self.groups.setdefault(unit.name, []).append(unit)
        self.activations = self.buffers = self.gradients = 0
        self.packed: set[StateShard] = set()
        """Units with a buffer for the gradients of the whole unit."""
        self.packed_bytes = {unit: unit.whole * packed_width(view, unit) for unit in shards}
        self.waiting = {unit for unit in shards if waits(view.spec, unit)}
        """Units whose gradients stay whole for the step's last microbatch."""
        self.summed: set[StateShard] = set()
        """Units with a buffer for this rank's part of the reduced gradients."""
        self.whole: set[StateShard] = set()
        self.coming: set[StateShard] = set()
        """Units that are being gathered."""
        self.reducing: deque[StateShard] = deque()
        """Units whose gradients are being reduced over the ranks that share their states."""
        self.exchanged = exchange.bytes_at_once(view)
        """Bytes that come and go with an exchange of parameters between replicas that step apart."""
        self.most = Moment(0, 0, 0, 0)
        self.sizes = Sizes(view.spec, on_cpu)
        self.stream = self.width.compute * self.sizes.stream
        self.weight = self.sizes.rows * view.spec.model.hidden
        self.head, self.weight_width = head_peaks(self.sizes, on_cpu), weight_width(self.sizes, on_cpu)
        self.joined = "head" not in self.groups
        """True if both ends are one unit."""
        model = view.spec.model
        self.blocks = [f"blocks.{layer}" for layer in range(model.layers)]
        self.beyond = [f"blocks.{layer}" for layer in model.mtp_layers]
        """Layers that predict further tokens, within the head."""
        self.after_blocks = next(iter(self.beyond), None if self.joined else "head")
        self.first_trained = first_trained(view.spec)
        self.first = max(0, self.first_trained - 1)
        """The first block that has a backward."""
        of_kind = {kind: backward_peaks(self.sizes, last, on_cpu) for kind, last in self.sizes.kinds.items()}
        self.peaks = [of_kind[kind] for kind in (*kept.kinds, *map(model.kind_of, model.mtp_layers))]

    def trained(self, name: str) -> list[StateShard]:
        """The units of a group that are trained."""
        return [unit for unit in self.groups[name] if unit.trainable]

    def passed(self, name: str) -> list[StateShard]:
        """The units of a group that are freed behind its forward: without ZeRO-3 those of a quantised base,
        and otherwise all, but for the last block, whose backward follows the head's."""
        return [unit for unit in self.groups[name] if unit.zero < 3 or name != self.blocks[-1]]

    def release_frozen(self, name: str) -> None:
        """Free those of a group that are not trained, whose backward is over."""
        self.release([unit for unit in self.groups[name] if not unit.trainable])

    def look(self, temporaries: int) -> None:
        """Record the moment if it is the fullest so far."""
        total = self.gradients + self.activations + temporaries + self.buffers
        if total > self.most.total:
            self.most = Moment(self.gradients, self.activations, temporaries, self.buffers)

    def gather(self, name: str, ahead: str | None) -> None:
        """Wait for a group's units to be gathered, and start to gather those of the group `ahead`."""
        for unit in self.groups[name]:
            if not unit.passing or unit.aliased(self.width) or unit in self.whole:
                continue
            self._begin(unit)
            message = unit.ranks * unit.sent if unit.ranks > 1 else 0
            in_place = unit.ranks > 1 and unit.sent == unit.part * self.width.compute
            self.buffers += 0 if in_place else unit.whole * self.width.compute
            self.look(0)
            self.whole.add(unit)
            self.coming.discard(unit)
            self.buffers -= 0 if in_place else message
        for unit in self.groups[ahead] if ahead else []:
            if unit.zero == 3 and unit not in self.whole:
                self._begin(unit)

    def _begin(self, unit: StateShard) -> None:
        """Allocate what a unit is gathered in: the copy that computes, or bytes of another format."""
        if unit.ranks > 1 and unit not in self.coming:
            self.coming.add(unit)
            self.buffers += unit.ranks * unit.sent

    def release(self, units: Iterable[StateShard]) -> None:
        """Free those of some units that were gathered."""
        for unit in self.whole.intersection(units):
            self.whole.remove(unit)
            self.buffers -= unit.whole * self.width.compute

    def pack(self, unit: StateShard) -> None:
        """Allocate a buffer for a unit's gradients, if it has none."""
        if unit in self.packed:
            return
        self.packed.add(unit)
        self._add(unit, self.packed_bytes[unit])

    def _add(self, unit: StateShard, size: int) -> None:
        """Count bytes of packed gradients: as gradients where they wait, otherwise as a buffer."""
        if unit in self.waiting:
            self.gradients += size
        else:
            self.buffers += size

    def done(self, unit: StateShard, last: bool, temporaries: int) -> None:
        """Reduce a unit's gradients, which are complete for a microbatch, if they are due."""
        if last or (unit.name != "blocks.0" and not (unit.name == "embed" and self.joined)):
            self.release([unit])  # others stay whole for the next microbatch's forward
        if not last and (unit.zero < 2 or unit.ranks == 1):
            return
        self.pack(unit)
        sent = unit.whole * self.width.reduce
        copied = self.packed_bytes[unit] != sent
        if unit.ranks > 1:
            self.packed.remove(unit)
            self.buffers += unit.part * self.width.reduce + sent
            self.look(temporaries if copied or unit in self.waiting else temporaries - sent)
            self._add(unit, -self.packed_bytes[unit])
        elif copied and self.sends(unit):
            self.buffers += sent
        self.look(temporaries)
        if unit.ranks == 1 and not self.sends(unit):
            self._reduced(unit)
            return
        self.reducing.append(unit)
        while len(self.reducing) > len(self.trained(unit.name)):
            self._reduced(self.reducing.popleft())

    def sends(self, unit: StateShard) -> bool:
        """True if other ranks also hold the whole unit, so that gradients are summed over them."""
        layout = self.spec.layout
        ranks = layout.expert_data_ranks if unit.routed else layout.shard_ranks
        return max(step_axes(self.spec).replicate.ranks, ranks) > 1

    def finish(self) -> None:
        """Wait for all reductions; what an exchange of parameters takes comes and goes after them."""
        while self.reducing:
            self._reduced(self.reducing.popleft())
        self.look(self.exchanged)

    def _reduced(self, unit: StateShard) -> None:
        width, new = self.width, unit not in self.summed
        self.summed.add(unit)
        sent = unit.whole * width.reduce
        if unit.ranks == 1:
            if self.packed_bytes[unit] != unit.whole * width.exact:
                self.gradients += unit.part * width.exact if new else 0
            elif width.reduce != width.exact and self.sends(unit):
                self.buffers -= sent
            return
        stays = new and width.reduce == width.exact  # the part that was received becomes the gradient
        if new:
            self.gradients += unit.part * width.exact
        if stays:
            self.buffers -= unit.part * width.reduce
        self.look(0)
        self.buffers -= sent + (0 if stays else unit.part * width.reduce)

    def forward(self) -> None:
        """From the embedding to the loss."""
        kept, blocks = self.kept, self.blocks
        self.activations += kept.shared + kept.plans + kept.embed
        self.gather("embed", blocks[0])
        if not self.joined:
            self.release(self.groups["embed"])
        self.look(at_mask(self.sizes, self.on_cpu))
        for layer, name in enumerate(blocks):
            self.gather(name, blocks[layer + 1] if name != blocks[-1] else self.after_blocks)
            self.activations += kept.by_block[layer] + kept.moved[layer]
            self.look(self.peaks[layer].forward + kept.unread)
            self.release(self.passed(name))
            if layer:  # what the block before saved has left
                self.activations -= kept.moved[layer - 1]
        self.gather("embed" if self.joined else "head", None)
        self.activations += kept.head - kept.further.kept
        self.look(self.head[0])
        for name in self.beyond:
            self.gather(name, None)
            self.activations += kept.further.kept
            self.look(self.head[0])

    def backward(self, last: bool) -> None:
        """From the loss to the first module that is trained."""
        for layer, _ in enumerate(self.beyond, len(self.blocks)):
            self._further(layer, last)
        self._head(last)
        for layer in reversed(range(self.first, len(self.blocks))):
            self._block(layer, last)
        if last or self.first:
            self.release([unit for units in self.groups.values() for unit in units if not unit.trainable])
        if self.first_trained == 0:
            self._embedding(last)
        self.activations -= self.kept.shared + self.kept.plans + self.kept.embed

    def _head(self, last: bool) -> None:
        units, weight = (
            self.trained("embed" if self.joined else "head"),
            self.weight * head_is_trained(self.spec),
        )
        summed, packed = self.weight_width * weight, self.width.compute * weight
        self.look(self.head[1])
        self.activations -= summed
        for unit in () if self.joined else units:
            self.pack(unit)
        self.look(packed)
        if self.beyond:  # what waited is added
            self.look(2 * packed)
            self.activations -= packed
        for unit in units:
            self.pack(unit)
        held = packed if self.spec.model.tied else 0  # until the embedding's gradient is added
        self.look(self.head[2] + summed + held)
        self.activations -= self.kept.head - self.kept.further.kept - summed - held
        for unit in () if self.joined else units:
            self.done(unit, last, self.stream)

    def _further(self, layer: int, last: bool) -> None:
        """From the loss of further tokens to what comes before their layer."""
        kept, weight = self.kept.further, self.weight * head_is_trained(self.spec)
        summed, packed = self.weight_width * weight, self.width.compute * weight
        self.look(self.head[1])
        self.activations -= summed - packed  # which waits for the gradient that the next tokens have
        for unit in self.trained("embed"):  # the norm's
            self.pack(unit)
        self.look(self.head[2] + summed)
        gone = self.stream + self.width.compute * self.sizes.whole
        self.activations -= gone
        self._layer(layer, last, kept.layer)
        gradient, added = self._lookup_gradient()
        self.look(max(self.stream, self.width.compute * self.sizes.whole) + added)
        self.activations -= kept.around - gone - summed
        if not self.spec.model.tied:
            self.activations += gradient

    def _block(self, layer: int, last: bool) -> None:
        name = self.blocks[layer]
        after = self.blocks[layer + 1] if layer + 1 < len(self.blocks) else self.after_blocks
        if after is not None:
            self.release_frozen(after)
        if layer:  # what the next one saved comes
            self.activations += self.kept.moved[layer - 1]
        before = self.blocks[layer - 1] if layer > self.first else None if last else "embed"
        self.gather(name, before)
        self._layer(layer, last, self.kept.by_block[layer] + self.kept.moved[layer])

    def _layer(self, layer: int, last: bool, kept: int) -> None:
        """The backward of a layer that has kept so many bytes."""
        units, peaks = self.trained(f"blocks.{layer}"), self.peaks[layer]
        routed, others = ([unit for unit in units if unit.routed == kind] for kind in (True, False))
        more = peaks.kept - kept
        self.look(more + peaks.recomputed)
        if self.sizes.channels(layer):
            for unit in others:
                self.pack(unit)
            self.look(more + peaks.feed_forward)
        for unit in routed:
            self.look(more + peaks.experts)
            self.pack(unit)
            self.look(more + peaks.packed)
            self.done(unit, last, 0)
        for unit in others:
            self.pack(unit)
        self.look(more + peaks.attention)
        self.activations -= kept
        for unit in others:
            self.done(unit, last, self.stream)

    def _embedding(self, last: bool) -> None:
        units = self.trained("embed")
        gradient, added = self._lookup_gradient()
        self.look(max(self.stream, self.width.compute * self.sizes.whole) + added)
        for unit in units:
            self.pack(unit)
        self.look(gradient * (2 if self.joined else 1))
        if self.joined:
            self.activations -= gradient
        for unit in units:
            self.done(unit, last, 0)

    def _lookup_gradient(self) -> tuple[int, int]:
        """Bytes of the embedding's gradient, and the most while it is added up."""
        width = self.width
        gradient = added = width.compute * self.weight
        if self.on_cpu and width.exact != width.compute:  # a CPU adds up in wider numbers
            added = width.exact * self.weight + max(gradient, width.exact * self.sizes.whole)
        return gradient, added
