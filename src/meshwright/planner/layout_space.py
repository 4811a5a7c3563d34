"""Every layout that the rules accept for a model on a number of ranks, enumerated from the inside outwards.

A layout is chosen in four levels, so that what layouts share is computed once: `LayerLayout`, what a block's
operators depend on; `DataMesh`, pipeline, data and expert ranks; `StageSplit`, the stages and their schedule;
`Sharding`, the states that data ranks share. `LayoutSpace` enumerates the legal choices of each level, under
the keys that the user has fixed. Choices that differ only in name are taken once: the
mode of a context axis of one rank, ZeRO over one rank, the cut 'balanced' where it equals the even one, and
'interleaved' and 'bfs' with one stage a rank, which are '1f1b' and 'gpipe'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple, get_args

from meshwright.spec import Layout, RunSpec
from meshwright.spec.arithmetic import divisors
from meshwright.spec.cuda_graph_rules import captured_axes
from meshwright.spec.layout import ContextMode, Order, ulysses_ranks
from meshwright.spec.low_precision_rules import LOW_PRECISION_RULES, breaks
from meshwright.spec.pipeline_schedules import SCHEDULES
from meshwright.spec.rules import every_rank_has_rows, has_dense_layers
from meshwright.spec.sections import FullRecompute, NoRecompute, RecomputeSpec, SelectiveRecompute
from meshwright.spec.stages import balanced, even

_SHARDING = frozenset(("zero", "replicate", "dp"))
"""Keys of the layout by which somebody asks for a sharding."""
_STAGES = 256
"""Most stages of a pipeline that are tried, unless two a rank are more or their number is given.

Deeper models have thousands of cuts, and more stages on a rank gain little."""
_ORDERED = 512
"""Most ranks for which other orders of the axes are tried; with more the search would take too long."""
POLICIES: dict[str, RecomputeSpec] = {
    "none": NoRecompute(),
    "selective": SelectiveRecompute(),
    "full": FullRecompute(),
}
"""Recompute policies by name."""
"""Schedules with any number of stages a rank."""


class LayerLayout(NamedTuple):
    """Axes inside a stage: what a dense block's operators and messages depend on."""

    tp: int
    sequence_parallel: bool
    cp: int
    context_mode: ContextMode
    micro_batch: int
    recompute: RecomputeSpec


class DataMesh(NamedTuple):
    """Pipeline ranks, data ranks (replicate x dp), expert ranks, and the order of the axes."""

    pp: int
    data: int
    ep: int
    etp: int
    order: Order = "pp-replicate-dp-tp"


class StageSplit(NamedTuple):
    """The stages of a pipeline and their schedule."""

    schedule: str
    chunks: int
    """Stages of a rank."""
    stages: str | tuple[int, ...]
    blocks: tuple[int, ...]
    """Blocks of each stage."""


class Sharding(NamedTuple):
    """How data ranks share states."""

    zero: int
    replicate: int


NO_CUT, NO_SHARDING = StageSplit("1f1b", 1, "even", ()), Sharding(0, 1)
"""Placeholders for costs that do not depend on these levels."""


def context_modes(cp: int, local: int, wanted: ContextMode | None = None) -> list[ContextMode]:
    """Modes of a context axis of `cp` ranks with `local` key-value heads on a tensor rank, or `wanted`.

    Those that are another mode's second name are left out.
    """
    if wanted is not None or cp == 1:
        modes: Sequence[ContextMode] = (wanted or "ring",)
    else:
        modes = [
            m for m in get_args(ContextMode) if m != "ring+ulysses" or 1 < ulysses_ranks(cp, local, m) < cp
        ]
    return [mode for mode in modes if mode != "ulysses" or local % cp == 0]


