"""Rules on the layouts that a training program runs: each a predicate, and a sentence for who breaks it.

A rule reads only the choices that are made at its step of the search (`planner/layout_space.py`), so that
the space is cut where a choice is made, and a layout that is given is checked by the same predicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from meshwright.hardware.cluster import DeviceKind
from meshwright.planner.programs.stage_cuts import StageCut
from meshwright.spec import Layout, ModelSpec, RunSpec
from meshwright.spec.layout import ContextMode, Order
from meshwright.spec.pipeline_schedules import SCHEDULES, WHOLE_SCHEDULE
from meshwright.spec.stages import even, stages

Step = Literal["axes", "mesh", "schedule", "stages", "microbatches", "sharding"]
"""When a rule can be decided: with the axes inside a stage; with the pipeline and expert ranks and their
order; with the schedule and the stages of a rank; with the blocks of each stage; with the schedule and the
microbatches of a rank; with the ZeRO stage and its replicas, on the ranks of all axes."""


class LayoutChoice(NamedTuple):
    """The choices of a layout that rules read; those that are not made yet are those of one device."""

    model: ModelSpec
    length: int
    """Tokens of a sequence."""
    tp: int = 1
    sequence_parallel: bool = True
    cp: int = 1
    context_mode: ContextMode = "ring"
    pp: int = 1
    ep: int = 1
    etp: int = 1
    order: Order = "pp-replicate-dp-tp"
    schedule: str = "1f1b"
    virtual: int = 1
    """Stages of a rank."""
    stages: tuple[int, ...] = ()
    """Blocks of each stage."""
    microbatches: int = 1
    zero: int = 0
    replicate: int = 1
    dp: int = 1

    @property
    def shards(self) -> bool:
        """True if there are ranks that ZeRO could share states among."""
        return self.dp * self.cp > 1

    @staticmethod
    def of(spec: RunSpec) -> LayoutChoice:
        """All choices of a run's layout."""
        at, model = spec.layout, spec.model
        made = stages(model, at, spec.data.seq_len)
        return LayoutChoice(
            *(model, spec.data.seq_len, at.tp, at.sequence_parallel, at.cp, at.context_mode),
            *(at.pp, at.ep, at.etp, at.order, schedule_run(at.schedule, at.chunks), at.chunks),
            *(tuple(len(stage.blocks) for stage in made), spec.microbatches),
            *(at.zero, at.replicate, at.dp),
        )


def schedule_run(name: str, virtual: int) -> str:
    """The schedule that runs under a name: in loops with one stage a rank it is another."""
    return {("interleaved", 1): "1f1b", ("bfs", 1): "gpipe"}.get((name, virtual), name)


@dataclass(frozen=True)
class Rule:
    """A rule of a program: what breaks it, and the words for that."""

    step: Step
    key: str
    """Key of the layout, or 'model.moe', that is named in the sentence."""
    broken: Callable[[LayoutChoice], bool]
    why: str
    """A clause on the program that follows its name, such as 'which has no pipelines'; fields of the
    choice and of its model may stand in braces."""
    remedy: str | Callable[[LayoutChoice], str]
    """Values, or another program, that would work."""

    def sentence(self, program: str, release: str, spec: RunSpec) -> str:
        """The key, its value, the program, why, and what would work, of a run that breaks the rule."""
        choice = LayoutChoice.of(spec)
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(choice)
        return f"{self.reason(program, release, spec)}; {remedy.format(**choice._asdict())}"

    def reason(self, program: str, release: str, spec: RunSpec) -> str:
        """The sentence without what would work; `release` is the year that the program is known from."""
        of = f" of {release}" if release else ""
        return f"{self._given(spec)} by {program}{of}, {self.why.format(**LayoutChoice.of(spec)._asdict())}"

    def _given(self, spec: RunSpec) -> str:
        """The key and its value as a sentence begins."""
        if (moe := spec.model.moe) is not None and self.key == "model.moe":
            return f"model.moe: a model of {moe.experts} experts is not run"
        value = spec.layout.chunks if self.key == "virtual" else getattr(spec.layout, self.key)
        if isinstance(value, (tuple, bool)):
            value = ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
        return f"layout.{self.key}: {value} is not run"


