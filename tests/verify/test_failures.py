"""A verification whose ranks disagree ends soon, with a sentence: which rank, which call, which step."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from meshwright import api, atomic
from meshwright.parallel import collectives, data_parallel, pipeline_parallel
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
    start, calls = data_parallel.start_all_reduce, []

    def skipping(tensor: torch.Tensor, axis: collectives.Axis) -> collectives.Pending:
        calls.append(tensor)
        return collectives.DONE if len(calls) == 2 else start(tensor, axis)

    if rank == 1:
        data_parallel.start_all_reduce = skipping


def skip_the_last_reduction(rank: int) -> None:
    """Rank 1 leaves out the last of its reductions: its next call is of another axis."""
    finish = data_parallel.DataParallel.begin_step
    start, calls = data_parallel.start_all_reduce, []

    def counting(self: data_parallel.DataParallel, microbatches: int) -> None:
        calls.extend(self.units)
        finish(self, microbatches)

    def skipping(tensor: torch.Tensor, axis: collectives.Axis) -> collectives.Pending:
        calls.pop()
        return start(tensor, axis) if calls else collectives.DONE

    if rank == 1:
        data_parallel.start_all_reduce = skipping
        data_parallel.DataParallel.begin_step = counting  # type: ignore[method-assign]


def send_half(rank: int) -> None:
    """Rank 1 reduces half of each gradient."""
    start = data_parallel.start_all_reduce
    if rank == 1:
        data_parallel.start_all_reduce = lambda tensor, axis: start(tensor[: len(tensor) // 2], axis)


def receive_half(rank: int) -> None:
    """Rank 1 receives half of what rank 0 sends."""
    start = pipeline_parallel.start_receive
    if rank == 1:
        pipeline_parallel.start_receive = lambda room, *place: start(room[:1], *place)


def send_once_only(rank: int) -> None:
    """Rank 0 sends the first of its microbatches alone."""
    start, sent = pipeline_parallel.start_send, []

    def sending(*message: object) -> collectives.Pending:
        sent.append(message)
        return start(*message) if len(sent) == 1 else collectives.DONE  # type: ignore[arg-type]

    if rank == 0:
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

    def slow(*arguments: object) -> object:
        time.sleep(LIMIT_S + 0.5)
        yield from reference(*arguments)  # type: ignore[arg-type]

    subject.one_device = slow  # type: ignore[assignment]


def verify_as(rank: int, port: int, spec: RunSpec, plant: Plant, folder: Path) -> None:
    """Verify as one of two ranks, and leave the error in the folder."""
    environment = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environment.items()})
    torch.set_num_threads(1)
    plant(rank)
    try:
        found = api.verify_worker(spec, steps=2)
        (folder / f"equal-{rank}").write_text(str(found.get("equal")))
    except Exception as error:
        atomic.write(folder / f"{type(error).__name__}-{rank}", str(error))
    os._exit(0)


def sentences(plant: Plant, folder: Path, limit_s: float = 0.0, **layout: object) -> dict[str, str]:
    """Return what two ranks have left, by kind and rank, once one has failed or both have ended."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    axes = {f"layout.{key}": value for key, value in layout.items()}
    spec = spec_of(BASE | axes, recovery__hang_seconds=limit_s)
    ranks = [context.Process(target=verify_as, args=(rank, port, spec, plant, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    end = time.monotonic() + 60
    while (
        time.monotonic() < end
        and not [*folder.glob("*Error-[01]")]
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
        (skip_a_reduction, {"dp": 2}, ["all_reduce of 1,952 float64", "all_reduce of 6,976 float64"]),
        (
            skip_the_last_reduction,
            {"dp": 2},
            ["scalars of 5 float64", "axis world", "all_reduce", "axis shard"],
        ),
    ],
)
def test_calls_that_differ_are_told_before_they_start(
    plant: Plant, layout: dict[str, object], words: list[str], tmp_path: Path
) -> None:
    found = sentences(plant, tmp_path, **layout)
    (told,) = (sentence for name, sentence in found.items() if name.startswith(CollectiveError.__name__))
    assert told.startswith("in step 1 rank ")
    assert all(word in told for word in [*words, "rank 0 calls", "rank 1 calls"])


def test_a_rank_that_does_not_come_is_named_at_the_limit(tmp_path: Path) -> None:
    """With its last call, the call that waits for it, and the step."""
    found = sentences(stay_away, tmp_path, LIMIT_S, dp=2)
    call = "scalars of 1 float64 element over the axis world in step 2"
    waits = f"rank 0 has waited for {LIMIT_S:g} s for {call}"
    last = "rank 1 last called scalars of 1 float64 element over the axis world in step 1"
    assert found == {f"{CollectiveError.__name__}-0": f"{waits}; {last}"}


def test_a_message_that_is_not_sent_is_told_at_the_limit(tmp_path: Path) -> None:
    found = sentences(send_once_only, tmp_path, LIMIT_S, pp=2, micro_batch=1)
    (told, *_) = (sentence for name, sentence in found.items() if name.startswith(CollectiveError.__name__))
    assert (
        f"has waited for {LIMIT_S:g} s for receive of" in told and "over the axis pipeline in step 1" in told
    )


def test_no_limit_while_one_rank_computes_the_reference(tmp_path: Path) -> None:
    found = sentences(compute_the_reference_for_long, tmp_path, LIMIT_S, dp=2)
    assert found.get("equal-0") == "True"
    assert not any("Error" in name for name in found)
