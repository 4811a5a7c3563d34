"""One writer per directory: a lease with a heartbeat, and a generation that fences whoever lost it.

    lease.json   who holds the directory: holder, host, place, pid, process start, since, generation, token;
                 its modification time is the heartbeat
    lease.lock   locked (flock) only while the lease is taken, checked or given back: a child that inherits
                 the descriptor must not keep a dead run's lease alive

A holder is gone when it released, when its process is dead (same host), or when its heartbeat is older than
STALE_S. Ages are measured against a file that was touched just now in the same directory, so that the file
server's clock is compared with itself. A process that was only stopped, and wakes after another took over,
finds another token in lease.json and raises before it publishes anything (fencing: Gray & Cheriton 1989;
Kleppmann 2016).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic.dataclasses import dataclass

from meshwright.checkpoint.disk import TEMPORARY, Disk
from meshwright.checkpoint.errors import CheckpointError
from meshwright.spec.errors import UserError
from meshwright.spec.files import parse_json
from meshwright.spec.records import Integer, Record, read

STALE_S = 60.0
"""Age in seconds from which a heartbeat is of a holder that is gone or stopped."""
BEATS = 6
"""Heartbeats within the age at which one is stale."""
LOCK_WAIT_S = 10.0  # the lock is held for milliseconds: longer means that its owner was stopped inside
_NO_FLOCK = {errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class Holder(Record):
    """The content of lease.json."""

    holder: str
    host: str
    place: str
    pid: Integer
    process_start: str
    since: str
    generation: Integer
    token: str
    released: bool = False

    def __str__(self) -> str:
        return f"{self.holder} (host {self.host}, pid {self.pid}, since {self.since})"


class Lease:
    """The right to write in `directory`, which must exist.

    `stale_s` is the age in seconds at which a heartbeat no longer counts. All errors are CheckpointErrors.
    """

    def __init__(
        self, directory: Path, holder: str, stale_s: float = STALE_S, disk: Disk | None = None
    ) -> None:
        self.directory = Path(directory)
        self.holder = holder
        self.stale_s = stale_s
        self.generation = 0
        self._disk = disk or Disk()
        self._path = self.directory / "lease.json"
        self._token = secrets.token_hex(8)
        self._mine: Holder | None = None
        self._stop = threading.Event()
        self._beat: threading.Thread  # runs while the lease is held

    def acquire(self) -> None:
        """Take the lease, also over a holder that is gone. Raises when another run holds it and is alive."""
        if self._mine is not None:
            return
        try:
            with self._locked():
                for leftover in ("clock-*", "lease.json-*"):  # of a process that died while it took the lease
                    for path in self.directory.glob(f"{TEMPORARY}{leftover}"):
                        self._disk.unlink(path)
                other = self._read()
                if other is not None and not other.released and self._alive(other):
                    raise CheckpointError(
                        f"{self.directory} is in use by {other}; "
                        "stop that run, or give this one another directory"
                    )
                mine = Holder(
                    holder=self.holder,
                    host=socket.gethostname(),
                    place=_place(),
                    pid=os.getpid(),
                    process_start=_process_start(os.getpid()),
                    since=datetime.now(UTC).isoformat(timespec="seconds"),
                    generation=1 + (other.generation if other else 0),
                    token=self._token,
                )
                self._write(mine)
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} cannot be written ({error.strerror or error}); "
                "give a folder that has space and that this user may write"
            ) from error
        self._mine, self.generation = mine, mine.generation
        self._stop.clear()
        self._beat = threading.Thread(
            target=self._keep_alive, args=(mine,), name="lease heartbeat", daemon=True
        )
        self._beat.start()

    def release(self) -> None:
        """Give the lease back; without effect when it is not held or when another run took it over."""
        if self._mine is None:
            return
        self._stop.set()
        self._beat.join()
        mine, self._mine = self._mine, None
        try:
            with self._locked():
                now = self._read()
                if now is not None and now.token == mine.token:
                    self._write(replace(mine, released=True))
        except OSError as error:
            # The next run takes over the lease of a process that is gone, and this one's work is done.
            warnings.warn(f"{self._path} could not be given back ({error.strerror})", stacklevel=2)

    def __enter__(self) -> Lease:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise CheckpointError when another run has taken the lease: what was written must be dropped."""
        now = self._read()
        if self._mine is None or now is None or now.token != self._mine.token:
            taken = f"{now} took it (generation {now.generation})" if now else "lease.json is gone"
            raise CheckpointError(
                f"this run (generation {self.generation}) lost the lease of {self.directory}: {taken}; "
                "nothing was published"
            )

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """Hold the lock around a publication, after a `check`: nobody can take over between the two."""
        with self._locked():
            self.check()
            yield

    def _keep_alive(self, mine: Holder) -> None:
        while not self._stop.wait(self.stale_s / BEATS):
            try:
                now = self._read()
                if now is None or now.token != mine.token:
                    return  # `fenced` will say so before anything is published
                os.utime(self._path)
            except (OSError, CheckpointError):
                continue  # a beat may be missed: the file system's failure shows in the save itself

    def _alive(self, other: Holder) -> bool:
        if other.token == self._token:
            return False  # this object's own attempt, which failed after it had written the file
        if other.place == _place() and _process_start(other.pid) != other.process_start:
            return False
        probe = self.directory / f"{TEMPORARY}clock-{secrets.token_hex(4)}"
        os.close(self._disk.create(probe))
        try:
            age = probe.stat().st_mtime - self._path.stat().st_mtime
        finally:
            self._disk.unlink(probe)
        return age < self.stale_s

    def _read(self) -> Holder | None:
        """Return the holder that lease.json names; None without the file."""
        try:
            with self._disk.opened(self._path) as (descriptor, _):
                return read(Holder, parse_json(os.read(descriptor, 1 << 16)))
        except FileNotFoundError:
            return None
        except (ValueError, UserError) as error:
            raise CheckpointError(
                f"{self._path} cannot be understood ({error}); remove it if no run writes in {self.directory}"
            ) from error

    def _write(self, holder: Holder) -> None:
        self._disk.replace_file(self._path, json.dumps(asdict(holder)) + "\n", secrets.token_hex(4))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other processes; on file systems without locks only the token in lease.json protects."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.directory / "lease.lock", flags, 0o644)
        try:
            deadline = time.monotonic() + LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise CheckpointError(
                            f"{self.directory}/lease.lock is held by a process that is stopped "
                            f"({self._read() or 'unknown'}); end that process"
                        ) from None
                    time.sleep(0.02)
                except OSError as error:
                    if error.errno in _NO_FLOCK:
                        break
                    raise
            yield
        finally:
            os.close(descriptor)


def _place() -> str:
    """Return where a pid is meaningful: this boot of this host, and its pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}/{secrets.token_hex(8)}"  # equal to no other: the heartbeat decides


def _process_start(pid: int) -> str:
    """Return when a process began, in clock ticks since boot, which no later process with its pid has.

    Empty for a process that does not exist or is a zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