@dataclass(frozen=True)
class ProgramLayouts:
    """The layouts that a training program runs."""

    source: str
    """Files or documents, and their release, that the rules are from."""
    release: str = ""
    """Years of that release, which another one may differ from."""
    devices: tuple[DeviceKind, ...] = ("cuda", "rocm", "cpu")
    """Kinds of devices that it runs on."""
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """Pipeline schedules that it has; none of a program without pipelines."""
    rules: tuple[Rule, ...] = ()
    cut: StageCut | None = None
    """The one way in which it deals blocks to stages; None where these may be chosen."""
    block_formats: tuple[str, ...] = ()
    """Values of `precision.compute` of 8 or 4 bits whose blocks have scales in the hardware (MX, NV)."""
    sharding: Mapping[int, str] = field(default_factory=dict)
    """ZeRO stage -> the setting by which the program calls it."""
    hybrid: Mapping[int, str] = field(default_factory=dict)
    """Settings where groups of ranks shard and are replicated, if the program calls that otherwise."""
    labels: Mapping[int, str] = field(default_factory=dict)
    """ZeRO stage -> a short word of that setting, for tables; 'zero2' where there is none."""

    @cached_property
    def _by_step(self) -> dict[Step, tuple[Rule, ...]]:
        steps: dict[Step, tuple[Rule, ...]] = {}
        for rule in self.rules:
            steps[rule.step] = (*steps.get(rule.step, ()), rule)
        return steps

    def decides(self, step: Step) -> bool:
        """True if it has a rule of a step."""
        return step in self._by_step

    def runs(self, step: Step, choice: LayoutChoice) -> bool:
        """True if a choice breaks no rule of a step."""
        return not any(rule.broken(choice) for rule in self._by_step.get(step, ()))

    def broken(self, spec: RunSpec) -> Rule | None:
        """The first rule that a run's layout breaks, or None."""
        if not self.rules:
            return None
        choice = LayoutChoice.of(spec)
        return next((rule for rule in self.rules if rule.broken(choice)), None)

    def without(self, rules: tuple[Rule, ...]) -> ProgramLayouts:
        """The program without some of its rules, so that their part in a refusal shows."""
        return replace(self, rules=tuple(rule for rule in self.rules if rule not in rules))

    def dealt(self, model: ModelSpec, layout: Layout) -> Layout:
        """A layout with the blocks in its stages that the program deals them, where it leaves no choice."""
        if self.cut is None or layout.pp == 1:
            return layout
        count = layout.pp * layout.chunks
        cut, plain = self.cut(model, count), tuple(even(model.layers, count))
        return layout.model_copy(update={"stages": "even" if cut in (None, plain) else cut})

    def opened(self, spec: RunSpec) -> RunSpec:
        """A run whose schedule, stages and sharding of tokens are the program's where they were left open."""
        layout, given = spec.layout, spec.layout.model_fields_set
        if "sequence_parallel" not in given and not self.runs("axes", LayoutChoice.of(spec)):
            whole = layout.model_copy(update={"sequence_parallel": False})
            if self.runs("axes", LayoutChoice.of(spec.model_copy(update={"layout": whole}))):
                layout = whole
        if "schedule" not in given and layout.schedule not in self.schedules:
            has = WHOLE_SCHEDULE in self.schedules or not self.schedules
            first = WHOLE_SCHEDULE if has else self.schedules[0]
            layout = layout.model_copy(update={"schedule": first})
        if "stages" not in given:
            layout = self.dealt(spec.model, layout)
        return spec.model_copy(update={"layout": layout})

    def label(self, spec: RunSpec) -> str:
        """A layout's ZeRO stage in a word, as tables have it; an empty text for none."""
        zero = spec.layout.zero
        if not zero and spec.layout.shard_ranks == 1:
            return ""
        return self.labels.get(zero, f"zero{zero}" if zero else "")

    def sharding_of(self, spec: RunSpec) -> str:
        """The program's own setting for a layout's ZeRO stage; an empty text where nothing is sharded."""
        at = spec.layout
        names = self.hybrid if at.replicate > 1 and self.hybrid else self.sharding
        if at.shard_ranks == 1 or at.zero not in names:
            return ""
        return names[at.zero].format(replicate=at.replicate, dp=at.dp)