@lru_cache(maxsize=1024)
def _shares(sequences: int, ranks: int) -> list[int]:
    """Sizes of a microbatch that share `sequences` among some pipeline and some data ranks of `ranks`."""
    own = [sequences // data for data in divisors(ranks) if sequences % data == 0]
    return sorted({size for share in own for size in divisors(share)})


class LayoutSpace:
    """The layouts of `base` on `ranks` ranks; `fixed` holds keys of the layout that are not to be chosen.

    `fixed` also takes 'policy', the recompute policy, which otherwise is one of `policies`, and 'max_stages',
    the most stages of a pipeline. Islands are as many as in `base`. `levels` are the neighbouring ranks that
    each level of the cluster joins, from the inside out, and `schedules` are the pipelines' that may be
    chosen.
    """

    def __init__(
        self,
        base: RunSpec,
        ranks: int,
        fixed: Mapping[str, Any] | None = None,
        policies: Sequence[str] = tuple(POLICIES),
        levels: Sequence[int] = (),
        schedules: Sequence[str] = tuple(SCHEDULES),
    ) -> None:
        self.base, self.model, self.ranks = base, base.model, ranks
        self.fixed, self._levels, self._schedule_names = dict(fixed or {}), levels, schedules
        self._only_pipelines = False
        self._captured = captured_axes(base, self.fixed.get("expert_buffer_factor") is not None)
        self._cuts: dict[int, list[StageSplit]] = {}
        self._balanced: dict[int, tuple[int, ...]] = {}
        wanted, own = self.fixed.get("policy"), base.recompute
        names = [name for name in POLICIES if (name in policies if wanted is None else name == wanted)]
        self._recompute = [own if own.policy == name else POLICIES[name] for name in names]

    def only(self, schedules: Sequence[str]) -> LayoutSpace:
        """The layouts of this space with a pipeline that has one of some schedules."""
        other = copy(self)
        other._schedule_names, other._only_pipelines = schedules, True
        other._cuts = {}
        return other

    def _pick(self, key: str, legal: Sequence[int]) -> Sequence[int]:
        """The legal values of a key, or only the fixed one."""
        wanted, captured = self.fixed.get(key), self._captured.get(key)
        legal = legal if captured is None else [value for value in legal if value in captured]
        return legal if wanted is None else [value for value in legal if value == wanted]

    # Axes inside a stage.

    def inner(self) -> Iterator[LayerLayout]:
        """Axes inside a stage; for each of them policies from 'none' to 'full'."""
        wanted, mode_wanted = self.fixed.get("sequence_parallel"), self.fixed.get("context_mode")
        for tp in self._pick("tp", self._tensor()):
            for shared in [wanted] if wanted is not None else [True, False] if tp > 1 else [True]:
                for cp in self._pick("cp", self._context(tp, shared)):
                    sizes = self._pick(
                        "micro_batch", _shares(self.base.shared_sequences, self.ranks // (tp * cp))
                    )
                    local = max(1, self.model.kv_heads // tp)
                    for mode in context_modes(cp, local, mode_wanted):
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

    def meshes(self, inner: LayerLayout, ep: int, etp: int) -> Iterator[DataMesh]:
        """Meshes of the ranks beyond a stage's tensor and context ranks."""
        left = self.ranks // (inner.tp * inner.cp)
        for pp in self._pick("pp", divisors(left)):
            data = left // pp
            whole = self.base.shared_sequences % (data * inner.micro_batch) == 0
            if whole and data * inner.cp * inner.tp % (ep * etp) == 0 and self._is_cut(pp):
                wanted = self.fixed.get("order")
                for order in [wanted] if wanted else self._orders(inner, pp, data, ep * etp):
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

    def _is_cut(self, pp: int) -> bool:
        """True if the model has a cut for `pp` ranks, of which only the first is made."""
        return bool(self._cuts.get(pp)) or next(self._made_cuts(pp), None) is not None

    @property
    def has_pipelines(self) -> bool:
        """True if the model has a cut for more than one pipeline rank."""
        return any(pp > 1 and self._is_cut(pp) for pp in self._pick("pp", divisors(self.ranks)))

    def _made_cuts(self, pp: int) -> Iterator[StageSplit]:
        model, given, virtual = self.model, self.fixed.get("stages"), self.fixed.get("virtual")
        if pp == 1:
            if not isinstance(given, tuple) and not self._only_pipelines:
                schedule = self.fixed.get("schedule", self.base.layout.schedule)
                yield StageSplit(schedule, 1, given or "balanced", (model.layers,))
            return
        for schedule, chunks in self._schedules(pp):
            count = pp * chunks
            if virtual not in (None, chunks) or count > self.fixed.get("max_stages", inf):
                continue
            plain = tuple(even(model.layers, count))
            if isinstance(given, tuple):
                if len(given) == count and sum(given) == model.layers:
                    yield StageSplit(schedule, chunks, given, given)
                continue
            if given != "balanced":
                yield StageSplit(schedule, chunks, "even", plain)
            if given != "even":
                if count not in self._balanced:
                    self._balanced[count] = tuple(balanced(model, count, self.base.data.seq_len))
                if self._balanced[count] != plain or given:
                    yield StageSplit(schedule, chunks, "balanced", self._balanced[count])

    def _schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """(schedule, stages of a rank)."""
        most, wanted = (self.model.layers + 2) // pp, self.fixed.get("schedule")
        if "virtual" not in self.fixed and not isinstance(self.fixed.get("stages"), tuple):
            most = min(most, max(2, _STAGES // pp))
        for name in self._schedule_names:
            if wanted not in (None, name) or (self.base.train.compile and SCHEDULES[name].splits):
                continue
            if SCHEDULES[name].stages is None:
                yield from ((name, chunks) for chunks in range(1 if wanted else 2, most + 1))
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
                ):
                    yield Sharding(zero, replicate)
                    if most_shared:
                        break

    def _gathers_blocks(self, inner: LayerLayout, mesh: DataMesh, zero: int, dp: int) -> bool:
        """True if ranks store whole blocks of the weights that they gather in 8 bits, or gather others."""
        if not self.base.precision.fp8_gather:
            return True
        stage = {"tp": inner.tp, "sequence_parallel": inner.sequence_parallel, "cp": inner.cp}
        return self._rounds_alike(**stage, dp=dp, zero=zero, ep=mesh.ep, etp=mesh.etp)

    def spec(
        self, inner: LayerLayout, mesh: DataMesh, sharding: Sharding = NO_SHARDING, cut: StageSplit = NO_CUT
    ) -> RunSpec:
        """The run with such a layout; rules over several parts are not applied, which would take too long."""
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
