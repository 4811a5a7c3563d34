"""A save may stop at any system call: an error, a kill, a power cut, a full disk. The old one stays."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from faults import (
    Died,
    FailingDisk,
    Gate,
    KillingDisk,
    PowerLossDisk,
    bury,
    leftovers,
    same,
    steps,
    tensors,
    zeros_like,
)
from meshwright.checkpoint import CheckpointError, CheckpointStore
from meshwright.checkpoint.disk import Disk
from meshwright.spec.errors import StorageError

KEEP = 2


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory with steps 10 and 20, so that a save of step 30 publishes and also removes step 10."""
    directory = tmp_path / "base"
    store = CheckpointStore(directory, KEEP)
    for step in (10, 20):
        store.save(step, tensors(step), {"step": step})
    store.close()
    return directory


def save_30(directory: Path, disk: Disk) -> CheckpointStore:
    store = CheckpointStore(directory, KEEP, disk=disk)
    store.save(30, tensors(30), {"step": 30})
    return store


def calls_of_a_save(base: Path, tmp_path: Path) -> list[str]:
    gate = Gate()
    directory = tmp_path / "rehearsal"
    shutil.copytree(base, directory)
    save_30(directory, gate).close()
    return gate.calls


def check_intact(directory: Path) -> int:
    """The directory loads, as step 20 or 30, bit for bit and without a warning; returns which."""
    store = CheckpointStore(directory, KEEP)
    target = zeros_like(tensors(20))
    state = store.load(None, target)
    assert state["step"] in (20, 30)
    assert same(target, tensors(state["step"]))
    assert store.warnings == []
    for step in steps(store):
        store.load(step, target)
        assert same(target, tensors(step))
    return state["step"]


def check_usable(directory: Path) -> None:
    """The next run takes over, saves, and sweeps what the dead one left."""
    bury(directory)
    store = CheckpointStore(directory, KEEP)
    store.save(40, tensors(40), {"step": 40})
    assert store.latest() == 40
    assert not leftovers(directory)
    store.close()


def copies(base: Path, tmp_path: Path, count: int) -> Iterator[tuple[int, Path]]:
    for index in range(count):
        directory = tmp_path / f"copy-{index}"
        shutil.copytree(base, directory)
        yield index, directory


def test_a_save_makes_the_calls_that_its_protocol_promises(base: Path, tmp_path: Path) -> None:
    calls = calls_of_a_save(base, tmp_path)
    for call in ("mkdir", "open", "write", "fsync", "fsync directory", "rename", "unlink", "rmdir"):
        assert call in calls
    assert len(calls) >= 25


def test_an_error_at_any_call_keeps_the_old_checkpoint_and_removes_the_partial_one(
    base: Path, tmp_path: Path
) -> None:
    raised = 0
    for index, directory in copies(base, tmp_path, len(calls_of_a_save(base, tmp_path))):
        disk = FailingDisk(index)
        store = CheckpointStore(directory, KEEP, disk=disk)
        try:
            store.save(30, tensors(30), {"step": 30})
            told = store.warnings  # the checkpoint stands; an old one could not be removed
        except CheckpointError as error:
            raised += 1
            told = [str(error)]
            assert str(directory) in str(error)
        if len(disk.calls) <= index:  # the calls left are those of `close`
            with pytest.warns(UserWarning, match="could not be given back"):
                store.close()
            break
        assert told, f"call {index} failed in silence"
        check_intact(directory)
        store.save(40, tensors(40), {"step": 40})
        assert store.latest() == 40
        assert not leftovers(directory)
        store.close()
    assert raised >= 15


def test_sigkill_at_any_call_keeps_the_old_checkpoint(base: Path, tmp_path: Path) -> None:
    seen = set()
    for index, directory in copies(base, tmp_path, len(calls_of_a_save(base, tmp_path))):
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                save_30(directory, KillingDisk(index)).close()
            os._exit(7)  # it was not killed
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        seen.add(check_intact(directory))
        check_usable(directory)
    assert seen == {20, 30}


def test_power_loss_at_any_call_keeps_the_old_checkpoint(base: Path, tmp_path: Path) -> None:
    seen = set()
    for index, directory in copies(base, tmp_path, len(calls_of_a_save(base, tmp_path))):
        with pytest.raises(Died):
            save_30(directory, PowerLossDisk(index, tmp_path / f"attic-{index}")).close()
        seen.add(check_intact(directory))
        check_usable(directory)
    assert seen == {20, 30}


def test_a_read_only_directory_is_told(base: Path) -> None:
    class ReadOnly(Disk):
        def make_directory(self, path: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(CheckpointError, match="Read-only file system; earlier checkpoints are kept"):
        save_30(base, ReadOnly())
    assert check_intact(base) == 20


@pytest.mark.parametrize(
    ("room", "words"),
    [
        ({"f_files": 9, "f_favail": 0, "f_bavail": 1 << 30}, "no inode is left"),
        ({"f_files": 9, "f_favail": 5, "f_bavail": 1 << 30}, "although .* are free; a quota"),
        ({"f_files": 0, "f_favail": 0, "f_bavail": 0}, "it needs .* and .* are free"),
    ],
)
def test_a_disk_without_space_says_what_it_has_none_of(
    base: Path, room: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_blocks=1 << 30, f_bfree=0, **room)
    )
    with pytest.raises(StorageError, match=f"step 30 .*{words}") as caught:
        save_30(base, FailingDisk(calls_of_a_save_until_mkdir(), errno.ENOSPC))
    assert caught.value.code == 76
    assert check_intact(base) == 20


def calls_of_a_save_until_mkdir() -> int:
    """Number of calls that take the lease, before the one that makes the directory of a step."""
    return ["open", "write", "fsync", "rename", "fsync directory", "mkdir"].index("mkdir")


def test_a_path_that_is_no_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint\.dir"):
        CheckpointStore(tmp_path / "file", 1).save(1, tensors(1), {})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a tmpfs can't be mounted here (that needs root)")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("foreseen", [False, True])
def test_a_full_disk_is_told_and_the_old_checkpoint_stays(
    small_disk: Path, asynchronous: bool, foreseen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not foreseen:  # another program fills the disk between the look and the write
        monkeypatch.setattr(
            "meshwright.checkpoint.writer.shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 40)
        )
    store = CheckpointStore(small_disk, 2)
    small = {"model/x": torch.ones(1 << 18)}
    store.save(10, small, {"step": 10})
    with pytest.raises(CheckpointError, match=r"no space for the checkpoint of step 20 .* needs 8.39 MB"):
        store.save(20, {"model/x": torch.ones(1 << 21)}, {}, asynchronous)
        store.wait()
    assert not leftovers(small_disk)
    target = zeros_like(small)
    assert store.load(None, target) == {"step": 10}
    assert same(target, small)
    store.save(30, small, {"step": 30}, asynchronous)
    store.wait()
    assert store.latest() == 30
    store.close()
