"""Checkpoints behind training on a faked GPU: its thread waits for no copy, and an update does."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from copied_states import states_that_are_copied

from faked_gpu import tiny
from meshwright.checkpoint import CheckpointStore
from meshwright.dryrun.races import races, told
from meshwright.dryrun.rank_step import rehearse
from meshwright.dryrun.trace import Trace
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.train import state
from meshwright.train.step import Trainer

pytestmark = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)


def saved(flags: dict[str, object], fence: bool, asynchronous: bool = True) -> dict[str, Any]:
    """A step, a save and a step, in the process with the faked GPU: what the trace says of them."""
    trace = Trace(torch.device("cuda", 0))
    marks, written = list[int](), list[int]()

    def publish(_: CheckpointStore, temporary: Path, *_of_one_rank: Any) -> None:
        """Take no manifest, which would lack the pieces of the other ranks."""
        written.append(sum(file.stat().st_size for file in temporary.glob("rank-*.bin")))

    def steps(trainer: Trainer, first: Any, number: int, following: Any, _step: Any = Trainer.step) -> None:
        _step(trainer, first, number, following=following)
        if fence:
            trainer.before_update = store.fence
        tensors = state.tensors(trainer)
        marks.append(len(trace.events))
        store.save(number, tensors, {"step": number}, asynchronous)
        marks.append(len(trace.events))
        _step(trainer, following, number + 1)
        store.wait()

    with (
        TemporaryDirectory() as folder,
        patch.object(Trainer, "step", steps),
        patch.object(CheckpointStore, "_publish", publish),
    ):
        store = CheckpointStore(Path(folder), 1)
        rehearse(tiny(**flags), 0, trace.device, trace)
        store.close()
    events = trace.events[marks[0] : marks[1]]
    return {
        "synchronised": [each.name for each in events if each.kind == "synchronize"],
        "copied": sum(each.bytes for each in events if each.direction == "device to host"),
        "written": written,
        "races": told(races(trace.events)),
    }


@states_that_are_copied
def test_training_waits_for_no_copy_and_nothing_races(
    process: FakeCudaProcess, flags: dict[str, object]
) -> None:
    found = process.call(saved, flags, fence=True)
    assert found["synchronised"] == [] and found["races"] == []
    assert found["copied"] > 0 and found["written"] == [found["copied"]]


def test_an_update_that_does_not_wait_for_the_copies_races(process: FakeCudaProcess) -> None:
    found = process.call(saved, {}, fence=False)
    assert any(
        "aten::_fused_adamw_" in row["race"] and "does not wait for aten::copy_ on stream" in row["race"]
        for row in found["races"]
    ), found["races"]


def test_a_save_that_training_waits_for_waits_once(process: FakeCudaProcess) -> None:
    found = process.call(saved, {}, fence=False, asynchronous=False)
    assert found["synchronised"] == ["event"] and found["races"] == []
    assert found["copied"] > 0 and found["written"] == [found["copied"]]
