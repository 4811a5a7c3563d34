"""Every layout that the rules accept for a model on so many ranks, in levels from the inside outwards.

A layout is chosen in four levels, so that what layouts share is computed once: `LayerLayout`, what a block's
operators depend on; `DataMesh`, the pipeline's ranks and the experts'; `StageSplit`, which stage is where, in
which order; `Sharding`, what data ranks do with states. Choices that differ in name only are taken once: the
mode of a context axis of one rank, ZeRO over one rank, the cut 'balanced' where it is the even one,
'interleaved' and 'bfs' with one stage a rank, which are '1f1b' and 'gpipe'. A key that the user has fixed
is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple, get_args

from meshwright.spec import Layout, RunSpec
from meshwright.spec.arithmetic import divisors
from meshwright.spec.layout import ONE_STAGE, ContextMode, Order, ScheduleName, ulysses_ranks
from meshwright.spec.rules import every_rank_has_rows, has_dense_layers
from meshwright.spec.sections import FullRecompute, NoRecompute, RecomputeSpec, SelectiveRecompute
from meshwright.spec.stages import balanced, even

_ORDERED = 512
"""Ranks up to which other orders of the axes are looked at; of more ranks they would take too long."""
POLICIES = ("none", "selective", "full")
"""Of recomputation."""
LOOPED = ("interleaved", "bfs")
"""Schedules with any number of stages a rank."""
WHOLE = ("gpipe", "1f1b", "interleaved", "bfs")
"""Schedules whose backwards are not split, as compiled blocks need."""


class LayerLayout(NamedTuple):
    """What a dense block's operators and messages depend on."""

    tp: int
    sequence_parallel: bool
    cp: int
    context_mode: ContextMode
    micro_batch: int
    recompute: RecomputeSpec


class DataMesh(NamedTuple):
    """The ranks of a pipeline, of each of its stages' experts, those left to data, and the axes' order."""

    pp: int
    data: int
    ep: int
    etp: int
    order: Order = "pp-replicate-dp-tp"


class StageSplit(NamedTuple):
    """Where the stages of a pipeline are, and in which order they work."""

    schedule: str
    chunks: int
    stages: str | tuple[int, ...]
    blocks: tuple[int, ...]
    """Of each stage."""


class Sharding(NamedTuple):
    """What data ranks share of the states."""

    zero: int
    replicate: int


NO_CUT, NO_SHARDING = StageSplit("1f1b", 1, "even", ()), Sharding(0, 1)
"""For what they do not change."""


