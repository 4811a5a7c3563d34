"""A hundred steps, or two thousand, leave nothing behind: no memory, no open files, no threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from ranks import Ranks
from small import spec_of
from training_runs import Notes

MOST_BYTES = 8 << 20
"""Allocators round; 8,000 steps that each left a kilobyte behind would be as much."""
OBJECTS_A_STEP = 2 / 3
"""Less than one: a step that leaves an object behind is found, however many steps there are."""


def held() -> tuple[int, int, int, int]:
    """(resident bytes, open files, threads, objects that the garbage collector follows) of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(list(Path("/proc/self/fd").iterdir()))
    return pages * 4096, files, threading.active_count(), len(gc.get_objects())


class Soak(Notes):
    """Notes what the process holds after the steps of these numbers."""

    def __init__(self, steps: Collection[int]) -> None:
        super().__init__()
        self._steps = steps
        self.seen: list[tuple[int, int, int, int]] = []

    def on_step(self, row: dict[str, Any]) -> None:
        if row["step"] in self._steps:
            self.seen.append(held())


def soaked(mesh: Mesh, spec: RunSpec, out: Path) -> list[tuple[int, int, int, int]]:
    # A quarter of the steps fill caches: plans, compiled code, the allocator's arenas.
    soak = Soak((spec.train.total_steps // 4, spec.train.total_steps))
    open_run(spec, mesh, out, Observers([soak])).execute(None)
    return soak.seen


@pytest.mark.parametrize("steps", [120, pytest.param(2000, marks=pytest.mark.full)])
def test_nothing_grows_over_many_steps(ranks: Ranks, tmp_path: Path, steps: int) -> None:
    base = {
        "data.corpus": "synthetic", "data.seq_len": 16, "train.batch_tokens": 32, "train.steps": steps,
        "train.log_every": steps // 4, "layout.dp": 2, "layout.zero": 3, "layout.micro_batch": 1,
        "model.preset": "tiny", "checkpoint.every": steps // 6, "train.eval_every": steps // 6,
        "train.eval_tokens": 1024,
    }  # fmt: skip
    spec = spec_of(base)
    for (memory, files, threads, objects), after in ranks.run(spec.layout, soaked, spec, tmp_path):
        assert after[0] - memory < MOST_BYTES
        assert after[1] <= files and after[2] <= threads
        assert after[3] - objects < OBJECTS_A_STEP * (steps - steps // 4)
