"""The folder that all ranks write into: files, renames, synced bytes, locks, and that all hosts have it.

Each host does what a save does, in a folder that begins as unpublished parts of checkpoints do and that goes
again. A file system that does not answer keeps a thread, and not the examination.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from meshwright.checkpoint.claim import VISIBLE_S
from meshwright.checkpoint.disk import TEMPORARY, Disk
from meshwright.checkpoint.lease import NO_FLOCK
from meshwright.doctor.finding import Finding
from meshwright.doctor.world import ExaminedWorld

ANSWER_S = 20.0
"""Longest time of what is done with a few files."""
_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space, or ask for a larger quota",
    errno.EROFS: "mount it writable",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.EIO: "look at the disk or its server, such as by dmesg",
}
_SHARE = "mount it with locks that all hosts share (NFS without nolock or local_lock, Lustre with flock)"


def nearest(folder: Path) -> Path:
    """The folder, or the first above it that is there."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())


def files(there: Path, disk: Disk | None = None) -> list[Finding]:
    """Findings of this host in a folder, where it does what a save does; nothing stays in it."""
    found: list[Finding] = []

    def work() -> None:
        with _probe(there, found) as probe:
            if probe is not None:
                found.extend(_renames(probe, disk or Disk()) or _locks(probe))

    return found if _in_time(work) else [_silent(there)]


def _renames(probe: Path, disk: Disk) -> list[Finding]:
    """Files that are written, synced and renamed over another, and a folder that is renamed, as in a save."""
    doing, there = "write a file in", probe.parent
    try:
        for name in ("new", "old"):
            disk.write_file(probe / name, [memoryview(name.encode() * (1 << 18))])
        doing = "rename a file in"
        disk.rename(probe / "new", probe / "old")
        disk.sync_directory(probe)
        if (probe / "new").exists() or (probe / "old").read_bytes()[:3] != b"new":
            return [
                Finding(
                    "folder",
                    True,
                    f"a file that is renamed in {there} does not take the place of the one before it",
                    "set checkpoint.dir, or --out, to a file system of POSIX: a save appears by a rename",
                )
            ]
        doing = "rename a folder in"
        disk.make_directory(probe / "unpublished")
        disk.rename(probe / "unpublished", probe / "published")
        disk.sync_directory(probe)
    except OSError as error:
        return [unusable(there, doing, error)]
    return []


def unusable(there: Path, doing: str, error: OSError) -> Finding:
    """The finding of what failed in a folder."""
    remedy = _REMEDIES.get(error.errno or 0, "look at its file system")
    return Finding(
        "folder",
        True,
        f"no rank can {doing} {there} ({error.strerror})",
        f"{remedy}, or set checkpoint.dir, or --out, to another folder",
    )


def _locks(probe: Path) -> list[Finding]:
    """Locks that keep nobody else of this host from a file."""
    there = probe.parent
    try:
        with _locked(probe / "lock"), _locked(probe / "lock"):
            return [_no_locks(f"a lock on a file in {there} keeps nobody else from it")]
    except BlockingIOError:
        return []
    except OSError as error:
        if error.errno not in NO_FLOCK:
            return [unusable(there, "lock a file in", error)]
        return [_no_locks(f"files in {there} cannot be locked ({error.strerror})")]


def _no_locks(sentence: str) -> Finding:
    risk = ", so two runs that are started in one folder by mistake may both write there"
    return Finding("folder", False, sentence + risk, f"{_SHARE}, and start one run in a folder")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file as the lease of a run's folder does.

    Raises OSError, and BlockingIOError while somebody else has it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def shared(world: ExaminedWorld, there: Path) -> list[Finding]:
    """Hosts that do not see what others write in the folder, or do not heed their locks.

    Every rank calls this.
    """
    found: list[Finding] = []
    if len(world.leaders) == 1:
        return found
    with ExitStack() as stack:
        made = stack.enter_context(_probe(there, found)) if world.rank == 0 else None
        at = world.ranks.broadcast(None if made is None else str(made))
        if at is None:
            return found
        probe = Path(at)
        with ExitStack() as held:
            if world.rank == 0:
                with suppress(OSError):  # what this host's own check has found
                    held.enter_context(_locked(probe / "lock"))
            world.ranks.barrier()
            if world.leads and world.rank > 0:
                found += _seen(probe, world) or _kept_out(probe, world)
            missing = world.ranks.gather(any(each.fails for each in found))
            if world.rank == 0:
                found += _arrived(probe, world, missing)
            world.ranks.barrier()  # the folder goes, and the lock
    return found


def _seen(probe: Path, world: ExaminedWorld) -> list[Finding]:
    """Look for rank 0's folder as long as a file system may take, and leave a file there."""
    until = time.monotonic() + VISIBLE_S
    while not probe.is_dir():
        if time.monotonic() > until:
            return [
                Finding(
                    "folder",
                    True,
                    f"{world.names[world.rank]} does not see in {probe.parent} what {world.named(0)} writes "
                    f"there",
                    "set checkpoint.dir, or --out, to a folder that all hosts have mounted",
                )
            ]
        time.sleep(0.1)
    try:
        (probe / f"rank-{world.rank}").touch()
    except OSError as error:
        return [unusable(probe.parent, "write a file in", error)]
    return []


def _kept_out(probe: Path, world: ExaminedWorld) -> list[Finding]:
    """A lock of rank 0 that does not keep this host from the file."""
    try:
        with _locked(probe / "lock"):
            host = world.names[world.rank]
            return [
                _no_locks(f"a lock of {world.named(0)} in {probe.parent} does not keep {host} from a file")
            ]
    except OSError:  # it is kept out, or has no locks, which each host has found for itself
        return []


def _arrived(probe: Path, world: ExaminedWorld, missing: list[bool]) -> list[Finding]:
    """Files of other hosts that rank 0 does not see."""
    expected = [rank for rank in world.leaders[1:] if not missing[rank]]
    until = time.monotonic() + VISIBLE_S
    while late := [rank for rank in expected if not (probe / f"rank-{rank}").exists()]:
        if time.monotonic() > until:
            sentence = (
                f"{world.named(0)} does not see in {probe.parent} what {world.named(late[0])} writes there"
            )
            remedy = "set checkpoint.dir, or --out, to a folder that all hosts have mounted"
            return [Finding("folder", True, sentence, remedy, tuple(late))]
        time.sleep(0.1)
    return []


@contextmanager
def _probe(there: Path, found: list[Finding]) -> Iterator[Path | None]:
    """A folder for files of a check, which goes again; None, and a finding, where it cannot be made."""
    probe = there / f"{TEMPORARY}doctor-{secrets.token_hex(6)}"
    try:
        probe.mkdir()
    except OSError as error:
        found.append(unusable(there, "make a folder in", error))
        yield None
        return
    try:
        yield probe
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _in_time(work: Callable[[], None]) -> bool:
    """Run `work` in a thread; False if it takes longer than `ANSWER_S`. Raises what it raises."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if failure:
        raise failure[0]
    return not thread.is_alive()


def _silent(there: Path) -> Finding:
    return Finding(
        "folder",
        True,
        f"{there} has not answered for {ANSWER_S:g} s",
        "see that its server runs and can be reached, or set checkpoint.dir, or --out, to another folder",
    )
