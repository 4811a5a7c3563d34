"""Worlds of a run: one of all its ranks, or one of each island that exchanges by quorum.

The loop of a run asks its world for batches, for the order in which islands come, and what to tell of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.reader import newest_state
from meshwright.checkpoint.store import CheckpointStore
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import Corpus
from meshwright.data.loader import Batch, Loader, SplitReader
from meshwright.islands.island_log import IslandLog
from meshwright.islands.outer_log import LoggedArrivals
from meshwright.islands.outer_quorum import QuorumOuter
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer

ISLANDS = "islands"
"""Folder of the log of islands that are worlds of their own, beside their folders."""


class World:
    """The world of all ranks of a run."""

    arrivals: LoggedArrivals | None = None
    """The order in which islands come that are worlds of their own."""

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        self.spec, self.mesh = spec, mesh

    def late_stops(self, step_seconds: float) -> list[str]:
        """Sentences on requests to stop that would be over before they have come to all ranks: exchanges of
        islands take them along."""
        every, grace = self.spec.outer.every, self.spec.recovery.grace_seconds
        if every * step_seconds <= grace:
            return []
        return [
            f"recovery.grace_seconds: {grace:g} is less than the {every * step_seconds:.0f} s between "
            f"exchanges of islands (outer.every = {every}), which a request to stop travels with; a run that "
            f"is stopped would not be saved: give more"
        ]

    def loader(self, corpus: Corpus) -> Loader:
        """The batches of this rank."""
        return self._loader(corpus, self.mesh.data_rank)

    def _loader(self, corpus: Corpus, data_rank: int) -> Loader:
        pin = self.mesh.device.type == "cuda"
        return Loader(corpus, self.spec, data_rank, self.spec.layout.data_ranks, pin)

    def within(self, batch: Batch) -> Batch:
        """A batch whose slots are those of the batch of this world."""
        return batch

    def join(self, trainer: Trainer, step: int) -> None:
        """Take part from now on, after optimiser step `step`."""

    def leave(self, reason: str) -> None:
        """Take part no more."""

    def result(self, trainer: Trainer) -> dict[str, Any]:
        """Fields of the run's result about this world."""
        return {}


class IslandWorld(World):
    """The world of one island; the others are met through the log beside its folder `out`.

    `host` is where ranks of other islands reach this one, and `tell` hears of what becomes of them.
    """

    arrivals: LoggedArrivals

    def __init__(
        self, spec: RunSpec, mesh: Mesh, out: Path, host: str, tell: Callable[[str, dict[str, Any]], None]
    ) -> None:
        super().__init__(spec, mesh)
        assert spec.outer.island is not None
        self.island, self.out = spec.outer.island, out
        log = IslandLog(out.parent / ISLANDS)
        self.arrivals = LoggedArrivals(log, self.island, spec.outer, mesh.control, host, tell)

    def late_stops(self, step_seconds: float) -> list[str]:
        """None, since an island stops by itself."""
        return []

    def loader(self, corpus: Corpus) -> Loader:
        """The batches of this rank: the island's share of each."""
        own, mesh = self.spec.of_step_group(), self.mesh
        loader = self._loader(corpus, self.island * own.layout.data_ranks + mesh.data_rank)
        loader.validation = SplitReader(corpus.validation, own, mesh.data_rank, own.layout.data_ranks)
        return loader

    def within(self, batch: Batch) -> Batch:
        """A batch whose slots are those of the island's batch."""
        return replace(batch, slots=batch.slots % (len(batch.slots) * self.spec.layout.dp))

    def join(self, trainer: Trainer, step: int) -> None:
        """Take part from now on, with the anchors that the members have, or the newest that was saved."""
        outer = trainer.part(QuorumOuter)
        self.arrivals.join(outer, step, self.spec.step_groups, partial(self._restore_anchors, outer))

    def _restore_anchors(self, outer: QuorumOuter) -> None:
        """Load the anchors of the island whose newest checkpoint has followed the most exchanges."""

        def newest() -> tuple[int, str]:
            every = (self.spec.checkpoint.folder(folder) for folder in self.out.parent.glob("island.*"))
            states = {str(folder): newest_state(folder) or {} for folder in every}
            return max((int(state.get("merged", 0)), folder) for folder, state in states.items())

        merged, folder = self.mesh.control.on_first(newest)
        if merged > outer.merged:
            with torch.no_grad():
                store = CheckpointStore(Path(folder), 1, self.mesh.background)
                store.load(None, dict(outer.shared_tensors()))
            outer.merged = merged

    def leave(self, reason: str) -> None:
        """Tell the others that this island takes part no more."""
        self.arrivals.leave(reason)

    def result(self, trainer: Trainer) -> dict[str, Any]:
        """The island's number, its exchanges, and how late its part of them came."""
        outer = trainer.part(QuorumOuter)
        late = {str(exchanges): times for exchanges, times in sorted(outer.lateness.items())}
        return {"island": outer.number, "exchanges": outer.merged, "lateness": late}


def world_of(
    spec: RunSpec, mesh: Mesh, out: Path, host: str, tell: Callable[[str, dict[str, Any]], None]
) -> World:
    """The world of these ranks."""
    return World(spec, mesh) if spec.outer.island is None else IslandWorld(spec, mesh, out, host, tell)
