"""Least seconds of the branches of a search tree, and what branches share of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import mul
from typing import Any, NamedTuple

from meshwright.planner.cost import lower_bounds
from meshwright.planner.cost.breakdown import PassSeconds
from meshwright.planner.cost.data_parallel import DataAxis
from meshwright.planner.cost.layer import ENDS, LayerCost, Part
from meshwright.planner.cost.lower_bounds import CutShape, ExpertFloor, Floor, Pace, microbatch_seconds
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import (
    Contents,
    PlacedStages,
    blocks_before,
    model_contents,
    ranks_of,
    together,
)
from meshwright.planner.layout_levels import DataMesh, LayerLayout, Sharding, StageSplit
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.search.data_floor import DataFloor
from meshwright.spec.pipeline_schedules import SCHEDULES
from meshwright.spec.sections import NoRecompute
from meshwright.spec.stages import placed


class Cut(NamedTuple):
    """The stages and the schedule of a pipeline."""

    split: StageSplit
    placed: PlacedStages
    shape: CutShape
    """Bounds on its pace; cuts of as many ranks with equal bounds have one object."""
    groups: list[tuple[Contents, tuple[Contents, ...], tuple[int, ...]]]
    """Contents of ranks with equal stages, in all and of each stage, and these ranks."""


class LayerBounds(NamedTuple):
    """Bounds on the microbatches of layouts with the same axes inside a stage."""

    seconds: float
    """Seconds of a microbatch through the whole model, on the ranks of one stage."""
    pace: Pace
    block: float
    """Seconds of the quickest block."""
    forward: float
    """Seconds of a microbatch's forward through the whole model."""

    @property
    def backward(self) -> float:
        """Seconds of a microbatch's backward through the whole model."""
        return self.seconds - self.forward


class PipelineBounds(NamedTuple):
    """Bounds on the steps of layouts with the same axes inside a stage, and the same pipeline."""

    pp: int
    data: int
    microbatches: int
    fixed: float
    paces: list[tuple[float, float]]
    """Least seconds of the microbatches in each shape of a cut: of all ranks, and of the mean one."""

    def step(self, more: float = 0.0, once: float = 0.0) -> float:
        """Seconds of a step at least, of whose microbatches each takes `more` on the ranks of all stages, and
        beside which these take `once`."""
        beside = (self.microbatches * more + once) / self.pp
        return self.fixed + min(max(setters, mean + beside) for setters, mean in self.paces)


