"""Ranks of a run meet on the host at its start, its checkpoints and its end, but not in its steps.

The exception is the first, after which they ask each other for parameters without gradients.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from meshwright.comm.heartbeat import Beat
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from ranks import Ranks
from small import spec_of
from training_runs import Notes


class Rounds(Notes):
    """Notes the rounds of the control plane, and the sums over all ranks, at each step's end."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh, self.seen = mesh, []  # type: ignore[var-annotated]

    def on_step(self, row: dict[str, Any]) -> None:
        super().on_step(row)
        mesh = self.mesh
        rounds = mesh.control.rounds + mesh.background.rounds
        waited_for = Beat.of(mesh.heartbeat._memory, 0).label
        self.seen.append((rounds, mesh.wire.calls["world", "scalars"], waited_for))


def rounds_of(mesh: Mesh, spec: RunSpec, out: Path) -> list[tuple[int, int, str]]:
    notes = Rounds(mesh)
    open_run(spec, mesh, out, Observers([notes])).execute(None)
    return notes.seen


def test_a_step_has_one_sum_over_all_ranks_and_no_message_between_hosts(ranks: Ranks, tmp_path: Path) -> None:
    base = {
        "data.corpus": "synthetic", "data.seq_len": 16, "train.batch_tokens": 64, "train.steps": 5,
        "layout.dp": 2, "layout.zero": 2, "model.moe.experts": 4, "model.moe.top_k": 2, "model.moe.ffn": 16,
        "layout.ep": 2, "model.moe.bias": "true",
    }  # fmt: skip
    spec = spec_of(base)
    for seen in ranks.run(spec.layout, rounds_of, spec, tmp_path):
        host, sums, waited_for = zip(*seen, strict=True)
        assert len(seen) == 5 and len(set(host)) == 1
        assert [after - before for before, after in itertools.pairwise(sums)] == [1] * 4
        assert set(waited_for[1:]) == {"the device"}  # a rank whose device is behind is not stuck
