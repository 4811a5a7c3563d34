"""The nodes, ranks and time of a job, from a run's layout, or from a plan for a cluster where it has none."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from meshwright.hardware.find import cluster as hardware_of
from meshwright.planner.cost.model import CostModel
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.explanation import describe
from meshwright.rank.auto_layout import planned
from meshwright.rank.env import resized, sets_layout
from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import Overrides, from_tree
from meshwright.spec.other_models import other_models
from meshwright.units import counted
from meshwright.units import seconds as in_seconds

RANKS_OF_A_NODE = 8
"""GPUs of a node where no cluster says another number, as of DGX and HGX machines."""
START_S = 20 * 60
"""Seconds for what comes before the first step and after the last one: imports, data, compiling, saves."""
MOST_S = 24 * 3600
"""Longest time that a prediction asks for; what is left after it goes on as the job is started again."""


@dataclass(frozen=True)
class Size:
    """A job's `nodes`, of which `least` are enough where the run has a range, with `ranks` of each.

    `seconds` is None where nothing predicts it. `told` are sentences on what was chosen, and why.
    """

    nodes: int
    least: int | None
    ranks: int
    gpus: bool
    seconds: int | None
    told: tuple[str, ...]

    def in_words(self, spec: RunSpec) -> str:
        """Nodes and ranks, and the layout that has so many: 2 nodes of 8 ranks, for dp=16."""
        least = "" if self.least is None else f"{self.least} to "
        nodes = counted(self.nodes, "nodes")
        return f"{least}{nodes} of {counted(self.ranks, 'ranks')}, for {describe(spec)}"


def spec_for(
    tree: dict[str, Any], overrides: Overrides, source: str, cluster: str | None, gpus: int | None
) -> tuple[RunSpec, str | None]:
    """The spec of a run, and why it has its layout where that is planned, for `gpus` devices of a cluster.

    Raises `UserError` where the run sizes no axis, and no cluster is given to plan for.
    """
    if sets_layout(tree, overrides):
        return from_tree(tree, overrides, source), None
    if cluster is None:
        raise UserError(
            "layout: no axis is sized, so nothing says how many GPUs the job is for; give --cluster NAME and "
            "--gpus N to plan for, or the layout, such as --layout.dp 16"
        )
    return planned(tree, overrides, gpus or hardware_of(cluster).node, source, cluster)


def size_of(
    spec: RunSpec, nodes: str | None, per_node: int | None, cluster: str | None, cpu: bool, timed: bool
) -> Size:
    """The size of the job of a run.

    `nodes` is what `--nodes` gives, `per_node` the ranks of a node; with `timed` its time is predicted for
    the cluster. Raises `UserError` for a layout that whole nodes do not make.
    """
    hardware = None if cluster is None else hardware_of(cluster)
    world, told = spec.world_size, list[str]()
    least, most = _range(nodes)
    in_all = counted(world, "ranks")
    ranged = least != most
    ranks = per_node or (None if hardware is None else hardware.whole_node or hardware.node)
    if most and not ranged and world % most:
        raise UserError(
            f"--nodes: {counted(most, 'nodes')} cannot share {in_all} ({describe(spec)}) equally; give a "
            f"divisor of {world}, or change the layout"
        )
    if ranks is None:
        ranks = math.ceil(world / most) if most and not ranged else RANKS_OF_A_NODE
    ranks = ranks if ranged else min(ranks, world)
    if ranged:
        if not any(resized(spec, count * ranks) for count in range(least, most + 1)):
            raise UserError(
                f"--nodes: {nodes} nodes of {counted(ranks, 'ranks')} cannot run {describe(spec)}; give "
                f"--gpus-per-node, or another range"
            )
    elif world % ranks:
        raise UserError(
            f"--gpus-per-node: {in_all} ({describe(spec)}) do not fill nodes of {ranks}; give a "
            f"divisor of {world}, or change the layout"
        )
    elif most and most * ranks != world:
        raise UserError(
            f"--nodes: {counted(most, 'nodes')} of {counted(ranks, 'ranks')} are {most * ranks}, and the "
            f"layout ({describe(spec)}) has {world}; give --nodes {world // ranks}, or change "
            f"--gpus-per-node or the layout"
        )
    most = most or world // ranks
    gpus = not cpu and (hardware is None or hardware.device.kind != "cpu")
    seconds = None
    if hardware is not None and timed and not other_models(spec):  # whose part no plan counts
        step = Candidate(spec, CostModel(hardware.resized(spec.layout.world_size))).interval[1]
        steps = spec.train.total_steps
        seconds = min(MOST_S, _quarters(START_S + step * steps))
        told.append(
            f"time: {counted(steps, 'steps')} of at most {in_seconds(step)} on {hardware.device.name}, "
            f"by the planner"
        )
    return Size(most, least if ranged else None, ranks, gpus, seconds, tuple(told))


def _range(nodes: str | None) -> tuple[int, int]:
    """The least and the most nodes; 0 and 0 where none are given."""
    if nodes is None:
        return 0, 0
    match = re.fullmatch(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?", nodes)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if least > most:
        raise UserError(f"--nodes: {nodes!r} is not a number of nodes; give one, as 2, or a range, as 1:4")
    return least, most


def _quarters(seconds: float) -> int:
    """Seconds, rounded up to quarters of an hour, by which people schedule."""
    return math.ceil(seconds / 900) * 900
