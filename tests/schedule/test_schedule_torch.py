"""Where PyTorch generates the same schedule, its lists are these lists.

`torch.distributed.pipelining` computes a rank's order in methods that read a few sizes of the schedule
object, so those are called on a stand-in, without process groups. It marks idle units with None, and adds
actions that reduce gradients; both are left out. Its DualPipeV says which forward and backward overlap; here
they are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from meshwright.schedule import Schedule, make


def flat(actions: Iterable[Any]) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            found += flat(action.sub_actions)
        elif (kind := action.computation_type.value) in ("F", "I", "W", "B"):
            found.append((kind, action.stage_index, action.microbatch_index))
    return found


def ours(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    return [[(kind.name, stage, mb) for kind, stage, mb in listed] for listed in schedule.actions]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("name", "kind"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_one_stage_a_rank(name: str, kind: str, ranks: int) -> None:
    """From m = p on: below, torch's 1F1B lists more forwards than there are microbatches.

    It also numbers the forwards of the last rank, which has no warm-up, from 1; that is put right here.
    """
    for microbatches in range(ranks, 4 * ranks + 1):
        stand_in = SimpleNamespace(_num_stages=ranks, _n_microbatches=microbatches)
        order = getattr(theirs, kind)._get_pipeline_order(stand_in)
        listed = [flat(order[rank]) for rank in range(ranks)]
        if name == "1f1b":
            listed[-1] = [(kind, stage, i - (kind == "F")) for kind, stage, i in listed[-1]]
        assert ours(make(name, ranks, 1, microbatches)) == listed


def stand_in(ranks: int, virtual: int, microbatches: int) -> SimpleNamespace:
    rounds = max(1, microbatches // ranks)
    return SimpleNamespace(
        pp_group_size=ranks,
        num_stages=ranks * virtual,
        n_local_stages=virtual,
        _stages=range(virtual),
        _n_microbatches=microbatches,
        microbatches_per_round=microbatches // rounds,
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("name", "kind", "virtual"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("bfs", "ScheduleLoopedBFS", 1),
        ("bfs", "ScheduleLoopedBFS", 3),
        ("zb-v", "ScheduleZBVZeroBubble", 2),
        ("dualpipe-v", "ScheduleDualPipeV", 2),
    ],
)
def test_several_stages_a_rank(name: str, kind: str, virtual: int, ranks: int) -> None:
    compared = 0
    for microbatches in range(1, 4 * ranks + 1):
        rounds = max(1, microbatches // ranks)
        if name == "interleaved" and microbatches % rounds:
            continue  # torch refuses these
        if name == "dualpipe-v" and microbatches < 2 * ranks:
            continue  # and these
        schedule = getattr(theirs, kind)
        sizes = stand_in(ranks, virtual, microbatches)
        order = [flat(schedule._calculate_single_rank_operations(sizes, rank)) for rank in range(ranks)]
        assert ours(make(name, ranks, virtual, microbatches)) == order
        compared += 1
    assert compared
