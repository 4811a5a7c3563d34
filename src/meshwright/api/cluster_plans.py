"""The best plans of a model on several clusters, compared: plan_clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cluster_plans import ClusterPlans, Done, Gpus, asked_clusters, priced
from meshwright.planner.cluster_plans import plan_clusters as best_clusters
from meshwright.planner.search.request import PlanRequest
from meshwright.planner.search.results import Progress
from meshwright.spec import RunSpec


def plan_clusters(
    model: str | Path | RunSpec,
    clusters: str | Sequence[str | Cluster],
    *,
    gpus: Gpus = None,
    prices: Mapping[str, float] | None = None,
    progress: Progress | None = None,
    done: Done | None = None,
    **wish: Any,
) -> ClusterPlans:
    """Return the best plans of a model on each of several clusters, the best cluster first.

    `clusters` are names, hardware files or `Cluster`s, or a text of those with commas; a number of devices,
    or a range, may follow a name after a colon, as in 'h100:16,a100', and the others have `gpus`. `prices`
    are in USD for a device and hour, by name; a cluster of the catalogue has one without. `wish` are further
    fields of `PlanRequest`, such as `objective`. A cluster that the model cannot be planned on is among those
    `refused`. `done` is called after each cluster, with its name and its plans or the error. Raises
    `UserError`, also where no cluster is left.
    """
    asked = priced(asked_clusters(clusters, gpus), prices or {})
    return best_clusters(PlanRequest(model, "", **wish), asked, progress, done)
