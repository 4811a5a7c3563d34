"""A verification whose ranks disagree ends soon, with a sentence: which rank, which call, which step."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright import atomic
from meshwright.api.verify_runs import verify_worker
from meshwright.checkpoint import gather_full
from meshwright.comm import call_check, collectives
from meshwright.comm.call_check import CollectiveCall, SameCalls
from meshwright.comm.heartbeat import Heartbeat
from meshwright.parallel import (
    data_parallel,
    expert_parallel,
    gradient_reduction,
    pipeline_parallel,
    ring_attention,
)
from meshwright.spec import RunSpec
from meshwright.spec.errors import CollectiveError
from meshwright.train.step import Trainer
from meshwright.verify import verify as subject
from ranks import IMPORTED
from small import spec_of

LIMIT_S = 2.0
"""Limit of a rank's wait in the cases that come to it, or must not; longer than a rank takes to get ready."""
BASE = {
    "model.layers": 2,
    "model.vocab_size": 61,
    "data.seq_len": 16,
    "train.batch_tokens": 8 * 16,
    "train.warmup_steps": 1,
}
Plant = Callable[[int], None]
"""Called with a rank before it verifies."""


def skip_a_reduction(rank: int) -> None:
    """Rank 1 leaves out its second reduction over the shard axis."""
    start, calls = gradient_reduction.start_all_reduce, []

    def skipping(tensor: torch.Tensor, axis: collectives.Axis) -> collectives.Pending:
        calls.append(tensor)
        return collectives.DONE if len(calls) == 2 else start(tensor, axis)

    if rank == 1:
        gradient_reduction.start_all_reduce = skipping


def skip_the_last_reduction(rank: int) -> None:
    """Rank 1 leaves out the last of its reductions: its next call is of another axis."""
    finish = data_parallel.DataParallel.begin_step
    start, calls = gradient_reduction.start_all_reduce, []

    def counting(self: data_parallel.DataParallel, microbatches: int) -> None:
        calls.extend(self.units)
        finish(self, microbatches)

    def skipping(tensor: torch.Tensor, axis: collectives.Axis) -> collectives.Pending:
        calls.pop()
        return start(tensor, axis) if calls else collectives.DONE

    if rank == 1:
        gradient_reduction.start_all_reduce = skipping
        data_parallel.DataParallel.begin_step = counting  # type: ignore[method-assign]


