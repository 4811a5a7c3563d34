"""Work that one rank of a host does for hours, while the others wait without a limit."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.comm.control import Connections, Control, MissingRanksError
from meshwright.rank.env import worker
from meshwright.rank.process_group import process_group
from meshwright.rank.world import once_per_host
from meshwright.spec import UserError
from ranks import forks

RANKS = 3
LIMIT_S = 2.0


@contextmanager
def joined(rank: int, port: int) -> Iterator[Control]:
    """A control of this rank, in a world of two hosts: ranks 0 and 1, and rank 2."""
    environment = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environment.items()})
    with process_group(worker()):
        dist.barrier()
        yield Connections().control("test", RANKS, "scope", timedelta(seconds=LIMIT_S))


def rank_of(rank: int, port: int, folder: Path) -> None:
    with joined(rank, port) as control:
        done = []

        def work() -> None:
            done.append(rank)
            if rank == 2:
                time.sleep(1.5 * LIMIT_S)
            (folder / f"{len(done)}-{rank}").write_text("")
            if len(done) == 2 and rank == 2:
                raise UserError("data.corpus: is damaged")

        once_per_host(control, work)
        assert {path.name for path in folder.glob("1-*")} == {"1-0", "1-2"}
        dist.barrier()
        try:
            once_per_host(control, work)
        except UserError as error:
            (folder / f"error{rank}").write_text(str(error))
        assert {path.name for path in folder.glob("2-*")} == {"2-0", "2-2"}


def rank_beside_a_dead_one(rank: int, port: int, folder: Path) -> None:
    with joined(rank, port) as control:
        with pytest.raises(MissingRanksError) as raised:
            once_per_host(control, lambda: rank == 2 and os.kill(os.getpid(), signal.SIGKILL))
        (folder / f"error{rank}").write_text(str(raised.value))
        end = time.monotonic() + 20
        while len(list(folder.glob("error*"))) < 2 and time.monotonic() < end:  # rank 0 has the store
            time.sleep(0.05)
        os._exit(0)


def test_a_host_that_dies_at_work_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = forks()
    ranks = [
        context.Process(target=rank_beside_a_dead_one, args=(rank, port, tmp_path)) for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0, -signal.SIGKILL]
    sentences = [path.read_text() for path in tmp_path.glob("error*")]
    assert len(sentences) == 2 and len(set(sentences)) == 1
    assert f"rank 2 on {socket.gethostname()} gave no sign of life for 2 s" in sentences[0]


def test_ranks_wait_longer_than_a_collective_may(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    forks()
    mp.start_processes(rank_of, (port, tmp_path), nprocs=RANKS, start_method="forkserver")
    assert {path.name for path in tmp_path.glob("?-*")} == {
        f"{turn}-{rank}" for turn in "12" for rank in "02"
    }
    assert [path.read_text() for path in tmp_path.glob("error*")] == ["data.corpus: is damaged"] * RANKS
