"""A request for plans in the user's words, and the searches that answer it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from meshwright.hardware import find as hardware
from meshwright.hardware.cluster import Cluster
from meshwright.planner import OBJECTIVES
from meshwright.planner.cost.offload import check_activation_offload, check_offload
from meshwright.planner.cost.precision import check_computes
from meshwright.planner.cost.software import stack_named
from meshwright.planner.programs.table import check_devices, refuse_mxfp4
from meshwright.planner.search.infeasible import key_name, not_run
from meshwright.planner.search.problem import SearchProblem
from meshwright.spec import RunSpec, UserError
from meshwright.spec.arithmetic import check_divides
from meshwright.spec.base import MAX_BATCH, MAX_RANKS
from meshwright.spec.compiled import COMPILE, COMPILED_ON, is_open, with_compiled_blocks
from meshwright.spec.load import Overrides, fixed_layout, from_tree, given_keys
from meshwright.spec.model_argument import model_tables
from meshwright.spec.other_models import refuse_other_models
from meshwright.spec.pipeline_schedules import DEFAULT_SCHEDULE, SCHEDULES, WHOLE_SCHEDULE
from meshwright.units import amount, duration

_MOST_SHOWN = 20
"""Layouts that are shown at most: a search for many more takes minutes."""
_NEAR = 0.05
"""Share of a batch by which it is changed at most, so that all devices share it."""


@dataclass(frozen=True)
class PlanRequest:
    """A request for the `top` best layouts of a model on a cluster.

    `model` is what `model_tables` takes (a preset or another name of a model, an HF folder or
    config.json, a run file or folder), or a `RunSpec` whose layout is ignored; `cluster` a name of the
    catalogue, a hardware file or a `Cluster`, of `gpus` devices or of any power-of-two number of nodes
    within '64..1024'. `batch_tokens` may be '16M'. `max_memory` is in bytes of a device, `price` in USD
    for a device and hour, `tokens` what is trained on in all, `within` the longest time for it, as '30d'
    or in seconds, and `max_stages` the most stages of a pipeline. `overrides` are dotted keys with their
    texts: those of the layout and `recompute.policy` are kept fixed. `islands` are as many as are wanted,
    or 'auto', and their exchanges are chosen so that at most `max_exposed` percent of the time is spent
    waiting for them; keys of `outer` that are given stay.
    """

    model: str | Path | RunSpec
    cluster: str | Cluster
    gpus: int | str | None = None
    seq_len: int | None = None
    batch_tokens: int | str | None = None
    top: int = 5
    objective: str = "time"
    stack: str = "meshwright"
    price: float | None = None
    tokens: float | str | None = None
    max_memory: float | None = None
    overrides: Overrides = ()
    within: float | str | None = None
    max_stages: int | None = None
    islands: int | str | None = None
    max_exposed: float = 5.0

    def problems(self) -> tuple[list[SearchProblem], str | None]:
        """A search for each number of devices, ascending, and the batch in words where it was rounded.

        Raises `UserError`.
        """
        stack = stack_named(self.stack)
        kind = self._kind if self.price is None else replace(self._kind, price=self.price)
        check_devices(stack.name, kind.device)
        self._check(kind)
        sizes = sizes_of(self.gpus, kind)
        base, note = self._base_run(kind)
        check_computes(base.precision.compute, kind.device)
        check_offload(base, kind)
        check_activation_offload(base, kind, stack)
        refuse_other_models(base, "plan")
        if (tokens := self.total_tokens) is not None:
            train = base.train.model_copy(update={"steps": None, "epochs": None, "tokens": int(tokens)})
            base = base.model_copy(update={"train": train})
        saves = "selective" if "recompute.save" in self._given else None
        keys = fixed_layout(self.overrides) | {"policy": dict(self.overrides).get("recompute.policy", saves)}
        _check_axes(keys, sizes)
        keys["max_stages"] = self.max_stages
        fixed = {name: value for name, value in keys.items() if value is not None}
        tree, _ = self._tables(kind)
        by_default = base.train.compile and is_open(COMPILE, tree, self.overrides)
        problem = SearchProblem(base, kind, stack, fixed, self.max_memory, compiled_by_default=by_default)
        outer = given_keys("outer", tree, self.overrides)
        if self.islands is None and outer.get("every"):
            count = fixed.get("replicate", tree.get("layout", {}).get("replicate", 1))
            if count == 1:
                raise UserError(
                    f"outer.every: {outer['every']} steps between exchanges are given, and no number of "
                    f"islands; give --islands auto, or --layout.replicate 2 or more"
                )
            problem = problem.with_replicas(count, outer=outer)
        problems = [problem.resized(count) for count in sizes]
        _check_pipelines(problems)
        return problems, note

    @property
    def _given(self) -> dict[str, str]:
        """Dotted keys with their texts, without those that are taken back."""
        return {key: text for key, text in self.overrides if text != "none"}

    def given_in(self, table: str) -> dict[str, Any]:
        """Keys of a table, such as 'outer', that MODEL or the flags give. Raises `UserError`."""
        tree, _ = self._tables(self._kind)
        return given_keys(table, {table: tree.get(table) or {}}, self.overrides)

    @property
    def run_file(self) -> str:
        """The run file, or the folder of a run, that MODEL is; empty for others. Raises `UserError`."""
        return self._tables(self._kind)[1]

    @property
    def _kind(self) -> Cluster:
        """The cluster, of whatever size."""
        return hardware.cluster(self.cluster) if isinstance(self.cluster, str) else self.cluster

    @property
    def total_tokens(self) -> float | None:
        """Tokens that are trained on in all. Raises `UserError`."""
        if self.tokens is None:
            text = self._given.get("train.tokens")
            return None if text is None else _read("--train.tokens", text, float)
        return _read("--tokens", self.tokens, amount)

    @property
    def most_seconds(self) -> float:
        """Seconds that training may take. Raises `UserError`."""
        return inf if self.within is None else _read("--within", self.within, duration)

    def _check(self, kind: Cluster) -> None:
        if self.objective not in OBJECTIVES:
            raise UserError(f"--objective: '{self.objective}' is not one of {', '.join(OBJECTIVES)}")
        if not 1 <= self.top <= _MOST_SHOWN:
            raise UserError(f"--top: must be from 1 to {_MOST_SHOWN} layouts, got {self.top}")
        if self.max_stages is not None and self.max_stages < 1:
            raise UserError(f"--max-stages: must be at least 1, got {self.max_stages}")
        tokens, length = self.total_tokens, self.seq_len or self._given.get("data.seq_len")
        if self.most_seconds < inf:
            for missing, words in (
                (self.objective != "cost", "it finds the least money for a time; give --objective cost"),
                (tokens is None, "it is the time for --tokens, which is missing; give it, such as 15T"),
                (".." not in str(self.gpus), "it chooses the devices; give a range, such as --gpus 64..1024"),
            ):
                if missing:
                    raise UserError(f"--within: {words}")
        self._check_islands()
        if self.objective == "longest-context" and length:
            raise UserError(
                f"--seq-len: {int(length):,} is given, but the objective 'longest-context' looks for the "
                f"longest; leave one of them out"
            )
        if self.objective == "cost" and kind.price is None:
            raise UserError(
                f"--objective: 'cost' needs a price, and none is known of {kind.name}; give --price USD for "
                f"a device and hour"
            )

    def _check_islands(self) -> None:
        if self.islands is None:
            if self.max_exposed != type(self).max_exposed:
                raise UserError(
                    f"--max-exposed: {self.max_exposed:g} has no effect without islands; give --islands auto"
                )
            return
        for key in ("outer.quorum", "outer.staleness"):
            if key in self._given:
                raise UserError(
                    f"{key}: {self._given[key]} is given together with --islands, which plans islands that "
                    f"exchange together after outer.every steps; leave one of them out"
                )
        number = str(self.islands)
        if number != "auto" and not (number.isdecimal() and int(number) > 1):
            raise UserError(f"--islands: '{number}' is not valid: give a number, 2 or more, or auto")
        if not 0 < self.max_exposed <= 100:
            raise UserError(
                f"--max-exposed: {self.max_exposed:g} is not a share of the time; give 1 to 100 percent"
            )
        if "layout.replicate" in self._given:
            raise UserError(
                f"--islands: {number} is given together with --layout.replicate "
                f"{self._given['layout.replicate']}; give one of them"
            )
        if self.objective not in ("time", "cost"):
            raise UserError(
                f"--islands: are not chosen with --objective {self.objective}; leave one of them out"
            )
        if self.stack != "meshwright":
            raise UserError(
                f"--islands: are of this program, and --stack is {self.stack}; leave one of them out"
            )

    def _base_run(self, cluster: Cluster) -> tuple[RunSpec, str | None]:
        """The run without its layout, and its batch in words where it was rounded. Raises `UserError`."""
        tree, source = self._tables(cluster)
        given = self._given
        if "mxfp4" in (given.get("precision.compute"), tree.get("precision", {}).get("compute")):
            refuse_mxfp4(stack_named(self.stack).name)
        tables = ["layout"]
        if self.islands is not None or given_keys("outer", tree, self.overrides).get("every"):
            tables.append("outer")  # islands come with the layout
        for table in tables:
            tree.pop(table, None)
        train = tree.get("train", {})
        others = [(key, text) for key, text in self.overrides if key.partition(".")[0] not in tables]
        warmups = {"train.batch_warmup", "train.warmup_steps"}  # too long for steps of the largest batch
        alone = [(key, text) for key, text in others if key not in warmups]
        most = MAX_BATCH - MAX_BATCH % given_keys("data", tree, self.overrides).get("seq_len", 1)
        largest = {**train, "batch_tokens": most, "batch_warmup": [], "warmup_steps": None}
        first = from_tree({**tree, "train": largest}, alone, source)
        seq_len = self.seq_len
        self._check_agreement(None if source or isinstance(self.model, RunSpec) else str(self.model))
        if seq_len is None:
            told = "seq_len" in tree.get("data", {}) or "data.seq_len" in given
            seq_len = first.data.seq_len if told else min(first.model.max_seq_len, 8192)
        if seq_len < 1:
            raise UserError(f"--seq-len: must be at least 1 token, got {seq_len}")
        batch = given.get("train.batch_tokens", train.get("batch_tokens"))
        wanted = self.batch_tokens if self.batch_tokens is not None else batch
        if wanted is None:
            raise UserError(
                "--batch-tokens: is missing (tokens of one optimiser step); give it, such as --batch-tokens "
                "4M"
            )
        tokens, note = batch_of(wanted, seq_len, sizes_of(self.gpus, cluster)[0])
        others += [("data.seq_len", str(seq_len)), ("train.batch_tokens", str(tokens))]
        wanted = SCHEDULES.get(given.get("layout.schedule", ""))
        split = wanted is not None and wanted.splits
        if cluster.device.kind in COMPILED_ON and stack_named(self.stack).ours and not split:
            others = [*with_compiled_blocks(tree, others)]
        return from_tree(tree, others, source), note

    def _check_agreement(self, model: str | None) -> None:
        """Raise `UserError` for a dotted key that says otherwise than MODEL or its flag."""
        for flag, value, key in (
            ("MODEL", model, "model.preset"),
            ("MODEL", model, "model.hf"),
            ("--seq-len", self.seq_len, "data.seq_len"),
            ("--batch-tokens", self.batch_tokens, "train.batch_tokens"),
            ("--tokens", self.tokens, "train.tokens"),
            ("--tokens", self.tokens, "train.steps"),
        ):
            if value is None or (text := self._given.get(key)) is None:
                continue
            same = {value}
            if flag != "MODEL":  # 16M may be 16 x 2^20 or 16 x 10^6
                same = {f"{_read(flag, value, partial(amount, unit=unit)):.0f}" for unit in (1000, 1024)}
            if text not in same or key == "train.steps":
                raise UserError(f"{flag}: {value} is given together with --{key} {text}; give one of them")

    def _tables(self, cluster: Cluster) -> tuple[dict[str, Any], str]:
        """The tables of the run that `model` stands for, and the run file, if it is one.

        What gives no format computes in bf16, or in fp32 on CPUs. Raises `UserError`.
        """
        if isinstance(self.model, RunSpec):
            return self.model.to_json(), ""
        tree, source = model_tables(str(self.model))
        if isinstance(given := tree.get("precision", {}), dict):
            tree["precision"] = {"compute": cluster.device.default_format, **given}
        return tree, source


def _check_axes(keys: Mapping[str, Any], sizes: Sequence[int]) -> None:
    """Raise `UserError` for pipeline or context ranks that divide no number of devices."""
    for axis in ("pp", "cp"):
        if all(size % (keys.get(axis) or 1) for size in sizes):
            check_divides(f"layout.{axis}", keys[axis], "the number of devices", sizes[0])


def _check_pipelines(problems: Sequence[SearchProblem]) -> None:
    """Raise `UserError` for keys of pipelines where no layout has one."""
    last, fixed = problems[-1], problems[-1].fixed
    defaults = (None, DEFAULT_SCHEDULE, WHOLE_SCHEDULE, 1)
    idle = next((key for key in ("schedule", "virtual") if fixed.get(key) not in defaults), None)
    if idle is None or fixed.get("pp", 1) > 1 or any(each.space().has_pipelines for each in problems):
        return
    if (words := not_run(last, pipelines=True)) is not None:
        raise UserError(words)
    others = [key for key in ("pp", "schedule", "virtual", "max_stages") if key in fixed and key != idle]
    given = "".join(f", with {key_name(key)} = {fixed[key]}" for key in others)
    raise UserError(
        f"layout.{idle}: {fixed[idle]} has no effect, as no layout of {last.ranks:,} ranks has a pipeline by "
        f"{last.stack.name}{given}; leave {'one of them' if others else 'it'} out"
    )


def batch_of(wanted: int | str, seq_len: int, ranks: int = 1) -> tuple[int, str | None]:
    """Tokens of a batch of whole sequences near the wanted one, and a note if they differ.

    16M may be 16 x 2^20 or 16 x 10^6: of the numbers of sequences from one to the other, the one that most
    powers of two divide is taken, of those that `ranks` can share if there are any, since most layouts can
    share it; else the nearest one that these can share, if it is near. Raises `UserError`.
    """
    powers = (partial(amount, unit=unit) for unit in (1000, 1024))
    low, high = (_read("--batch-tokens", wanted, each) / seq_len for each in powers)
    if high < 1:
        raise UserError(
            f"--batch-tokens: {wanted} is less than one sequence of {seq_len:,} tokens; give at least "
            f"{seq_len}"
        )
    first = max(1, round(low))
    last = max(first, int(high))
    count = _roundest(first, last)
    if count % ranks and last // ranks * ranks >= first:
        count = ranks * _roundest(-(-first // ranks), last // ranks)
    elif count % ranks and low < high:
        ends = last // ranks * ranks, -(-last // ranks) * ranks
        near = [each for each in ends if first * (1 - _NEAR) <= each <= last * (1 + _NEAR)]
        count = min(near, key=lambda each: max(first - each, each - last), default=count)
    tokens = count * seq_len
    if str(tokens) == str(wanted):
        return tokens, None
    sequences = f"{count:,} sequence{'s' * (count > 1)}"
    return tokens, f"{wanted} is taken as {sequences} of {seq_len:,} tokens = {tokens:,}"


def _roundest(first: int, last: int) -> int:
    """The number from `first` to `last` that most powers of two divide; the largest of several."""
    step = 1
    while last // (2 * step) * 2 * step >= first:
        step *= 2
    return last // step * step


def _read(flag: str, value: float | str, read: Callable[[str], float]) -> float:
    """The number that a flag's value states. Raises `UserError`."""
    try:
        return read(str(value))
    except ValueError as error:
        raise UserError(f"{flag}: '{value}' is not valid: {error}") from None


