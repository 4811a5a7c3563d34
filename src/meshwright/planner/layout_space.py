"""Every layout that the rules accept for a model on a number of ranks, enumerated from the inside outwards.

A layout is chosen in four levels (`planner/layout_levels.py`), so that what layouts share is computed once.
`LayoutSpace` enumerates the legal choices of each level, under the keys that the user has fixed and the rules
of the program that runs them (`planner/programs`). Choices that differ only in name are taken once: the
mode of a context axis of one rank, ZeRO over one rank, the cut 'balanced' where it equals the even one, and
'interleaved' and 'bfs' with one stage a rank, which are '1f1b' and 'gpipe'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache
from math import inf
from typing import Any

from meshwright.planner.layout_levels import (
    ATTENTION_KEPT,
    NO_CUT,
    NO_SHARDING,
    POLICIES,
    DataMesh,
    LayerLayout,
    Sharding,
    StageSplit,
    context_modes,
)
from meshwright.planner.programs.rules import LayoutChoice, ProgramLayouts, Step, schedule_run
from meshwright.planner.programs.table import OWN
from meshwright.spec import Layout, RunSpec
from meshwright.spec.arithmetic import divisors
from meshwright.spec.cuda_graph_rules import captured_axes
from meshwright.spec.layout import Order
from meshwright.spec.low_precision_rules import LOW_PRECISION_RULES, breaks
from meshwright.spec.pipeline_schedules import SCHEDULES
from meshwright.spec.rules import every_rank_has_rows, has_dense_layers
from meshwright.spec.stages import balanced, even

_SHARDING = frozenset(("zero", "replicate", "dp"))
"""Keys of the layout by which somebody asks for a sharding."""
_STAGES = 256
"""Most stages of a pipeline that are tried, unless two a rank are more or their number is given.

