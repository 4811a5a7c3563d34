"""Two thousand steps leave nothing behind: no memory, no open files, no threads."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

from test_run import Notes

from meshwright.parallel.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.train.callbacks import Observers
from meshwright.train.loop import TrainingRun
from ranks import Ranks
from small import spec_of

STEPS = 2000
WARM = 500
"""Steps until caches are filled: plans, compiled code, the allocator's arenas."""
MOST_BYTES = 8 << 20
"""Allocators round; 1,500 steps that each left a kilobyte behind would take 1.5 MB of Python's objects."""


def held() -> tuple[int, int, int, int]:
    """(resident bytes, open files, threads, objects that the garbage collector follows) of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(list(Path("/proc/self/fd").iterdir()))
    return pages * 4096, files, threading.active_count(), len(gc.get_objects())


class Soak(Notes):
    """Notes what the process holds after the first steps, and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int, int]] = []

    def on_step(self, row: dict[str, Any]) -> None:
        if row["step"] in (WARM, STEPS):
            self.seen.append(held())


def soaked(mesh: Mesh, spec: RunSpec, out: Path) -> list[tuple[int, int, int, int]]:
    soak = Soak()
    TrainingRun(spec, mesh, out, Observers([soak])).execute(None)
    return soak.seen


def test_nothing_grows_over_two_thousand_steps(ranks: Ranks, tmp_path: Path) -> None:
    base = {
        "data.corpus": "synthetic", "data.seq_len": 16, "train.batch_tokens": 32, "train.steps": STEPS,
        "train.log_every": WARM, "layout.dp": 2, "layout.zero": 3, "layout.micro_batch": 1,
        "model.preset": "tiny", "checkpoint.every": 1000, "train.eval_every": 400,
    }  # fmt: skip
    spec = spec_of(base)
    for (memory, files, threads, objects), after in ranks.run(spec.layout, soaked, spec, tmp_path):
        assert after[0] - memory < MOST_BYTES
        assert after[1] <= files and after[2] <= threads
        assert after[3] - objects < 1000
