"""NCCL's flight recorder: dumps in torch's format are read, and a hang's sentence and folder have them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.runs import record_event
from meshwright.launch.hang import Hang
from meshwright.launch.start import HostPlace, Job, Start
from meshwright.launch.supervisor import Restarts, Supervisor
from meshwright.rank.flight_recorder import (
    BadDumpError,
    ask_for_dump,
    dump_of,
    first_uncompleted,
    record_collectives,
)
from meshwright.rank.shared_memory import SharedMemory

TORCHS_OWN = """
import sys
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4, 2))
sys.stdout.buffer.write(_dump_fr_trace())
"""


def entry(number: int, state: str, **facts: Any) -> dict[str, Any]:
    """One collective, as version 2.10 writes it."""
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 3245},
            {"name": "start_reduce_scatter", "filename": "/x/meshwright/comm/collectives.py", "line": 78},
        ],
        "record_id": number, "pg_id": 1, "process_group": ("1", "shard"), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": "nccl:_reduce_scatter_base",
        "time_created_ns": 1, "input_sizes": [[4096, 2]], "input_dtypes": ["BFloat16"],
        "output_sizes": [[512, 2]], "output_dtypes": ["BFloat16"], "state": state,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": False,
        "timeout_ms": 300000, "is_p2p": False, **facts,
    }  # fmt: skip


def content(*entries: dict[str, Any]) -> dict[str, Any]:
    status = {"last_enqueued_collective": 20, "last_started_collective": 18, "last_completed_collective": 17}
    config = {"1": {"name": "1", "desc": "shard", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config, "pg_status": {"1": status}, "entries": list(entries)}


def written(path: Path, *entries: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content(*entries), protocol=2))
    return path


SENTENCE = (
    "collective 18 of group '1 shard' (nccl:_reduce_scatter_base of [4096, 2] BFloat16) is started, 17 was "
    "the last that completed, called at /x/meshwright/comm/collectives.py:78"
)


def test_the_first_that_is_not_completed_is_read(tmp_path: Path) -> None:
    dump = written(tmp_path / "rank_0", entry(17, "completed"), entry(18, "started"), entry(19, "scheduled"))
    assert str(first_uncompleted(dump)) == SENTENCE
    assert first_uncompleted(written(tmp_path / "rank_1", entry(17, "completed"))) is None


def test_a_message_has_the_number_of_its_pair(tmp_path: Path) -> None:
    found = first_uncompleted(written(tmp_path / "rank_0", entry(4, "scheduled", is_p2p=True, p2p_seq_id=9)))
    assert found is not None and found.number == 9


def test_a_dump_of_torchs_own_is_read(tmp_path: Path) -> None:
    """It is of gloo, whose collectives have no events: each stays scheduled."""
    made = subprocess.run([sys.executable, "-c", TORCHS_OWN], capture_output=True, check=True)
    (tmp_path / "rank_0").write_bytes(made.stdout)
    found = first_uncompleted(tmp_path / "rank_0")
    assert found is not None and (found.number, found.operation) == (1, "gloo:all_reduce")
    assert found.sizes == "[4, 2] Float" and found.state == "scheduled"


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch hostile",)


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (pickle.dumps(Hostile()), "it names posix.system, which no dump needs; nothing of it was run"),
        (pickle.dumps(content(entry(18, "started")))[:-40], "rank_0 is not readable"),
        (b"", "Ran out of input"),
        (pickle.dumps([1, 2]), "rank_0 is not readable"),
    ],
)
def test_a_damaged_dump_is_told_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bytes, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank_0").write_bytes(damaged)
    with pytest.raises(BadDumpError, match=words):
        first_uncompleted(tmp_path / "rank_0")
    assert not (tmp_path / "hostile").exists()


def test_settings_of_the_users_stay(tmp_path: Path) -> None:
    environment = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"}
    record_collectives(environment, tmp_path)
    assert environment == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_",
    }
    plain: dict[str, str] = {}
    record_collectives(plain, None)
    assert plain["TORCH_FR_BUFFER_SIZE"] == "2000" and "TORCH_FR_DUMP_TEMP_FILE" not in plain


def test_a_rank_without_a_pipe_is_not_asked(tmp_path: Path) -> None:
    assert not ask_for_dump(tmp_path, 0)
    os.mkfifo(tmp_path / "pipe_0.pipe")
    assert not ask_for_dump(tmp_path, 0)  # nobody reads it


def test_a_hang_is_told_with_what_the_ranks_dumped(tmp_path: Path) -> None:
    folder, out = tmp_path / "start", tmp_path / "out"
    out.mkdir()
    events: list[dict[str, Any]] = []

    def tell(kind: str, fields: dict[str, Any]) -> None:
        events.append(dict(fields))
        record_event(out, None, kind, fields)
        events.append(fields)

    with SharedMemory(2) as memory:
        made = Start(0, Job([], 2), HostPlace("127.0.0.1", first_rank=8), memory, 0.0, folder)
        for rank in (8, 9):
            written(dump_of(folder / "flight-recorder", rank), entry(18, "started"))
        os.mkfifo(folder / "flight-recorder" / "pipe_9.pipe")
        reader = os.open(folder / "flight-recorder" / "pipe_9.pipe", os.O_RDONLY | os.O_NONBLOCK)
        made._hang = Hang((9,), "rank 9 has not moved for 30.0 s", 30.0, 5)
        made._recording = [rank for rank in (8, 9) if ask_for_dump(folder / "flight-recorder", rank)]
        assert os.read(reader, 8) == b"1"
        os.close(reader)
        supervisor = Supervisor(Job([], 2), Restarts([], tell))
        with pytest.warns(UserWarning):
            supervisor._final(made._ended([]), [])
    told = f"rank 9 has not moved for 30.0 s; NCCL's flight recorder of rank 9: {SENTENCE}"
    assert events[0]["message"] == told and events[1]["flight_recorder"] == "flight-recorder-0"
    assert first_uncompleted(out / "flight-recorder-0" / "rank_9") is not None
    assert f"NCCL's flight recorder of rank 9: {SENTENCE}" in (out / "stacks-0.txt").read_text()
