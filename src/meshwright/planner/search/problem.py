"""One search: a run without a layout on a cluster of one size, and what of the layout is fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.cost.uncertainty import fitting, room, spread
from meshwright.planner.layout_levels import POLICIES
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.memory.generic import Memory
from meshwright.planner.programs.rules import ProgramLayouts
from meshwright.planner.programs.table import PROGRAMS
from meshwright.planner.search.branch_and_bound import search
from meshwright.planner.search.least_memory import least_memory
from meshwright.planner.search.results import SearchResult
from meshwright.planner.search.simplest import NEAR
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.pipeline_schedules import SCHEDULES


@dataclass(frozen=True)
class SearchProblem:
    """A run without a layout, and the devices that it is to run on."""

    base: RunSpec
    cluster: Cluster
    stack: SoftwareStack
    fixed: dict[str, Any] = field(default_factory=dict)
    limit: float | None = None
    """Bytes of a device that may be used, where that is less than there are."""
    unsure: bool = False
    """True if plans may fit with a probability of one half, and not only with `SURE`."""
    compiled_by_default: bool = False
    """True if blocks are compiled unless a layout's schedule splits backwards, as in runs that leave it
    open."""
    program: ProgramLayouts | None = None
    """Whose rules layouts keep; the stack's by default."""

    @property
    def ranks(self) -> int:
        return self.cluster.count

    @property
    def model_name(self) -> str:
        """The model's preset, its HF folder or its family."""
        return self.base.model.preset or self.base.model.hf or self.base.model.family

    @property
    def capacity(self) -> float:
        """Bytes that a rank may need."""
        most = room(self.cluster)
        if not self.unsure:
            most = fitting(most, spread(self.cluster, self.stack))
        return most if self.limit is None else min(most, self.limit)

    @cached_property
    def costs(self) -> CostModel:
        """The cost model of the cluster."""
        return CostModel(self.cluster, self.stack)

    def space(self) -> LayoutSpace:
        """Its layouts. Selective recomputation is left out where it recomputes nothing, as 'none' does."""
        idle = self.stack.selective == "attention" and self.stack.fused_attention
        policies = [name for name in POLICIES if name != "selective" or not idle]
        levels = [level.devices for level in self.cluster.levels]
        program = self.program or PROGRAMS[self.stack.name]
        kinds = policies, self._keeps_attention, levels, program
        return LayoutSpace(self.base, self.ranks, self.fixed, *kinds)

    @property
    def _keeps_attention(self) -> bool:
        """True if recomputing all but attention is tried: if a second forward of it takes more than `NEAR` of
        a step, by its FLOPs."""
        model, length = self.base.model, self.base.data.seq_len
        least, every = (model.flops_per_token(each, causal=True) for each in (1, length))
        return self.stack.ours and every - least > 3 * NEAR * every

    def _split_space(self) -> LayoutSpace:
        """The pipelines whose schedules split backwards, with blocks that are not compiled."""
        train = self.base.train.model_copy(update={"compile": False})
        space = replace(self, base=self.base.model_copy(update={"train": train})).space()
        return space.only([name for name, kind in SCHEDULES.items() if kind.splits])

    def least_memory(self, enough: float = 0.0) -> Memory | None:
        """Bytes that a rank needs at least, in the layout that needs least or in the first with at most
        `enough`; None if no layout is legal."""
        return least_memory(self.space(), self.costs, memory_model(self.costs), enough)

    def search(self, top: int = 5, any_will_do: bool = False, **told: Any) -> SearchResult:
        """The `top` fastest layouts that fit, or any one; `told` are the search's `progress` and `counts`."""
        spaces = [self.space(), *([self._split_space()] if self.compiled_by_default else [])]
        memory = memory_model(self.costs)
        return search(spaces, self.costs, self.capacity, top, any_will_do=any_will_do, memory=memory, **told)

    def fits(self) -> bool:
        """True if some layout fits."""
        return bool(self.search(any_will_do=True).best)

    def resized(self, count: int) -> SearchProblem:
        """The run on another number of devices."""
        return replace(self, cluster=self.cluster.resized(count))

    def with_batch(self, seq_len: int, batch_tokens: int) -> SearchProblem:
        """The run with another batch, which has no warm-up. Raises `UserError`."""
        tree = self.base.to_json()
        tree["data"]["seq_len"] = seq_len
        tree["train"] |= {"batch_tokens": batch_tokens, "batch_warmup": []}
        return replace(self, base=RunSpec.model_validate(tree))

    def with_model(self, model: ModelSpec) -> SearchProblem:
        """The run with another model. Raises `UserError`."""
        tree = self.base.to_json()
        tree["model"] = model.model_dump(mode="json")
        return replace(self, base=RunSpec.model_validate(tree))

    def with_offload(self) -> SearchProblem:
        """The run with its moments in the hosts' memory, whether or not rules accept that."""
        train = self.base.train.model_copy(update={"offload": "host"})
        return replace(self, base=self.base.model_copy(update={"train": train}))

    def with_replicas(self, count: int, **tables: Mapping[str, Any]) -> SearchProblem:
        """The run with `count` replicas, and tables of keys that go with them. Raises `UserError`."""
        tree = self.base.to_json() | {"layout": {"replicate": count}} | tables
        fixed = {**self.fixed, "replicate": count}
        return replace(self, base=RunSpec.model_validate(tree), fixed=fixed)

    def without(self, key: str) -> SearchProblem:
        """The run with one key of the layout no longer fixed."""
        return replace(self, fixed={name: value for name, value in self.fixed.items() if name != key})
