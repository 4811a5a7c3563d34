"""All ranks of a run see one checkpoint directory, or none of them trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from faults import leftovers
from meshwright.checkpoint import CheckpointError, CheckpointStore
from meshwright.checkpoint import claim as claim_module
from meshwright.checkpoint.disk import Disk
from meshwright.comm.control import Control


def on_each(directories: list[Path], work: Callable[[CheckpointStore], Any], disk: Disk) -> list[Any]:
    """Result of `work` on a rank for each directory, or its exception; the last rank has `disk`."""
    keys, found = dist.HashStore(), [None] * len(directories)

    def run(rank: int) -> None:
        control = Control("test", rank, len(directories), lambda: keys, timedelta(seconds=20))
        mine = disk if rank == len(directories) - 1 else None
        try:
            found[rank] = work(CheckpointStore(directories[rank], 2, control, disk=mine))
        except CheckpointError as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(directories))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def claimed(store: CheckpointStore) -> str:
    store.claim()
    store.close()
    return "claimed"


@pytest.mark.parametrize("other", ["missing", "empty"])
def test_hosts_without_a_common_folder_do_not_start(
    tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "VISIBLE_S", 0.2)
    (tmp_path / "empty").mkdir()
    found = on_each([tmp_path / "first", tmp_path / "first", tmp_path / other], claimed, Disk())
    for error in found:
        assert isinstance(error, CheckpointError) and error.code == 2
        assert "rank 2 on " in str(error)
        assert f"does not see in {tmp_path / other} what rank 0 wrote" in str(error)
    assert not [*(tmp_path / "first").glob(".tmp-*")] and not [*(tmp_path / "empty").iterdir()]
    assert claimed(CheckpointStore(tmp_path / "first", 2)) == "claimed"  # the lease was given back


class LateDisk(Disk):
    """A network file system that shows other hosts' files after some attempts to open them."""

    def __init__(self) -> None:
        self.left = 3

    def opened(self, path: Path) -> Any:
        if path.name.startswith(".tmp-common") and self.left:
            self.left -= 1
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return super().opened(path)


def test_a_file_system_may_take_its_time_to_show_a_file(tmp_path: Path) -> None:
    disk = LateDisk()
    assert on_each([tmp_path] * 3, claimed, disk) == ["claimed"] * 3
    assert disk.left == 0
    assert not [*tmp_path.glob(".tmp-*")] and not leftovers(tmp_path)