class LayoutSpace:
    """The layouts of `base` on `ranks` ranks; `fixed` holds keys of the layout that are not to be chosen.

    `fixed` also takes 'policy', the policy of recomputation, which else is one of `policies`. `levels` are
    how many neighbouring ranks each level of the cluster has in a group: pipeline ranks are numbered inside
    of data ranks only where that brings them closer by a level, as it takes data ranks further apart.
    """

    def __init__(
        self,
        base: RunSpec,
        ranks: int,
        fixed: Mapping[str, Any] | None = None,
        policies: Sequence[str] = POLICIES,
        levels: Sequence[int] = (),
    ) -> None:
        self.base, self.ranks, self.fixed = base, ranks, dict(fixed or {})
        self._levels = levels
        self._cuts: dict[int, list[StageSplit]] = {}
        self._known_sizes: dict[int, Sequence[int]] = {}
        self._even_work: dict[int, tuple[int, ...]] = {}
        experts = (base.model.has_experts(layer) for layer in range(base.model.layers))
        self.routed_before = list(accumulate(experts, initial=0))
        self._policies = self._recomputations(policies)

    def _pick(self, key: str, found: Sequence[int]) -> Sequence[int]:
        wanted = self.fixed.get(key)
        return found if wanted is None else [each for each in found if each == wanted]

    def inner(self) -> Iterator[LayerLayout]:
        """Everything inside a stage."""
        for tp in self._tensor():
            for shared in self._shares_sequence(tp):
                for cp, mode in self._context(tp, shared):
                    for size in self._sizes(self.ranks // (tp * cp)):
                        for policy in self._policies:
                            yield LayerLayout(tp, shared, cp, mode, size, policy)

    def _sizes(self, ranks: int) -> Sequence[int]:
        """Sequences of a microbatch, for some pipeline of `ranks` ranks."""
        if ranks not in self._known_sizes:
            sequences = self.base.batch_sequences
            found = {
                each
                for data in divisors(ranks)
                if sequences % data == 0
                for each in divisors(sequences // data)
            }
            self._known_sizes[ranks] = self._pick("micro_batch", sorted(found))
        return self._known_sizes[ranks]

    def _tensor(self) -> Sequence[int]:
        model = self.base.model
        shared = model.moe.shared_ffn if model.moe else 0
        found = [
            tp
            for tp in divisors(model.heads)
            if self.ranks % tp == 0
            and (model.ffn % tp == 0 or not has_dense_layers(model))
            and (tp % model.kv_heads == 0 or model.kv_heads % tp == 0)
            and every_rank_has_rows(model.vocab_size, tp)
            and shared % tp == 0
        ]
        return self._pick("tp", found)

    def _shares_sequence(self, tp: int) -> list[bool]:
        wanted = self.fixed.get("sequence_parallel")
        if wanted is not None:
            return [wanted]
        return [True, False] if tp > 1 else [True]

    def _context(self, tp: int, shared: bool) -> Iterator[tuple[int, ContextMode]]:
        length, kv_heads = self.base.data.seq_len, self.base.model.kv_heads
        shared = shared or self.base.model.moe is not None
        local, wanted = max(1, kv_heads // tp), self.fixed.get("context_mode")
        for cp in self._pick("cp", divisors(self.ranks // tp)):
            if length % (2 * cp if cp > 1 else 1) or (shared and length // cp % tp):
                continue
            modes: list[ContextMode] = list(get_args(ContextMode)) if cp > 1 else ["ring"]
            if wanted:
                modes = [wanted]
            for mode in modes:
                if mode == "ulysses" and local % cp:
                    continue
                joint = mode == "ring+ulysses" and not wanted
                if joint and ulysses_ranks(cp, local, mode) in (1, cp):
                    continue  # one of the two by another name
                yield cp, mode

    def _recomputations(self, policies: Sequence[str]) -> list[RecomputeSpec]:
        own = self.base.recompute
        known: list[RecomputeSpec] = [NoRecompute(), SelectiveRecompute(), FullRecompute()]
        wanted = self.fixed.get("policy")
        return [
            own if own.policy == each.policy else each
            for each in known
            if each.policy == wanted or (wanted is None and each.policy in policies)
        ]

    def meshes(self, inner: LayerLayout, ep: int, etp: int) -> Iterator[DataMesh]:
        """How the ranks beyond a stage's tensor and context ranks are dealt out."""
        left = self.ranks // (inner.tp * inner.cp)
        for pp in self._pick("pp", divisors(left)):
            data = left // pp
            whole = self.base.batch_sequences % (data * inner.micro_batch) == 0
            if whole and data * inner.cp * inner.tp % (ep * etp) == 0 and self.cuts(pp):
                for order in self._orders_of(inner, pp, data, ep * etp):
                    yield DataMesh(pp, data, ep, etp, order)

    def _orders_of(self, inner: LayerLayout, pp: int, data: int, folded: int) -> list[Order]:
        """In which orders the axes may be numbered; those that number ranks alike once."""
        if "order" in self.fixed:
            return [self.fixed["order"]]
        found: list[Order] = ["pp-replicate-dp-tp"]
        if pp == 1 or self.ranks > _ORDERED:
            return found
        most = self._level(data * inner.cp * inner.tp)
        if (
            data > 1 and self._level(inner.cp * inner.tp) < most
        ):  # with so few ranks of dp, and others replicas
            found.append("replicate-pp-dp-tp")
        if data * inner.cp > 1 and folded == 1 and self._level(inner.tp) < most:
            found.append("replicate-dp-pp-tp")
        return found

    def _level(self, stride: int) -> int:
        """The innermost level at which ranks so far apart are neighbours."""
        within = [place for place, devices in enumerate(self._levels) if stride < devices]
        return min(within, default=max(0, len(self._levels) - 1))

    def experts(self, ranks: int) -> list[tuple[int, int]]:
        """(ep, etp) that fold out of `ranks`."""
        moe = self.base.model.moe
        whole = self._pick("ep", divisors(moe.experts) if moe else [1])
        parts = self._pick("etp", divisors(moe.ffn) if moe else [1])
        return [(ep, etp) for ep in whole for etp in parts if ranks % (ep * etp) == 0]

    def cuts(self, pp: int) -> list[StageSplit]:
        """The schedules and stages of `pp` ranks; for one rank the one that has no pipeline."""
        if pp not in self._cuts:
            self._cuts[pp] = list(self._made_cuts(pp))
        return self._cuts[pp]

    def _made_cuts(self, pp: int) -> Iterator[StageSplit]:
        layers, given = self.base.model.layers, self.fixed.get("stages")
        if pp == 1:
            if not isinstance(given, tuple):
                yield StageSplit(self.fixed.get("schedule", "1f1b"), 1, given or "even", (layers,))
            return
        for schedule, chunks in self._orders(pp):
            plain = tuple(even(layers, pp * chunks))
            if isinstance(given, tuple):
                if len(given) == pp * chunks and sum(given) == layers:
                    yield StageSplit(schedule, chunks, given, given)
                continue
            if given != "balanced":
                yield StageSplit(schedule, chunks, "even", plain)
            if given != "even":
                other = self._balanced(pp * chunks)
                if other != plain or given:
                    yield StageSplit(schedule, chunks, "balanced", other)

    def _balanced(self, count: int) -> tuple[int, ...]:
        if count not in self._even_work:
            self._even_work[count] = tuple(balanced(self.base.model, count, self.base.data.seq_len))
        return self._even_work[count]

    def _orders(self, pp: int) -> Iterator[tuple[str, int]]:
        """(schedule, stages a rank)."""
        most = (self.base.model.layers + 2) // pp
        wanted, virtual = self.fixed.get("schedule"), self.fixed.get("virtual")
        for name in get_args(ScheduleName):
            if wanted not in (None, name) or (self.base.train.compile and name not in WHOLE):
                continue
            if name in LOOPED:
                counts = list(range(1 if wanted else 2, most + 1))
            else:
                counts = [each for each in [1 if name in ONE_STAGE else 2] if each <= most]
            for chunks in counts:
                if virtual in (None, chunks):
                    yield name, chunks

    def shardings(self, inner: LayerLayout, mesh: DataMesh) -> Iterator[Sharding]:
        """What the data ranks of a mesh can do, the least memory first."""
        for zero in self._stages_of_zero(inner, mesh):
            yield from self._replicas(inner, mesh, zero)

    def most_shared(self, inner: LayerLayout, mesh: DataMesh) -> Iterator[Sharding]:
        """Of each stage of ZeRO the one that shares among most ranks."""
        for zero in self._stages_of_zero(inner, mesh):
            yield from islice(self._replicas(inner, mesh, zero), 1)

    def _stages_of_zero(self, inner: LayerLayout, mesh: DataMesh) -> Iterator[int]:
        alone = mesh.data * inner.cp == 1 and "zero" not in self.fixed
        return (zero for zero in self._pick("zero", [3, 2, 1, 0]) if not (zero and alone))

    def _replicas(self, inner: LayerLayout, mesh: DataMesh, zero: int) -> Iterator[Sharding]:
        for replicate in self._pick("replicate", divisors(mesh.data) if zero else [1]):
            dp = mesh.data // replicate
            if replicate == 1 and mesh.order == "replicate-pp-dp-tp" and "order" not in self.fixed:
                continue  # the same as the first order
            if self.fixed.get("dp", dp) == dp and dp * inner.cp * inner.tp % (mesh.ep * mesh.etp) == 0:
                yield Sharding(zero, replicate)

    def spec(self, inner: LayerLayout, mesh: DataMesh, cut: StageSplit, sharding: Sharding) -> RunSpec:
        """The run with such a layout. No rules over several parts are applied to it: they cost too much."""
        base = self.base
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
            micro_batch=inner.micro_batch,
            order=mesh.order,
        )
        return base.model_copy(update={"layout": layout, "recompute": inner.recompute})
