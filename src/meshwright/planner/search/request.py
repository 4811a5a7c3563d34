"""What a wish for a plan says: which run, on which devices, and what of the layout is fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.hardware.cluster import NETWORKS, Cluster
from meshwright.hardware.find import catalogue
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.cost.uncertainty import fitting, room, spread
from meshwright.planner.layout_space import POLICIES, LayoutSpace
from meshwright.planner.memory.exact import fullest
from meshwright.planner.search.branch_and_bound import Progress, SearchResult, search
from meshwright.spec import RunSpec, UserError
from meshwright.spec.errors import did_you_mean
from meshwright.spec.load import fixed_layout, from_tree, read_tree
from meshwright.spec.presets import PRESETS
from meshwright.units import amount

_SLACK = 1.1
"""Of a device's memory, what the search's formulas may need where those of our own program decide."""
Overrides = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class PlanRequest:
    """A run without a layout, and where it is to run."""

    base: RunSpec
    cluster: Cluster
    stack: SoftwareStack
    fixed: dict[str, Any] = field(default_factory=dict)
    limit: float | None = None
    """Bytes of a device that may be used, where that is less than there are."""

    @property
    def ranks(self) -> int:
        return self.cluster.count

    @property
    def capacity(self) -> float:
        """Bytes that a rank may need."""
        most = fitting(room(self.cluster), spread(self.cluster, self.stack))
        return most if self.limit is None else min(most, self.limit)

    def space(self) -> LayoutSpace:
        """Its layouts. Where selective recomputation computes nothing again it is 'none' by another name."""
        idle = self.stack.selective == "attention" and self.stack.fused_attention
        policies = [each for each in POLICIES if each != "selective" or not idle]
        levels = [level.devices for level in self.cluster.levels]
        return LayoutSpace(self.base, self.ranks, self.fixed, policies, levels)

    def engines(self) -> CostModel:
        return CostModel(self.cluster, self.stack)

    def search(
        self, top: int = 5, progress: Progress | None = None, any_will_do: bool = False
    ) -> SearchResult:
        """The `top` fastest layouts that fit, or any one; of our own program by its memory exactly."""
        on, own = self.engines(), self.stack.ours

        def accept(spec: RunSpec) -> bool:
            return fullest(spec, on).device <= self.capacity

        return search(
            self.space(), on, self.searched, top, progress, any_will_do, accept=accept if own else None
        )

    @property
    def searched(self) -> float:
        """Bytes that a rank may need by the search's formulas, where those of our own program decide."""
        return self.capacity * (_SLACK if self.stack.ours else 1.0)


def base_run(
    model: str | Path | RunSpec,
    cluster: Cluster,
    seq_len: int | None,
    batch_tokens: int | str | None,
    overrides: Overrides,
) -> tuple[RunSpec, str | None]:
    """The run without its layout, and in words what its batch was taken for.

    `model` is a preset's name, an HF folder or config.json, a run file or a run's folder, or a run. What it
    computes in is the run's own format, and where only a model is named bf16, or fp32 on CPUs.
    """
    tree, is_run = (model.to_json(), True) if isinstance(model, RunSpec) else _tree(str(model))
    tree = {name: part for name, part in tree.items() if name != "layout"}
    others = [(key, text) for key, text in overrides if not key.startswith("layout.")]
    if not is_run:
        tree["precision"] = {"compute": "fp32" if cluster.device.kind == "cpu" else "bf16"}
    source = str(model) if is_run and not isinstance(model, RunSpec) else ""
    first = from_tree({**tree, "train": {**tree.get("train", {}), "batch_tokens": 1 << 62}}, others, source)
    if seq_len is None:
        given = "seq_len" in tree.get("data", {}) or any(key == "data.seq_len" for key, _ in others)
        seq_len = first.data.seq_len if given else min(first.model.max_seq_len, 8192)
    if seq_len < 1:
        raise UserError(f"--seq-len: {seq_len} tokens are no sequence; give 1 or more")
    wanted = batch_tokens
    if wanted is None:
        wanted = tree.get("train", {}).get("batch_tokens")
    if wanted is None:
        raise UserError(
            "--batch-tokens: is missing (tokens of one optimiser step); give it, such as --batch-tokens 4M"
        )
    tokens, said = batch_of(wanted, seq_len)
    others = [(key, text) for key, text in others if key not in ("data.seq_len", "train.batch_tokens")]
    others += [("data.seq_len", str(seq_len)), ("train.batch_tokens", str(tokens))]
    return from_tree(tree, others, source), said


