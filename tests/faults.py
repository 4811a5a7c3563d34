"""Disks that fail, die, or forget what was not synced; shared by the checkpoint tests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import CheckpointStore
from meshwright.checkpoint.directory import published
from meshwright.checkpoint.disk import Disk


class Died(BaseException):
    """The process is gone: nothing after this may touch the disk."""


class Gate(Disk):
    """Calls `before` with the index and the name of each system call that would change the disk."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before(self, index: int, call: str) -> None:
        """Overridden by the faults below."""

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        self.before(len(self.calls) - 1, call)

    def make_directory(self, path: Path) -> None:
        self._enter("mkdir")
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._enter("open")
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        super().write(descriptor, data[: len(data) // 2])  # a crash leaves a part of the data
        self._enter("write")
        return len(data) // 2 + super().write(descriptor, data[len(data) // 2 :])

    def sync(self, descriptor: int) -> None:
        self._enter("fsync")
        super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        self._enter("fsync directory")
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._enter("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._enter("unlink")
        super().unlink(path)

    def remove_directory(self, path: Path) -> None:
        self._enter("rmdir")
        super().remove_directory(path)


class FailingDisk(Gate):
    """Raises OSError at the i-th call, and works again after it."""

    def __init__(self, at: int, code: int = errno.EIO) -> None:
        super().__init__()
        self.at, self.code = at, code

    def before(self, index: int, call: str) -> None:
        if index == self.at:
            raise OSError(self.code, os.strerror(self.code))


class FailingWrites(Gate):
    """Every write fails while ``broken``."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def before(self, index: int, call: str) -> None:
        if self.broken and call == "write":
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class KillingDisk(Gate):
    """The process is killed (SIGKILL) at the i-th call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def before(self, index: int, call: str) -> None:
        if index == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


class HeldDisk(Disk):
    """Every write waits until ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self.go.wait(60):
            raise RuntimeError("nobody let the disk go on")
        return super().write(descriptor, data)


class SlowDisk(Disk):
    """Every write takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def write(self, descriptor: int, data: memoryview) -> int:
        time.sleep(self.seconds)
        return super().write(descriptor, data)


class PowerLossDisk(Gate):
    """The machine loses power at the i-th call, and then all that was not synced, data and names."""

    def __init__(self, at: int, attic: Path) -> None:
        super().__init__()
        self.at, self.attic = at, attic
        self.dead = False
        self._undo: list[tuple[Path, Callable[[], None]]] = []  # (directory whose sync makes it last, undo)
        self._unsynced: dict[int, Path] = {}
        self._open: dict[int, Path] = {}
        attic.mkdir()

    def before(self, index: int, call: str) -> None:
        if self.dead:
            raise Died
        if index == self.at:
            self.dead = True
            for path in self._unsynced.values():
                if path.exists():
                    os.truncate(path, 0)
            for _, undo in reversed(self._undo):
                undo()
            raise Died

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self._undo.append((path.parent, lambda: os.rename(path, self._away())))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._open[descriptor] = self._unsynced[descriptor] = path
        self._undo.append((path.parent, lambda: os.unlink(path)))
        return descriptor

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._unsynced.pop(descriptor, None)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._undo = [(parent, undo) for parent, undo in self._undo if parent != path]

    def rename(self, source: Path, target: Path) -> None:
        saved = self._away()
        if target.is_file():
            os.link(target, saved)
        super().rename(source, target)

        def undo() -> None:
            os.rename(target, source)
            if saved.exists():
                os.link(saved, target)

        self._undo.append((target.parent, undo))

    def unlink(self, path: Path) -> None:
        saved = self._away()
        os.link(path, saved)
        super().unlink(path)
        self._undo.append((path.parent, lambda: os.link(saved, path)))

    def remove_directory(self, path: Path) -> None:
        super().remove_directory(path)
        self._undo.append((path.parent, lambda: os.mkdir(path)))

    def _away(self) -> Path:
        return self.attic / str(len(list(self.attic.iterdir())) + len(self.calls) * 1000)


def write_root(checkpoint: Path, body: dict[str, Any]) -> None:
    """Write a manifest's root with a right hash."""
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(f'{{"sha256":"{digest}","body":{text}}}\n')


def as_version_1(checkpoint: Path) -> dict[str, Any]:
    """Make one file of a manifest in parts, as version 1 had it; returns its body."""
    body = json.loads((checkpoint / "manifest.json").read_text())["body"]
    parts = [json.loads((checkpoint / file).read_text()) for file, _, _ in body.pop("parts")]
    del body["spreads"]
    for name, entry in body["tensors"].items():
        del entry["spread"]
        entry["pieces"] = [row for part in parts for row in part["tensors"].get(name, [])]
    files = {file: size for part in parts for file, size in part["files"].items()}
    body |= {"version": 1, "files": files}
    write_root(checkpoint, body)
    for path in checkpoint.glob("part-*.json"):
        path.unlink()
    return dict(body)


def bury(directory: Path) -> None:
    """Make the lease's holder look like a process that is dead."""
    path = directory / "lease.json"
    if path.exists():
        path.write_text(json.dumps({**json.loads(path.read_text()), "process_start": "long ago"}))


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """A small training state with several dtypes, a scalar, an empty tensor and a non-contiguous one."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "model/a.weight": torch.randn(7, 5, generator=draw),
        "model/b.weight": torch.randn(6, 4, generator=draw).to(torch.bfloat16),
        "model/c.weight": torch.randn(3, 8, generator=draw).t(),
        "model/empty": torch.empty(0, 4),
        "optim/step": torch.tensor(float(seed)),
        "optim/exp_avg/a.weight": torch.randn(7, 5, generator=draw, dtype=torch.float64),
        "optim/mask": torch.rand(9, generator=draw) > 0.5,
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bitwise equality, name by name."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def zeros_like(source: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in source.items()}


def steps(store: CheckpointStore) -> list[int]:
    """The published steps of the store's directory, rising."""
    return list(published(store.directory))


def leftovers(directory: Path) -> list[str]:
    """Names of partial checkpoints that nobody removed."""
    return [path.name for path in directory.iterdir() if path.name.startswith((".tmp-step", ".tmp-old"))]