Deeper models have thousands of cuts, and more stages on a rank gain little."""
_ORDERED = 512
"""Most ranks for which other orders of the axes are tried; with more the search would take too long."""


@lru_cache(maxsize=1024)
def _shares(sequences: int, ranks: int) -> list[int]:
    """Sizes of a microbatch that share `sequences` among some pipeline and some data ranks of `ranks`."""
    own = [sequences // data for data in divisors(ranks) if sequences % data == 0]
    return sorted({size for share in own for size in divisors(share)})


class LayoutSpace:
    """The layouts of `base` on `ranks` ranks; `fixed` holds keys of the layout that are not to be chosen.

    `fixed` also takes 'policy', the recompute policy, which otherwise is one of `policies`, and 'max_stages',
    the most stages of a pipeline; `keeps_attention` is true to try recomputation of all but attention beside
    them. Islands are as many as in `base`. `levels` are the neighbouring ranks that
    each level of the cluster joins, from the inside out, and `program` is who runs them, whose rules cut the
    space where each choice is made.
    """

    def __init__(
        self,
        base: RunSpec,
        ranks: int,
        fixed: Mapping[str, Any] | None = None,
        policies: Sequence[str] = tuple(POLICIES),
        keeps_attention: bool = False,
        levels: Sequence[int] = (),
        program: ProgramLayouts = OWN,
    ) -> None:
        self.base, self.model, self.ranks = base, base.model, ranks
        self.fixed, self._levels, self.program = dict(fixed or {}), levels, program
        self._schedule_names: Sequence[str] = tuple(SCHEDULES)
        self._beside: bool | None = None
        """True for layouts of one tensor rank beside context ranks alone, False for all others."""
        self.only_pipelines = False
        """True if every layout has a pipeline."""
        self._captured = captured_axes(base, self.fixed.get("expert_buffer_factor") is not None)
        self._cuts: dict[int, list[StageSplit]] = {}
        self._is_cut: dict[int, bool] = {}
        self._balanced: dict[int, tuple[int, ...]] = {}
        wanted, own = self.fixed.get("policy"), base.recompute
        names = [name for name in POLICIES if (name in policies if wanted is None else name == wanted)]
        self._recompute = [own if own.policy == name else POLICIES[name] for name in names]
        if keeps_attention and wanted is None and "full" in names:
            self._recompute.insert(-1, ATTENTION_KEPT)

    def only(self, schedules: Sequence[str]) -> LayoutSpace:
        """The layouts of this space with a pipeline that has one of some schedules."""
        other = self._with(schedules, self._beside)
        other.only_pipelines = True
        return other

    def by_backward(self) -> list[LayoutSpace]:
        """This space in parts within which the same axes inside a stage take the same seconds.

        Of layers on one tensor rank beside context ranks, products add gradients where a schedule splits
        backwards, and not under others (`rank_view.adds_gradients`).
        """
        names = self._schedule_names
        split = [name for name in names if SCHEDULES[name].splits]
        whole = [name for name in names if name not in split]
        if self.base.train.compile or self.fixed.get("cp") == 1 or not split or not whole:
            return [self]
        return [self._with(names, False), self._with(whole, True), self._with(split, True).only(split)]

    def _with(self, schedules: Sequence[str], beside: bool | None) -> LayoutSpace:
        other = copy(self)
        other._schedule_names, other._beside, other._cuts = schedules, beside, {}
        other._is_cut = {}
        return other

    @property
    def _any_cut(self) -> StageSplit:
        """A cut whose schedule splits backwards if that of every layout does."""
        names = self._schedule_names
        splits = self.only_pipelines and all(SCHEDULES[name].splits for name in names)
        return NO_CUT._replace(schedule=names[0]) if splits else NO_CUT

    def _pick(self, key: str, legal: Sequence[int]) -> Sequence[int]:
        """The legal values of a key, or only the fixed one."""
        wanted, captured = self.fixed.get(key), self._captured.get(key)
        legal = legal if captured is None else [value for value in legal if value in captured]
        return legal if wanted is None else [value for value in legal if value == wanted]

    def _runs(self, step: Step, *axes: Any, **choices: Any) -> bool:
        """True if the program takes the choices of a step; `axes` are those inside a stage."""
        if not self.program.decides(step):
            return True
        return self.program.runs(step, LayoutChoice(self.model, self.base.data.seq_len, *axes, **choices))

    # Axes inside a stage.

    def inner(self) -> Iterator[LayerLayout]:
        """Axes inside a stage; for each of them policies from 'none' to 'full'."""
        wanted, mode_wanted = self.fixed.get("sequence_parallel"), self.fixed.get("context_mode")
        for tp in self._pick("tp", self._tensor()):
            for shared in [wanted] if wanted is not None else [True, False] if tp > 1 else [True]:
                for cp in self._pick("cp", self._context(tp, shared)):
                    if self._beside not in (None, tp == 1 < cp):
                        continue
                    sizes = self._pick(
                        "micro_batch", _shares(self.base.shared_sequences, self.ranks // (tp * cp))
                    )
                    local = max(1, self.model.kv_heads // tp)
                    for mode in context_modes(cp, local, mode_wanted):
                        if not self._runs("axes", tp, shared, cp, mode):
                            continue
                        for size in sizes:
                            for policy in self._recompute:
                                yield LayerLayout(tp, shared, cp, mode, size, policy)

    def _tensor(self) -> list[int]:
        """Sizes of the tensor axis: they divide heads, channels, key-value heads and ranks."""
        model = self.model
        shared = model.moe.shared_ffn if model.moe else 0
        return [
            tp
            for tp in divisors(model.heads)
            if self.ranks % tp == 0
            and (model.ffn % tp == 0 or not has_dense_layers(model))
            and (tp % model.kv_heads == 0 or model.kv_heads % tp == 0)
            and every_rank_has_rows(model.vocab_size, tp)
            and shared % tp == 0
            and self._rounds_alike(tp=tp)
        ]

    def _rounds_alike(self, **axes: int | bool) -> bool:
        """True if the rules of low precision take these axes."""
        if not self.base.precision.low and self.base.precision.qat is None:
            return True
        run = self.base.model_copy(update={"layout": Layout.model_validate({"zero": 3} | axes)})
        return not any(breaks(rule, run) for rule in LOW_PRECISION_RULES)

    def _context(self, tp: int, shared: bool) -> list[int]:
        """Sizes of the context axis; `shared` is true with sequence parallelism."""
        length, shared = self.base.data.seq_len, shared or self.model.moe is not None
        return [
            cp
            for cp in divisors(self.ranks // tp)
            if length % (2 * cp if cp > 1 else 1) == 0
            and not (shared and length // cp % tp)
            and self._rounds_alike(tp=tp, cp=cp, sequence_parallel=shared)
        ]

    # Pipeline, data and expert ranks.

    def experts(self, ranks: int) -> list[tuple[int, int]]:
        """(ep, etp) that fold out of `ranks`."""
        moe = self.model.moe
        whole = self._pick("ep", divisors(moe.experts) if moe else [1])
        parts = self._pick("etp", divisors(moe.ffn) if moe else [1])
        parts = [etp for etp in parts if self._rounds_alike(etp=etp)]
        return [(ep, etp) for ep in whole for etp in parts if ranks % (ep * etp) == 0]

    def pipelines(self, inner: LayerLayout) -> Iterator[tuple[int, int]]:
        """(pipeline ranks, data ranks) beyond a stage's tensor and context ranks."""
        left, sequences = self.ranks // (inner.tp * inner.cp), self.base.shared_sequences
        for pp in self._pick("pp", divisors(left)):
            together = left // pp * inner.micro_batch
            if sequences % together == 0 and self._has_cut(pp, self.base.batch_sequences // together):
                yield pp, left // pp

    def meshes(
        self, inner: LayerLayout, ep: int, etp: int, pipeline: tuple[int, int] | None = None
    ) -> Iterator[DataMesh]:
        """Meshes of the ranks beyond a stage's tensor and context ranks, or those of one of `pipelines`."""
        wanted = self.fixed.get("order")
        for pp, data in self.pipelines(inner) if pipeline is None else [pipeline]:
            if data * inner.cp * inner.tp % (ep * etp) == 0:
                for order in [wanted] if wanted else self._orders(inner, pp, data, ep * etp):
                    if self._runs("mesh", *inner[:4], pp=pp, ep=ep, etp=etp, order=order):
                        yield DataMesh(pp, data, ep, etp, order)

    def _orders(self, inner: LayerLayout, pp: int, data: int, folded: int) -> Iterator[Order]:
        """Orders of the axes, without those that number ranks equally.

        Pipeline ranks are numbered inside of data ranks only where that brings them closer by a level, since
        it takes data ranks further apart. `folded` is ep x etp.
        """
        if self.base.step_groups > 1 and pp > 1:  # the slow link is between step groups
            yield "replicate-pp-dp-tp"
            return
        yield "pp-replicate-dp-tp"
        if pp == 1 or self.ranks > _ORDERED:
            return
        most = self._level(data * inner.cp * inner.tp)
        if data > 1 and self._level(inner.cp * inner.tp) < most:
            yield "replicate-pp-dp-tp"
        if data * inner.cp > 1 and folded == 1 and self._level(inner.tp) < most:
            yield "replicate-dp-pp-tp"

    def _level(self, stride: int) -> int:
        """The innermost level at which ranks `stride` apart are neighbours."""
        within = [place for place, devices in enumerate(self._levels) if stride < devices]
        return min(within, default=max(0, len(self._levels) - 1))

    # Stages and schedules.

    def cuts(self, pp: int) -> list[StageSplit]:
        """Schedules and stages of `pp` ranks; for one rank the only one, without a pipeline."""
        if pp not in self._cuts:
            self._cuts[pp] = list(self._made_cuts(pp))
        return self._cuts[pp]

    def takes(self, cut: StageSplit, pp: int, microbatches: int) -> bool:
        """True if the program runs so many microbatches of a rank through a cut of `pp` ranks."""
        name = schedule_run(cut.schedule, cut.chunks)
        choices = {"pp": pp, "schedule": name, "virtual": cut.chunks, "microbatches": microbatches}
        return pp == 1 or self._runs("microbatches", **choices)

    def _has_cut(self, pp: int, microbatches: int | None = None) -> bool:
        """True if the model has a cut for `pp` ranks, with so many microbatches a rank.

        Without rules of a program only the first cut is made.
        """
        if self.program.rules:
            every = self.cuts(pp)
            return any(microbatches is None or self.takes(cut, pp, microbatches) for cut in every)
        if pp not in self._is_cut:
            self._is_cut[pp] = next(self._made_cuts(pp), None) is not None
        return self._is_cut[pp]

    @property
    def has_pipelines(self) -> bool:
        """True if the model has a cut for more than one pipeline rank."""
        return any(pp > 1 and self._has_cut(pp) for pp in self._pick("pp", divisors(self.ranks)))

    def _made_cuts(self, pp: int) -> Iterator[StageSplit]:
        model, given, virtual = self.model, self.fixed.get("stages"), self.fixed.get("virtual")
        if pp == 1:
            if not isinstance(given, tuple) and not self.only_pipelines:
                schedule = self.fixed.get("schedule", self.base.layout.schedule)
                yield StageSplit(schedule, 1, given or "balanced", (model.layers,))
            return
        for schedule, chunks in self._schedules(pp):
            count = pp * chunks
            if virtual not in (None, chunks) or count > self.fixed.get("max_stages", inf):
                continue
            at = {"pp": pp, "schedule": schedule_run(schedule, chunks), "virtual": chunks}
            if self._runs("schedule", **at):
                for stages, blocks in self._dealt(count):
                    if self._runs("stages", **at, stages=blocks):
                        yield StageSplit(schedule, chunks, stages, blocks)

    def _dealt(self, count: int) -> Iterator[tuple[str | tuple[int, ...], tuple[int, ...]]]:
        """Values of `layout.stages` for `count` stages, each with the blocks of the stages."""
        model, given = self.model, self.fixed.get("stages")
        plain = tuple(even(model.layers, count))
        if isinstance(given, tuple):
            if len(given) == count and sum(given) == model.layers:
                yield given, given
            return
        if given != "balanced":
            yield "even", plain
        if given != "even":
            if count not in self._balanced:
                self._balanced[count] = tuple(balanced(model, count, self.base.data.seq_len))
            if self._balanced[count] != plain or given:
                yield "balanced", self._balanced[count]
        own = self.program.cut(model, count) if self.program.cut and not given else None
        if own is not None and own not in (plain, self._balanced[count]):
            yield own, own

    def _schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """(schedule, stages of a rank)."""
        most, wanted = (self.model.layers + 2) // pp, self.fixed.get("schedule")
        if "virtual" not in self.fixed and not isinstance(self.fixed.get("stages"), tuple):
            most = min(most, max(2, _STAGES // pp))
        for name in self._schedule_names:
            if wanted not in (None, name) or (self.base.train.compile and SCHEDULES[name].splits):
                continue
            if SCHEDULES[name].stages is None:
                plain = wanted and (not self.program.rules or self.fixed.get("virtual") == 1)
                yield from ((name, chunks) for chunks in range(1 if plain else 2, most + 1))
            elif (chunks := SCHEDULES[name].stages or 2) <= most:
                yield name, chunks

    # States.

    def shardings(self, inner: LayerLayout, mesh: DataMesh, most_shared: bool = False) -> Iterator[Sharding]:
        """Shardings of a mesh, the least memory first; with `most_shared` only one of each ZeRO stage."""
        groups = self.base.step_groups
        alone = mesh.data // groups * inner.cp == 1 and "zero" not in self.fixed
        for zero in (0,) if alone else self._pick("zero", (3, 2, 1, 0)):
            for replicate in self._pick("replicate", divisors(mesh.data) if zero else (groups,)):
                if mesh.data % replicate:
                    continue
                dp = mesh.data // replicate
                first = mesh.order != "replicate-pp-dp-tp"
                whole = zero and replicate > groups and dp * inner.cp == 1
                if whole and first and not self.fixed.keys() & _SHARDING:
                    continue  # shards of one rank are whole: plain replication, which zero = 0 is
                if replicate == 1 and not first and "order" not in self.fixed:
                    continue  # equal to the first order
                if (
                    self.fixed.get("dp", dp) == dp
                    and dp * inner.cp * inner.tp % (mesh.ep * mesh.etp) == 0
                    and self._gathers_blocks(inner, mesh, zero, dp)
                    and self._shares(inner, mesh, zero, replicate)
                ):
                    yield Sharding(zero, replicate)
                    if most_shared:
                        break

    def _shares(self, inner: LayerLayout, mesh: DataMesh, zero: int, replicate: int) -> bool:
        """True if the program shares states so on a mesh."""
        axes = {"pp": mesh.pp, "ep": mesh.ep, "etp": mesh.etp, "order": mesh.order}
        dp = mesh.data // replicate
        return self._runs("sharding", *inner[:4], **axes, zero=zero, replicate=replicate, dp=dp)

    def _gathers_blocks(self, inner: LayerLayout, mesh: DataMesh, zero: int, dp: int) -> bool:
        """True if ranks store whole blocks of the weights that they gather in 8 bits, or gather others."""
        if not self.base.precision.fp8_gather:
            return True
        stage = {"tp": inner.tp, "sequence_parallel": inner.sequence_parallel, "cp": inner.cp}
        return self._rounds_alike(**stage, dp=dp, zero=zero, ep=mesh.ep, etp=mesh.etp)

    def layouts(self) -> Iterator[RunSpec]:
        """Runs with each layout of the space, level by level."""
        for inner in self.inner():
            for ep, etp in self.experts(self.ranks):
                for mesh in self.meshes(inner, ep, etp):
                    count = self.base.batch_sequences // (mesh.data * inner.micro_batch)
                    for cut in self.cuts(mesh.pp):
                        if self.takes(cut, mesh.pp, count):
                            for sharding in self.shardings(inner, mesh):
                                yield self.spec(inner, mesh, sharding, cut)

    def spec(
        self,
        inner: LayerLayout,
        mesh: DataMesh,
        sharding: Sharding = NO_SHARDING,
        cut: StageSplit | None = None,
    ) -> RunSpec:
        """The run with such a layout; rules over several parts are not applied, which would take too long."""
        cut = cut or self._any_cut
        layout = Layout(
            dp=mesh.data // sharding.replicate,
            replicate=sharding.replicate,
            zero=sharding.zero,
            tp=inner.tp,
            sequence_parallel=inner.sequence_parallel,
            cp=inner.cp,
            context_mode=inner.context_mode,
            pp=mesh.pp,
            virtual=cut.chunks if mesh.pp > 1 else self.fixed.get("virtual"),
            schedule=cut.schedule,
            stages=cut.stages,
            ep=mesh.ep,
            etp=mesh.etp,
            expert_parts=self.fixed.get("expert_parts", 1),
            expert_buffer_factor=self.fixed.get("expert_buffer_factor"),
            micro_batch=inner.micro_batch,
            order=mesh.order,
        )
        return self.base.model_copy(update={"layout": layout, "recompute": inner.recompute})
