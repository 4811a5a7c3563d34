"""A thread that copies published checkpoints to a store, behind training and behind the saves."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint.directory import latest_line, published, step_of
from meshwright.checkpoint.disk import LATEST, MANIFEST, Disk
from meshwright.checkpoint.lease import Lease
from meshwright.checkpoint.reader import parse_manifest, read_manifest_text
from meshwright.checkpoint.remote_checkpoints import KEY, SENT, remote_checkpoints, sent_names, writer_of
from meshwright.checkpoint.retention import is_permanent
from meshwright.spec.errors import UserError

PARALLEL = 2
"""Files that are sent, or fetched, at once; libraries of stores send parts of each at once, from memory."""
Event = tuple[str, dict[str, Any]]


class CopyPolicy(NamedTuple):
    """Which checkpoints a store gets: each `every`-th, of which `keep` stay, and those of `keep_every`."""

    every: int
    keep: int
    keep_every: int


class ClosingError(Exception):
    """The run ends, and sends no more."""


class Uploads:
    """Copies checkpoints of `directory` to the store at `url`, one after another; for rank 0.

    The newest goes first, and one that waits when a newer one is published is left out, unless it is of
    `keep_every`. What fails is an event and a sentence in `warnings`, and is made up for by the next upload;
    permanent ones are sent again then. Only `wait` waits. Checkpoints in `in_use` must not be removed.
    """

    def __init__(
        self, directory: Path, url: str, copies: CopyPolicy, lease: Lease, disk: Disk, warnings: list[str]
    ) -> None:
        self._directory, self._copies = directory, copies
        self._lease, self._disk, self._warnings = lease, disk, warnings
        self._closing = threading.Event()
        self._remote = remote_checkpoints(url, wait=self._pause)
        self._writer: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._published = 0
        self._newest: Path | None = None
        """The last checkpoint that this run has published, or gone on from."""
        self._next: Path | None = None
        """The checkpoint that is sent next, and becomes LATEST."""
        self._late: list[Path] = []
        """Permanent checkpoints that are sent after it, and were left out or failed."""
        self._failed: list[Path] = []
        """Permanent checkpoints that are late once there is a newer one."""
        self._sending: Path | None = None
        self._sent: Path | None = None
        """The checkpoint that LATEST of the store names."""
        self._events: list[Event] = []

    # The training side ------------------------------------------------------------------------------

    def published(self, path: Path) -> None:
        """Send a checkpoint that was just published, if it is due."""
        with self._changed:
            self._newest = path
            due = self._published % self._copies.every == 0 or self._is_permanent(path)
            self._published += 1
        if due:
            self.send(path)

    def send(self, path: Path) -> None:
        """Send a checkpoint of the directory, which becomes the store's LATEST; one that is there is not sent
        again."""
        with self._changed:
            left_out, self._next, self._newest = self._next, path, path
            late, self._failed = [*self._late, *self._failed], []
            if left_out is not None and left_out != path:
                if self._is_permanent(left_out):
                    late.append(left_out)
                else:
                    self._leave_out(left_out, path)
            self._late = [each for each in late if each != path]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def in_use(self) -> set[str]:
        """Return the names of checkpoints that are sent, or will be."""
        with self._changed:
            return {path.name for path in (self._sending, self._next, *self._late) if path is not None}

    def events(self) -> list[Event]:
        """Return what has happened since the last call, as (kind, fields)."""
        with self._changed:
            events, self._events = self._events, []
            return events

    def wait(self, seconds: float) -> None:
        """Send the newest checkpoint, if it is not, and wait for what is sent, so many seconds at most."""
        deadline = time.monotonic() + seconds
        with self._changed:
            newest = self._newest
        if newest is not None and newest not in (self._sent, self._next, self._sending):
            self.send(newest)
        with self._changed:
            while self._work_left() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def close(self) -> None:
        """Send no more, without waiting, and say which checkpoint is not in the store."""
        with self._changed:
            if self._closing.is_set():
                return
            self._closing.set()
            self._changed.notify_all()
            newest, sent = self._newest, self._sent
        if newest is not None and newest != sent:
            there = f"its newest is {sent.name}" if sent is not None else "this run has sent none"
            self._warnings.append(
                f"{KEY}: {newest.name} is not in {self._remote} as the run ends, and {there}; start it again "
                f"with --resume auto, which sends it"
            )

    def _work_left(self) -> bool:
        return self._next is not None or bool(self._late) or self._sending is not None

    def _is_permanent(self, path: Path) -> bool:
        return is_permanent(step_of(path.name), self._copies.keep_every)

    def _note(self, kind: str, fields: dict[str, Any]) -> None:
        with self._changed:
            self._events.append((kind, fields))

    def _leave_out(self, path: Path, newer: Path) -> None:
        """Note that a checkpoint is not sent as a newer one is there before its turn."""
        self._note("upload_left_out", {"step": step_of(path.name)})
        told = f"{KEY}: checkpoints come faster than they are sent to {self._remote}, so "
        if not any(each.startswith(told) for each in self._warnings):
            self._warnings.append(
                f"{told}{path.name} is left out for {newer.name}; give a larger checkpoint.remote_every or "
                f"checkpoint.every"
            )

    # The thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            path, becomes_latest = taken
            begun = time.perf_counter()
            try:
                sent = self._copy(path, becomes_latest)
            except ClosingError:
                return
            except Exception as error:  # told, whatever a store's library raises: training goes on
                self._note_failed(path, error)
            else:
                seconds = round(time.perf_counter() - begun, 3)
                if sent:  # else it was there
                    self._note("uploaded", {"step": step_of(path.name), "bytes": sent, "seconds": seconds})
            with self._changed:
                self._sending = None
                self._changed.notify_all()

    def _take(self) -> tuple[Path, bool] | None:
        """Wait for the next checkpoint to send, and whether it becomes LATEST; None when the run ends."""
        with self._changed:
            while not self._closing.is_set():
                if self._next is not None:
                    self._sending, self._next = self._next, None
                    return self._sending, True
                if self._late:
                    self._sending = self._late.pop(0)
                    return self._sending, False
                self._changed.wait()
        return None

    def _note_failed(self, path: Path, error: Exception) -> None:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        with self._changed:
            if self._closing.is_set():
                return  # `close` has told what is missing
            if self._is_permanent(path) and path.is_dir():
                self._failed.append(path)
            self._note("upload_failed", {"step": step_of(path.name), "reason": reason})
            self._warnings.append(
                f"{path.name} is not copied to {self._remote}: {reason}; training goes on, and the next "
                f"checkpoint is tried again"
            )

    def _copy(self, path: Path, becomes_latest: bool) -> int:
        """Send a checkpoint and what it refers to, name it in LATEST, remove old ones; return the bytes."""
        self._claim()
        manifest = parse_manifest(path, read_manifest_text(path, self._disk))
        sent = 0
        if manifest.frozen is not None:
            sent += self._send_folder(self._directory / manifest.frozen)
        sent += self._send_folder(path)
        self._check()
        if becomes_latest:
            self._name_latest(path)
        try:
            self._remote.retire(self._copies.keep, self._copies.keep_every)
        except Exception as error:  # the new one stands
            self._warnings.append(f"an old checkpoint in {self._remote} could not be removed: {error}")
        return sent

    def _name_latest(self, path: Path) -> None:
        """Make a checkpoint the store's LATEST, and note here that it is, or may be if this fails."""
        line = latest_line(path.name)
        before = [latest_line(name) for name in sent_names(self._directory) if name != path.name]
        self._write_sent([*before, line])
        self._remote.folder.write(LATEST, line.encode())
        self._write_sent([line])
        with self._changed:
            self._sent = path

    def _write_sent(self, lines: list[str]) -> None:
        self._disk.replace_file(self._directory / SENT, "".join(lines), secrets.token_hex(6))

    def _claim(self) -> None:
        """Be the one that sends files to the store; raise CheckpointError if another run is since."""
        if self._writer:
            self._remote.check_writer(self._writer)
            return
        self._lease.check()
        writer = writer_of(self._directory)
        self._remote.claim(writer)
        self._writer = writer
        there = set(self._remote.history())
        with self._changed:  # permanent ones that earlier starts could not send
            self._late += [
                path
                for path in published(self._directory).values()
                if self._is_permanent(path) and path.name not in there and path not in self._late
            ]

    def _check(self) -> None:
        """Raise before LATEST is sent by a run that ends, or is not the writer any more, here or there."""
        if self._closing.is_set():
            raise ClosingError
        self._lease.check()
        self._remote.check_writer(self._writer)

    def _send_folder(self, path: Path) -> int:
        """Send the files of a directory, the manifest last, unless they are there; return the bytes."""
        there, content = self._remote.folder.read(f"{path.name}/{MANIFEST}"), (path / MANIFEST).read_bytes()
        if there == content:
            return 0
        if there is not None:  # of the same step before the run went back
            self._remote.folder.remove(f"{path.name}/{MANIFEST}")
        names = sorted(set(os.listdir(path)) - {MANIFEST})
        in_parallel([partial(self._send, path, name) for name in names])
        self._send(path, MANIFEST)
        return sum((path / name).stat().st_size for name in (*names, MANIFEST))

    def _send(self, path: Path, name: str) -> None:
        if self._closing.is_set():
            raise ClosingError
        self._remote.folder.send(path / name, f"{path.name}/{name}")

    def _pause(self, seconds: float) -> None:
        """Wait before another try, which is none when the run ends."""
        if self._closing.wait(seconds):
            raise ClosingError


def in_parallel(calls: Sequence[Callable[[], None]]) -> None:
    """Make calls in `PARALLEL` threads; after the first that raises, those not begun are dropped."""
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="checkpoint files") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
