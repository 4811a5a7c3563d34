"""NCCL's flight recorder: the last collectives of each rank, which torch writes to a file when it is asked.

torch's ProcessGroupNCCL keeps the last collectives of all groups in memory. It writes them to a file
(`DUMP`RANK) when a collective times out, or within a second after something is written to a pipe
(`PIPE`RANK.pipe): a supervisor does that where ranks hang, and reads the first collective that is not
completed. `torchfrtrace` of torch compares the files of all ranks.

A dump is a pickle of plain values (torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2.x); one that
names anything to make or to run is refused.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENTRIES = 2000
"""Collectives that are kept, torch's own number."""
DUMP, PIPE = "rank_", "pipe_"
"""Beginnings of the names of files, which end with the number of the rank."""
_ENTRIES = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
_DUMPS = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_PIPES = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",)
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_ERRORS = (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError)
"""Errors that reading a damaged dump ends with."""


class BadDumpError(Exception):
    """A dump that cannot be read."""


def record_collectives(environment: MutableMapping[str, str], folder: Path | None) -> None:
    """Let NCCL's groups that are made from now on record their collectives, and dump them into `folder`.

    Of a setting with two names none is changed if one of them is set. Without a folder torch's own is left.
    """
    settings = {_ENTRIES: str(ENTRIES), _ON_TIMEOUT: "1"}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        settings |= {_DUMPS: str(folder / DUMP), _PIPES: str(folder / PIPE)}
    for names, value in settings.items():
        if not any(name in environment for name in names):
            environment.update(dict.fromkeys(names, value))


def ask_for_dump(folder: Path, rank: int) -> bool:
    """Ask a rank of this host for its dump; True if it will write one."""
    pipe = folder / f"{PIPE}{rank}.pipe"
    with suppress(OSError):  # no pipe, or nobody reads it: the rank has no NCCL, or files of the user's
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"1")
        finally:
            os.close(descriptor)
        return True
    return False


def dump_of(folder: Path, rank: int) -> Path:
    """Where the dump of a rank lies."""
    return folder / f"{DUMP}{rank}"


@dataclass(frozen=True)
class Recorded:
    """A collective as the flight recorder has it."""

    group: str
    number: int
    operation: str
    sizes: str
    state: str
    """scheduled or started."""
    place: str
    """File and line of the call, or ""."""
    completed: int
    """The last number of its group that is completed, or -1."""

    def __str__(self) -> str:
        called = f", called at {self.place}" if self.place else ""
        return (
            f"collective {self.number} of group '{self.group}' ({self.operation} of {self.sizes}) is "
            f"{self.state}, {self.completed} was the last that completed{called}"
        )


def first_uncompleted(dump: Path) -> Recorded | None:
    """The first collective of a dump that is not completed; None if all are. Raises `BadDumpError`."""
    try:
        with dump.open("rb") as file:
            content = _PlainUnpickler(file).load()
        status = content.get("pg_status", {})
        for entry in content["entries"]:
            if entry["state"] != "completed":
                return _recorded(entry, status.get(str(entry["pg_id"]), {}))
    except (*_ERRORS, OSError) as error:
        raise BadDumpError(f"{dump.name} is not readable: {str(error) or type(error).__name__}") from error
    return None


def _recorded(entry: Mapping[str, Any], status: Mapping[str, int]) -> Recorded:
    name, description = entry["process_group"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    tensors = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    sizes = " and ".join(f"{list(shape)} {dtype}" for shape, dtype in tensors) or "nothing"
    frames = [frame for frame in entry.get("frames", ()) if "/torch/" not in frame["filename"]]
    place = f"{frames[0]['filename']}:{frames[0]['line']}" if frames else ""
    completed = int(status.get("last_completed_collective", -1))
    group = f"{name} {description}".strip()
    return Recorded(group, number, entry["profiling_name"], sizes, entry["state"], place, completed)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuse every name: a dump has plain values only."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no dump needs; nothing of it was run")
