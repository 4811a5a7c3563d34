"""Snapshots from a faked GPU: what they cost the thread and the stream of training, and what orders them."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch
from copied_states import states_that_are_copied

from faked_gpu import tiny
from meshwright.checkpoint import snapshots
from meshwright.checkpoint.digests import sum64
from meshwright.checkpoint.slots import Slot
from meshwright.checkpoint.snapshots import Snapshots
from meshwright.comm.control import Control
from meshwright.dryrun.races import races, told
from meshwright.dryrun.rank_step import rehearse
from meshwright.dryrun.trace import Trace
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.fake_cuda.runtime import CUDART
from meshwright.train import state
from meshwright.train.step import Trainer

faked = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)
FEW, PLENTY = 4096, 1 << 40


def taken(flags: dict[str, object], fence: bool) -> dict[str, Any]:
    """A step, a snapshot and a step, in the process with the faked GPU: what the trace says of them."""
    trace = Trace(torch.device("cuda", 0))
    slots = [os.memfd_create("slot") for _ in range(2)]
    warnings: list[str] = []
    kept = Snapshots([slots], Control(), 1, lambda: PLENTY, warnings)
    hashed = {"training": 0, "thread": 0}
    training, marks = threading.get_ident(), list[int]()

    def digest(data: Any) -> str:
        own = threading.get_ident() == training
        if len(data) > FEW or not own:  # else a description, or what an empty slot says
            hashed["training" if own else "thread"] += len(data)
        return sum64(data)

    def steps(trainer: Trainer, first: Any, number: int, following: Any, _step: Any = Trainer.step) -> None:
        _step(trainer, first, number, following=following)
        if fence:
            trainer.before_update = kept.fence
        tensors = state.tensors(trainer)
        kept.newest()
        marks.append(len(trace.events))
        kept.save(number, tensors, lambda: {"step": number}, "")
        marks.append(len(trace.events))
        _step(trainer, following, number + 1)
        kept.settle()

    with patch.object(Trainer, "step", steps), patch.object(snapshots, "sum64", digest):
        rehearse(tiny(**flags), 0, trace.device, trace)
    events = trace.events[marks[0] : marks[1]]
    return {
        "synchronised": [each.name for each in events if each.kind == "synchronize"],
        "copied": sum(each.bytes for each in events if each.direction == "device to host"),
        "hashed": hashed,
        "races": told(races(trace.events)),
        "kept": kept.newest(),
        "image": max(Slot(slot).size for slot in slots),
        "warnings": warnings,
        "pinned": [*CUDART.registered.values()],
    }


@faked
@states_that_are_copied
def test_training_neither_waits_nor_hashes_and_nothing_races(
    process: FakeCudaProcess, flags: dict[str, object]
) -> None:
    found = process.call(taken, flags, fence=True)
    assert found["synchronised"] == [] and found["races"] == [] and found["warnings"] == []
    assert found["hashed"]["training"] == 0 and found["hashed"]["thread"] > found["image"] > 0
    assert found["copied"] == found["image"] and found["kept"] == 1


@faked
def test_an_update_that_does_not_wait_for_the_copies_races(process: FakeCudaProcess) -> None:
    found = process.call(taken, {}, fence=False)
    assert any(
        "aten::_fused_adamw_" in row["race"] and "does not wait for aten::copy_ on stream" in row["race"]
        for row in found["races"]
    ), found["races"]


# Pinned memory ------------------------------------------------------------------------------------------


def grown(fails: bool) -> dict[str, Any]:
    """A slot whose image grows, and one that cannot be pinned, where the faked GPU is."""
    CUDART.registered.clear()
    CUDART.fails = fails
    slot, sizes = Slot(os.memfd_create("slot")), []
    for size in (1000, 2000, 500):
        slot.image(size).fill_(1)
        sizes.append(sorted(CUDART.registered.values()))
    CUDART.fails = False
    return {"registered": sizes, "unpinned": slot.unpinned}


@faked
def test_a_slot_that_grows_is_pinned_once(process: FakeCudaProcess) -> None:
    assert process.call(grown, fails=False) == {"registered": [[5096], [6096], [6096]], "unpinned": ""}


@faked
def test_memory_that_cannot_be_pinned_is_told_with_a_remedy(process: FakeCudaProcess) -> None:
    found = process.call(grown, fails=True)
    assert found["registered"] == [[], [], []]
    assert "6.1 KB for snapshots were not pinned (cudaHostRegister: out of memory)" in found["unpinned"]
    assert "ulimit -l" in found["unpinned"]


def told_of(number: int) -> list[str]:
    """The warnings of so many snapshots whose memory cannot be pinned."""
    CUDART.fails = True
    warnings: list[str] = []
    kept = Snapshots([[os.memfd_create("slot") for _ in range(2)]], Control(), 1, lambda: PLENTY, warnings)
    slot = kept._own[0]
    slot.image(10)
    for _ in range(number):
        kept._tell_unpinned(slot)
    CUDART.fails = False
    return warnings


@faked
def test_the_warning_comes_once(process: FakeCudaProcess) -> None:
    (warning,) = process.call(told_of, 3)
    assert "were not pinned" in warning