def sizes_of(gpus: int | str | None, kind: Cluster) -> list[int]:
    """The numbers of devices to plan for, ascending. Raises `UserError`."""
    on_cpu = kind.device.kind == "cpu"
    if gpus is None:
        if on_cpu and kind.sharing == kind.count:
            raise UserError("--gpus: is missing (ranks that share the host); give it, such as --gpus 2")
        return [kind.count]
    parts = re.fullmatch(r"([0-9]+)(?:\.\.([0-9]+))?", str(gpus))
    low, high = (int(parts[1]), int(parts[2] or parts[1])) if parts else (0, 0)
    if not 1 <= low <= high:
        raise UserError(
            f"--gpus: '{gpus}' is not valid: it should be a number of devices, or a range such as 64..1024"
        )
    if high > MAX_RANKS:
        raise UserError(
            f"--gpus: {high:,} is more than the {MAX_RANKS:,} devices that a run has at most; give fewer"
        )
    node = kind.node
    if parts and parts[2]:
        found = [node << power for power in range(32) if low <= node << power <= high]
        if not found:
            raise UserError(
                f"--gpus: from {low} to {high} there is no power-of-two number of nodes of {node} devices; "
                f"give one number, or a wider range"
            )
        return found
    if not on_cpu and low > node and low % kind.resized(low).node:
        usual = kind.resized if kind.host else lambda count: kind  # racks are often used in parts, nodes not
        below, above = (
            next(count for count in counts if count % usual(count).node == 0)
            for counts in (range(low - 1, 0, -1), range(low + 1, low + node + 1))
        )
        raise UserError(
            f"--gpus: {low:,} devices are not a multiple of the {node} of a node of {kind.name}, nor of an "
            f"equal part of each; try {below:,} or {above:,}"
        )
    return [low]