def send_half(rank: int) -> None:
    """Rank 1 reduces half of each gradient."""
    start = gradient_reduction.start_all_reduce
    if rank == 1:
        gradient_reduction.start_all_reduce = lambda tensor, axis: start(tensor[: len(tensor) // 2], axis)


def receive_half(rank: int) -> None:
    """Rank 1 receives half of what rank 0 sends."""
    start = pipeline_parallel.start_receive
    if rank == 1:
        pipeline_parallel.start_receive = lambda room, *place: start(room[:1], *place)


def expect_a_row_too_many(rank: int) -> None:
    """Rank 1 expects one more row of the tokens that rank 0 sends to its experts."""
    start = expert_parallel.start_all_to_all

    def expecting(
        received: torch.Tensor, sent: torch.Tensor, axis: collectives.Axis, *rows: list[int]
    ) -> collectives.Pending:
        if not rows:
            return start(received, sent, axis)
        expected, given = rows
        more = received.new_empty(len(received) + 1, *received.shape[1:])
        return start(more, sent, axis, [expected[0] + 1, *expected[1:]], given)

    if rank == 1:
        expert_parallel.start_all_to_all = expecting  # type: ignore[assignment]


def gather_half(rank: int) -> None:
    """Rank 1 sends half of its parts of the parameters when they are gathered on rank 0."""
    start = gather_full.start_send
    if rank == 1:
        gather_full.start_send = lambda parts, *place: start(parts[: len(parts) // 2], *place)


def skip_a_shift(rank: int) -> None:
    """Rank 1 leaves out its last shift of a ring's keys, and computes for ever."""
    start, calls = ring_attention.start_shift, []

    def staying(*message: object) -> collectives.Pending:
        calls.append(message)
        if len(calls) == 3:
            time.sleep(60)
        return start(*message)  # type: ignore[arg-type]

    if rank == 1:
        ring_attention.start_shift = staying


def send_once_only(rank: int) -> None:
    """Rank 0 sends the first of its microbatches alone."""
    start, sent = pipeline_parallel.start_send, []

    def sending(*message: object) -> collectives.Pending:
        sent.append(message)
        return start(*message) if len(sent) == 1 else collectives.DONE  # type: ignore[arg-type]

    if rank == 0:
        pipeline_parallel.start_send = sending


def return_no_gradient(rank: int) -> None:
    """Rank 1 keeps the gradients of its last microbatch to itself, and goes on."""
    start, sent = pipeline_parallel.start_send, []

    def sending(*message: object) -> collectives.Pending:
        sent.append(message)
        return start(*message) if len(sent) < 8 else collectives.DONE  # type: ignore[arg-type]

    if rank == 1:
        pipeline_parallel.start_send = sending


def stay_away(rank: int) -> None:
    """Rank 1 computes for ever in the second step."""
    if rank == 1:
        gradients, steps = Trainer.gradients, []

        def staying(self: Trainer, batch: subject.Loader) -> torch.Tensor:
            steps.append(batch)
            if len(steps) == 2:
                time.sleep(60)
            return gradients(self, batch)  # type: ignore[arg-type]

        Trainer.gradients = staying  # type: ignore[method-assign, assignment]


def compute_the_reference_for_long(rank: int) -> None:
    """Rank 0 computes a step of the reference for longer than a collective may take."""
    reference = subject.one_device

    def slow(*arguments: object, **more: object) -> object:
        time.sleep(LIMIT_S + 0.5)
        yield from reference(*arguments, **more)  # type: ignore[arg-type]

    subject.one_device = slow  # type: ignore[assignment]


def verify_as(rank: int, port: int, spec: RunSpec, plant: Plant, folder: Path) -> None:
    """Verify as one of two ranks, and leave the error in the folder."""
    environment = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environment.items()})
    torch.set_num_threads(1)
    plant(rank)
    try:
        found = verify_worker(spec, steps=2)
        (folder / f"equal-{rank}").write_text(str(found.get("equal")))
    except Exception as error:
        atomic.write(folder / f"{type(error).__name__}-{rank}", str(error))
    os._exit(0)


def sentences(
    plant: Plant, folder: Path, limit_s: float = 0.0, all_end: bool = False, **layout: object
) -> dict[str, str]:
    """Return what two ranks have left, by kind and rank, once both have ended, or else one has failed."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    axes = {key if "." in key else f"layout.{key}": value for key, value in layout.items()}
    spec = spec_of(BASE | axes, recovery__hang_seconds=limit_s)
    ranks = [context.Process(target=verify_as, args=(rank, port, spec, plant, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    end = time.monotonic() + 60
    while (
        time.monotonic() < end
        and (all_end or not [*folder.glob("*Error-[01]")])
        and any(process.is_alive() for process in ranks)
    ):
        time.sleep(0.05)
    for process in ranks:
        process.kill()
        process.join()
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("plant", "layout", "words"),
    [
        (send_half, {"dp": 2}, ["all_reduce of 992 float64", "all_reduce of 1,984 float64", "axis shard"]),
        (receive_half, {"pp": 2}, ["send of 1,024 float64", "receive of 512 float64", "axis pipeline"]),
        pytest.param(
            *(skip_a_reduction, {"dp": 2}, ["all_reduce of 1,952 float64", "all_reduce of 6,976 float64"]),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(skip_the_last_reduction, {"dp": 2}),
            ["scalars of 5 float64", "axis world", "all_reduce", "axis shard"],
            marks=pytest.mark.full,
        ),
    ],
)
def test_calls_that_differ_are_told_before_they_start(
    plant: Plant, layout: dict[str, object], words: list[str], tmp_path: Path
) -> None:
    found = sentences(plant, tmp_path, **layout)
    told, *_ = (text for name, text in found.items() if name.startswith(CollectiveError.__name__))
    assert told.startswith("in step 1 rank ")
    assert all(word in told for word in [*words, "rank 0 calls", "rank 1 calls"])


def test_rows_that_one_rank_sends_and_another_does_not_expect_are_told_before_they_start(
    tmp_path: Path,
) -> None:
    experts = {"model.moe.experts": 4, "model.moe.top_k": 2, "model.moe.ffn": 16}
    found = sentences(expect_a_row_too_many, tmp_path, **experts, dp=2, ep=2)
    told, *others = (text for name, text in found.items() if name.startswith(CollectiveError.__name__))
    assert all(other == told for other in others)  # the other rank may be as fast
    said = re.fullmatch(
        r"in step 1 rank 0 sends (\d+) rows to rank 1, which expects (\d+), in all_to_all of rows of 33 "
        r"float64 elements over the axis expert",
        told,
    )
    assert said is not None and int(said[2]) == int(said[1]) + 1, told


def test_parts_of_a_gathered_tensor_are_compared(tmp_path: Path) -> None:
    found = sentences(gather_half, tmp_path, dp=2, zero=3)
    told, *_ = (text for name, text in found.items() if name.startswith(CollectiveError.__name__))
    assert "calls send of " in told and "calls receive of " in told and "uint8" in told


@pytest.mark.full
def test_a_shift_that_does_not_come_is_named_at_the_limit(tmp_path: Path) -> None:
    found = sentences(skip_a_shift, tmp_path, LIMIT_S, cp=2)
    (told,) = found.values()
    assert f"rank 0 has waited for {LIMIT_S:g} s for shift of" in told
    assert "to rank 1 over the axis context in step 1, which rank 1 did not receive; rank 1 last" in told


def test_a_rank_that_does_not_come_is_named_at_the_limit(tmp_path: Path) -> None:
    """With its last call, the call that waits for it, and the step."""
    found = sentences(stay_away, tmp_path, LIMIT_S, dp=2)
    call = "scalars of 1 float64 element over the axis world in step 2"
    waits = f"rank 0 has waited for {LIMIT_S:g} s for {call}, which rank 1 did not call"
    last = "rank 1 last called scalars of 1 float64 element over the axis world in step 1"
    assert found == {f"{CollectiveError.__name__}-0": f"{waits}; {last}"}


@pytest.mark.parametrize("plant", [send_once_only, pytest.param(return_no_gradient, marks=pytest.mark.full)])
def test_a_message_that_is_not_sent_names_who_did_not_send_it(plant: Plant, tmp_path: Path) -> None:
    """All ranks end with one sentence: who waits for it, who did not send it, and what that one does."""
    found = sentences(plant, tmp_path, LIMIT_S, all_end=True, pp=2, micro_batch=1)
    assert found.keys() == {f"{CollectiveError.__name__}-{rank}" for rank in range(2)}
    (told,) = {*found.values()}
    silent = 0 if plant is send_once_only else 1
    message = f"receive of 512 float64 elements from rank {silent} over the axis pipeline in step 1"
    assert f"{message}, which rank {silent} did not send" in told
    assert told.startswith(f"rank {1 - silent} has waited for {LIMIT_S:g} s for {message}") or (
        told.startswith(f"rank {silent} has waited for")
        and f"; rank {1 - silent} waits for {message}" in told
    )
    assert told.count(" waits for ") + told.count(" last called ") == 1


def test_no_limit_while_one_rank_computes_the_reference(tmp_path: Path) -> None:
    found = sentences(compute_the_reference_for_long, tmp_path, LIMIT_S, dp=2)
    assert found.get("equal-0") == "True"
    assert not any("Error" in name for name in found)


def check_of(rank: int, step: int, awaited: list[CollectiveCall], store: dist.Store) -> SameCalls:
    """Return rank `rank`'s check, whose rank waits for these calls."""
    control = SimpleNamespace(rounds=1, store=lambda: store)
    heartbeat = Heartbeat()
    heartbeat.phase("forward", step - 1)
    mesh: Any = SimpleNamespace(
        rank=rank,
        pipeline=SimpleNamespace(rank=rank),
        heartbeat=heartbeat,
        wire=SimpleNamespace(awaited=awaited),
        control=control,
    )
    return SameCalls(mesh)


def test_ranks_that_wait_for_each_other_are_followed_to_the_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 3 has waited for rank 2, that for 1, that for 0, which went on without sending."""
    monkeypatch.setattr(call_check, "GATHER_S", 0.01)
    store = dist.HashStore()
    received = [
        CollectiveCall(
            f"receive from rank {rank - 1}", f"pair {rank - 1}>{rank}", 1, [rank - 1], "did not send"
        )
        for rank in range(1, 4)
    ]
    ranks = [
        check_of(0, 1, [], store),
        *(check_of(n, 1, [call], store) for n, call in enumerate(received, 1)),
    ]
    ranks[0]._store.set("last/0", json.dumps(["scalars in step 2", {"group world": 7}]))
    broken, limit = RuntimeError("Connection closed by peer"), timedelta(seconds=2)
    told = "rank {} waits for receive from rank {}, which rank {} did not send"
    found = [ranks[rank].explained(broken, limit) for rank in (1, 2)]
    assert found == ["", ""]  # no rank has said that it gave up waiting
    assert ranks[3].explained(RuntimeError("Timed out waiting 2000ms for recv"), limit) == (
        "rank 3 has waited for 2 s for receive from rank 2, which rank 2 did not send; "
        + told.format(2, 1, 1)
        + "; "
        + told.format(1, 0, 0)
        + "; rank 0 last called scalars in step 2"
    )
    assert ranks[1].explained(broken, limit).startswith("rank 3 has waited for 2 s for receive from rank 2")
    assert ranks[1].explained(RuntimeError("shapes differ"), limit) == ""
