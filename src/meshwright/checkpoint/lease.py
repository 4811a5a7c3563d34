"""One writer per directory: a lease with a heartbeat, and a generation that fences whoever lost it.

    lease.json   who holds the directory: holder, host, place, pid, process start, since, generation, token;
                 its modification time is the heartbeat
    lease.lock   locked (flock) only while the lease is taken, checked or given back: a child that inherits
                 the descriptor must not keep a dead run's lease alive

A holder is gone when it released, when its process is dead (same host), or when its heartbeat stood still for
STALE_S of this process's own monotonic clock while it watched: no clock is compared with another one, so that
none can jump. A process that lives on this host holds its lease whatever its heartbeat says. A process that
was only stopped, and wakes after another took over, finds another token in lease.json and raises before it
publishes anything (fencing: Gray & Cheriton 1989; Kleppmann 2016).
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
from meshwright.checkpoint.errors import CheckpointError, InUseError, LostLeaseError, VanishedError
from meshwright.spec.errors import UserError
from meshwright.spec.files import parse_json
from meshwright.spec.records import Integer, Record, read

STALE_S = 60.0
"""Seconds after which a heartbeat that stands still is of a holder that is gone or stopped."""
BEATS = 6
"""Heartbeats within the stale time of a lease."""
PATIENCE = 2
"""Multiple of the stale time for which an automatic restart waits for a live holder on another host."""
LOCK_WAIT_S = 10.0  # the lock is held for milliseconds: longer means that its owner was stopped inside
AWAY_S = 8.0
"""Seconds for which the folder of a lease that is held may be away."""
NO_FLOCK = {errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}


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

    @property
    def process(self) -> tuple[str, int, str]:
        """The process that took the lease, which no other process equals."""
        return self.place, self.pid, self.process_start

    def __str__(self) -> str:
        return f"{self.holder} (host {self.host}, pid {self.pid}, since {self.since})"


class Lease:
    """The right to write in `directory`, which must exist.

    `stale_s` is the time in seconds after which a heartbeat that stands still no longer counts. With `wait` a
    holder that lives on another host is waited for, up to `PATIENCE` times as long. All errors are
    CheckpointErrors, but for an OSError where lease.json of a lease that is held cannot be read.
    """

    def __init__(
        self,
        directory: Path,
        holder: str,
        stale_s: float = STALE_S,
        disk: Disk | None = None,
        wait: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.holder = holder
        self.stale_s = stale_s
        self.wait = wait
        self.generation = 0
        self.predecessor: Holder | None = None
        """The holder that this one replaced since its heartbeat stood still."""
        self.lost = False
        """True where the heartbeat found the lease with another run: `check` says with which."""
        self._disk = disk or Disk()
        self._path = self.directory / "lease.json"
        self._token = secrets.token_hex(8)
        self._mine: Holder | None = None
        self._uses = 0
        """Calls of `acquire` without one of `release`."""
        self._checked = 0.0
        self._stop = threading.Event()
        self._beat: threading.Thread  # runs while the lease is held

    def beside(self, directory: Path, disk: Disk | None = None) -> Lease:
        """Return a lease of another directory for this holder; of the directory of this one, itself.

        A process whose silence this lease has waited out is not waited for again.
        """
        if directory.resolve() == self.directory.resolve():
            return self
        other = Lease(directory, self.holder, self.stale_s, disk, self.wait)
        other.predecessor = self.predecessor
        return other

    def acquire(self) -> None:
        """Take the lease, also over a holder that is gone; after several calls the last `release` counts.

        A holder on this host that lives is refused at once. The heartbeat of one on another host is watched,
        and a warning says so: when it moves the holder is refused (with `wait` only when it still does after
        that time), when it stands still for `stale_s` the lease is taken.
        """
        if self._mine is None:
            try:
                self._mine = self._take()
            except OSError as error:
                raise CheckpointError(
                    f"{self.directory} cannot be written ({error.strerror or error}); "
                    "give a folder that has space and that this user may write"
                ) from error
            self.generation, self.lost, self._checked = self._mine.generation, False, _clock()
            self._stop.clear()
            self._beat = threading.Thread(target=self._keep_alive, name="lease heartbeat", daemon=True)
            self._beat.start()
        self._uses += 1

    def release(self) -> None:
        """Give the lease back; without effect when it is not held or when another run took it over."""
        self._uses = max(0, self._uses - 1)
        if self._mine is None or self._uses:
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

    @property
    def identity(self) -> tuple[str, int]:
        """Token and generation of this holder, for `follow`."""
        return self._token, self.generation

    def follow(self, token: str, generation: int) -> None:
        """Make `check` on another rank look for the holder of this identity, which is this rank's as well."""
        self._token, self.generation = token, generation

    def __enter__(self) -> Lease:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise LostLeaseError when another run has taken the lease: what was written must be dropped.

        A lease.json that is not there is waited for, for `AWAY_S`: its folder may have been moved away for a
        moment, or its file system be mounted again. Then VanishedError is raised.
        """
        now = self._awaited()
        if now.token != self._token or now.released:
            taken = f"{now} took it (generation {now.generation})"
            if now.token == self._token:
                taken = "it was given back"
            raise LostLeaseError(
                f"this run (generation {self.generation}) lost the lease of {self.directory}: {taken}; "
                "it writes nothing there any more"
            )
        self._checked = _clock()

    def _awaited(self) -> Holder:
        """Return the holder that lease.json names, once it is there. Raises VanishedError."""
        until = time.monotonic() + AWAY_S
        while (now := self._read()) is None:
            if time.monotonic() > until:
                raise VanishedError(
                    f"{self._path} has been gone for {AWAY_S:g} s, so nothing can be written in "
                    f"{self.directory}; put the folder back, and go on with --resume auto"
                )
            time.sleep(0.05)
        return now

    def recheck(self) -> None:
        """`check`, unless one found the lease so lately that no other run can have waited for it since."""
        if _clock() - self._checked > self.stale_s / BEATS:
            self.check()

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """Hold the lock around a publication, after a `check`: nobody can take over between the two."""
        self._awaited()  # without its folder there is no lock
        with self._locked():
            self.check()
            yield

    def _take(self) -> Holder:
        """Write lease.json once nobody else holds the lease. Raises CheckpointError and OSError."""
        begun = since = time.monotonic()
        seen = self._observe()
        moved = told = False
        while True:
            other, now = seen[0], time.monotonic()
            silent = now - since >= self.stale_s
            if other is None or silent or self._is_gone(other):
                with self._locked():
                    if self._observe() == seen:
                        self.predecessor = other if silent else self.predecessor
                        return self._replace(other)
            elif other.place == _place() and _process(other.pid)[1] == "T":
                raise InUseError(f"{self.directory} is in use by {other}, which is stopped; end that process")
            elif other.place == _place() or (moved and now - begun >= self._patience_s):
                raise InUseError(
                    f"{self.directory} is in use by {other}; "
                    "stop that run, or give this one another directory"
                )
            else:
                if not told:
                    told = True
                    warnings.warn(
                        f"{self.directory} was in use by {other}; waiting {self.stale_s:g} s to see whether "
                        "its heartbeat stands still",
                        stacklevel=3,
                    )
                time.sleep(min(1.0, self.stale_s / 60))
            if (found := self._observe()) != seen:
                seen, since, moved = found, time.monotonic(), True

    @property
    def _patience_s(self) -> float:
        return PATIENCE * self.stale_s if self.wait else 0.0

    def _replace(self, other: Holder | None) -> Holder:
        """With the lock: write lease.json for this process."""
        for path in self.directory.glob(f"{TEMPORARY}lease.json-*"):  # of a process that died as it wrote it
            self._disk.unlink(path)
        mine = Holder(
            holder=self.holder,
            host=socket.gethostname(),
            place=_place(),
            pid=os.getpid(),
            process_start=_process(os.getpid())[0],
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            generation=1 + (other.generation if other else 0),
            token=self._token,
        )
        self._write(mine)
        return mine

    def _keep_alive(self) -> None:
        while not self._stop.wait(self.stale_s / BEATS):
            try:
                now = self._read()
                self.lost = now is None or now.token != self._token
                if not self.lost:
                    os.utime(self._path)
            except (OSError, CheckpointError):
                continue  # a beat may be missed: the file system's failure shows in the save itself

    def _is_gone(self, other: Holder) -> bool:
        """True for a holder that needs no watching: it gave the lease back, is dead, or was waited out."""
        if other.released or other.token == self._token:  # or an own attempt that failed after it had written
            return True
        if other.place == _place():
            return _process(other.pid)[0] != other.process_start
        return self.predecessor is not None and self.predecessor.process == other.process

    def _observe(self) -> tuple[Holder | None, int]:
        """Return the holder that lease.json names, None without the file, and the time of its last beat."""
        try:
            with self._disk.opened(self._path) as (descriptor, _):
                beat = os.fstat(descriptor).st_mtime_ns
                return read(Holder, parse_json(os.read(descriptor, 1 << 16))), beat
        except FileNotFoundError:
            return None, 0
        except (ValueError, UserError, RecursionError) as error:
            raise CheckpointError(
                f"{self._path} cannot be understood ({error}); remove it if no run writes in {self.directory}"
            ) from error

    def _read(self) -> Holder | None:
        return self._observe()[0]

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
                    if error.errno in NO_FLOCK:
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


def _process(pid: int) -> tuple[str, str]:
    """Return when a process began, in clock ticks since boot, which no later process with its pid has, and
    the letter of its state; ("", "") for a process that does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return ("", "") if fields[0] in "ZX" else (fields[19], fields[0])


def _clock() -> float:
    """Return monotonic seconds that go on while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