def _tree(name: str) -> tuple[dict[str, Any], bool]:
    """The tables of a run file that a model's name stands for; and whether it names a whole run."""
    path = Path(name)
    if name in PRESETS:
        return {"model": {"preset": name}}, False
    if path.suffix == ".toml" or (path / "run.json").is_file():
        return read_tree(path), True
    if path.name == "config.json" or (path / "config.json").is_file():
        return {"model": {"hf": name}}, False
    hint = did_you_mean(name, PRESETS) or f"; the presets are {', '.join(PRESETS)}"
    raise UserError(
        f"MODEL: '{name}' is neither a preset, nor an HF folder or config.json, nor a run file{hint}"
    )


def batch_of(wanted: int | str, seq_len: int) -> tuple[int, str | None]:
    """A batch of whole sequences near a wish, and what was taken in words where that is not what was said.

    16M may be 16 x 2^20 or 16 x 10^6: of the numbers of sequences from one to the other, the one that most
    powers of two divide is taken, since it can be dealt to most layouts. Raises `UserError`.
    """
    try:
        low, high = (amount(str(wanted), unit) / seq_len for unit in (1000, 1024))
    except ValueError as error:
        raise UserError(f"--batch-tokens: '{wanted}' is not valid: {error}") from None
    if high < 1:
        raise UserError(
            f"--batch-tokens: {wanted} is less than one sequence of {seq_len:,} tokens; give at least "
            f"{seq_len}"
        )
    first, last = max(1, round(low)), max(1, int(high))
    counts = range(first, last + 1) if last > first else range(first, first + 1)
    count = _most_even(counts)
    tokens = count * seq_len
    if str(tokens) == str(wanted):
        return tokens, None
    sequences = f"{count:,} sequence{'s' * (count > 1)}"
    return tokens, f"{wanted} is taken as {sequences} of {seq_len:,} tokens = {tokens:,}"


def _most_even(counts: range) -> int:
    """The number that the highest power of two divides; of several the largest."""
    step = 1
    while counts[-1] // (2 * step) * 2 * step >= counts[0]:
        step *= 2
    return counts[-1] // step * step


def fixed_keys(overrides: Overrides) -> dict[str, Any]:
    """What flags fix of a layout and of its recomputation's policy."""
    found = {name: value for name, value in fixed_layout(overrides).items() if value is not None}
    for key, text in overrides:
        if key == "recompute.policy":
            found["policy"] = text
    return found


def node(cluster: Cluster) -> int:
    """Devices of one node: what is joined by more than a network."""
    inner = [level.devices for level in cluster.hierarchy if level.kind not in NETWORKS]
    return max(inner, default=1)


def check_count(cluster: Cluster, count: int) -> None:
    """Refuse a number of devices that leaves a node partly used beside full ones."""
    each = node(cluster)
    if cluster.device.kind == "cpu" or count <= each or count % each == 0:
        return
    below = count // each * each
    raise UserError(
        f"--gpus: {count:,} devices are not a multiple of the {each} of a node of {cluster.name}; try "
        f"{below:,} or {below + each:,}"
    )


def roomier(cluster: Cluster) -> list[Cluster]:
    """Clusters of as many devices with more memory, of the catalogue, those with least of it first."""
    others = [each for each in catalogue().values() if each.device.kind == cluster.device.kind]
    more = [each for each in others if each.device.memory > cluster.device.memory]
    return [each.resized(cluster.count) for each in sorted(more, key=lambda each: each.device.memory)]