class BranchBounds:
    """Least seconds of the layouts of a space, which the passes of a search share."""

    def __init__(self, space: LayoutSpace, costs: CostModel) -> None:
        self._space, self._costs = space, costs
        self.model = model_contents(space.base)
        self.data = DataFloor(space, costs, self.model)
        self._before = blocks_before(space.base.model)
        self._experts = space.experts(space.ranks)
        self._floors: dict[tuple[type[Floor], tuple[Any, ...]], Floor] = {}
        self._work: dict[tuple[Any, ...], tuple[float, ...]] = {}
        self._ends: dict[tuple[int, bool, int], dict[Part, PassSeconds]] = {}
        """Seconds of the embedding and the head, by what they depend on of axes inside a stage."""
        self._folded: dict[Floor, dict[tuple[int, int], float]] = {}
        self._known: dict[tuple[Any, ...], tuple[LayerCost, LayerBounds]] = {}
        self._cuts: dict[int, list[Cut]] = {}
        self._least_shapes: dict[int, list[CutShape]] = {}

    def floor(self, kind: type[Floor], inner: LayerLayout) -> Floor:
        """Least costs of blocks with such axes, without recomputation, which all passes share."""
        key = kind, inner[:-1]
        if key not in self._floors:
            plain = inner._replace(recompute=NoRecompute())
            mesh = DataMesh(2 if self._space.only_pipelines else 1, 1, 1, 1)
            spec, costs = self._space.spec(plain, mesh), self._costs
            format = costs.format or spec.precision.compute
            dense = costs.dense(spec.model)
            floor = kind(spec, format, costs.stack, costs.kernels, costs.links, dense)
            self._floors[key] = floor
            ends = self._ends.setdefault((inner.tp, inner.sequence_parallel, floor.tokens), {})
            if not ends:
                ends.update((part, floor.seconds(part)) for part in ENDS)
            dense.seconds.update(ends)
        return self._floors[key]

    def blocks(self, inner: LayerLayout, mesh: DataMesh, sharding: Sharding) -> tuple[LayerCost, LayerBounds]:
        """Costs of a mesh's blocks, which others share, and bounds by them."""
        order, pp = "", 0  # pipelines put gradients off that would hide messages
        if inner.cp > 1:  # blocks depend on how far apart context ranks are
            order, pp = mesh.order, mesh.pp if mesh.order == "replicate-dp-pp-tp" else 0
        key = inner, mesh.ep, mesh.etp, mesh.pp > 1, order, pp
        if key not in self._known:
            blocks = self._costs.blocks(self._space.spec(inner, mesh, sharding))
            seconds = microbatch_seconds(blocks, self.model)
            self._known[key] = blocks, self.layer(blocks, seconds)
        return self._known[key]

    def layer(self, blocks: LayerCost, seconds: float, policy: str | None = None) -> LayerBounds:
        """Bounds by blocks of which a microbatch takes `seconds`; `policy` as in `microbatch_seconds`."""
        speed = lower_bounds.pace(blocks, self.model, 0.0, policy)
        forward = sum(map(mul, self.model.parts, speed.forward))
        return LayerBounds(seconds, speed, self._quickest(blocks, policy), forward)

    def folded(self, floor: Floor) -> dict[tuple[int, int], float]:
        """Seconds of a microbatch's experts, and messages to them, by the ranks (ep, etp) that they are dealt
        out to."""
        if floor not in self._folded:
            experts = ExpertFloor(floor, self.model, self._work)
            self._folded[floor] = {pair: experts.seconds(*pair) for pair in self._experts}
        return self._folded[floor]

    def _quickest(self, blocks: LayerCost, policy: str | None = None) -> float:
        """Seconds of the quickest of blocks; `policy` as in `microbatch_seconds`."""
        again = lower_bounds.repeats_forward(blocks, policy) and self.model.trained is None
        passes = map(blocks.seconds, blocks.kinds)
        return min(self._least_of_block(each) + again * each.forward.total for each in passes)

    def _least_of_block(self, passes: PassSeconds) -> float:
        """Seconds of a block at least, of which frozen parameters may leave no backward."""
        return passes.total if self.model.trained is None else passes.forward.total

    def evenly(self, inner: LayerLayout, pp: int, data: int, layer: LayerBounds) -> PipelineBounds:
        """Bounds on the steps of a pipeline with so many data ranks, as if it took no time to fill."""
        count = self._space.base.batch_sequences // (data * inner.micro_batch)
        most = -(-self._space.base.model.layers // pp) * layer.block
        paces = [(count * most, count * layer.seconds / pp)]
        return PipelineBounds(pp, data, count, self._costs.stack.numbers.step, paces)

    def pipeline(self, inner: LayerLayout, pp: int, data: int, layer: LayerBounds) -> PipelineBounds:
        """Bounds on the steps of a pipeline with so many data ranks."""
        evenly = self.evenly(inner, pp, data, layer)
        if pp == 1:
            return evenly
        ((fullest, mean),), count = evenly.paces, evenly.microbatches
        paces = (lower_bounds.pace_bounds(shape, layer.pace, count) for shape in self._shapes(pp))
        return evenly._replace(paces=[(max(fullest, each), max(mean, more)) for each, more in paces])

    def beside(
        self, axes: Sequence[DataAxis], layer: LayerBounds, microbatches: int, more: float = 0.0
    ) -> float:
        """Seconds of a step at least on the data axis and of the optimiser, of all ranks of a pipeline.

        Of microbatches each of which takes `more` than `layer` says, all of that may hide messages.
        """
        forward, backward, least = layer.forward + more, layer.backward + more, inf
        for axis in axes:
            least = min(least, axis.seconds(forward, backward, microbatches, least))
        return least if axes else 0.0

    def cuts(self, pp: int) -> list[Cut]:
        """The cuts of a pipeline."""
        if pp not in self._cuts:
            found = self._cuts[pp] = []
            shapes: dict[CutShape, CutShape] = {}
            for split in self._space.cuts(pp):
                own = ranks_of(split, pp)
                made = placed(split.blocks, self._space.base.model.mtp_layers)
                stages = PlacedStages(self._space.base, made, own, self._before)
                groups = [
                    (together(member), member, tuple(ranks)) for member, ranks in stages.members.items()
                ]
                shape = lower_bounds.cut_shape(stages, not SCHEDULES[split.schedule].splits)
                found.append(Cut(split, stages, shapes.setdefault(shape, shape), groups))
        return self._cuts[pp]

    def _shapes(self, pp: int) -> list[CutShape]:
        """The shapes of a pipeline's cuts, of which one has the least pace."""
        if pp not in self._least_shapes:
            different = {id(cut.shape): cut.shape for cut in self.cuts(pp)}
            self._least_shapes[pp] = lower_bounds.minimal(different.values())
        return self._least_shapes[pp]
