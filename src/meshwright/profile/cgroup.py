"""Memory of a container or a job: its limit, and the processes that were killed for want of it.

Linux control groups of version 1 and 2, as processes see them under /proc and /sys/fs/cgroup.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC, ROOT = Path("/proc"), Path("/sys/fs/cgroup")
_LIMITS = "memory.max", "memory.limit_in_bytes"
_EVENTS = "memory.events", "memory.oom_control"


def memory_limit(proc: Path = PROC, root: Path = ROOT) -> int | None:
    """Return the least limit, in bytes, of this process's control group and of those above it.

    It is None where there is none, and a number beyond any machine's memory in version 1 without a limit.
    """
    texts = (_text(folder / name).strip() for folder in _folders(proc, root) for name in _LIMITS)
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def oom_kills(proc: Path = PROC, root: Path = ROOT) -> int | None:
    """Return how many processes the kernel has killed so far for want of memory.

    It counts those of this process's control group and of the groups below it, or those of the whole host
    where the group has no counter; None where neither is there. A number that rose while a process was ended
    by SIGKILL tells why.
    """
    for folder in _folders(proc, root):
        for name in _EVENTS:
            if (count := _count(folder / name)) is not None:
                return count
    return _count(proc / "vmstat")


def _folders(proc: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's memory groups, each one before those above it.

    In a container the path of its group may be the host's, which is not to be seen: then only the folder at
    the top exists, and is the container's.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":  # version 2, alone or beside version 1
            tops = [root, root / "unified"]
        else:
            tops = [root / controllers] if "memory" in controllers.split(",") else []
        names = [name for name in path.split("/") if name]
        if ".." in names:  # outside of what this process sees
            names = []
        for top in tops:
            yield from (top.joinpath(*names[:depth]) for depth in range(len(names), -1, -1))


def _count(path: Path) -> int | None:
    """Return the number after `oom_kill` in a file of such lines."""
    pairs = (line.split() for line in _text(path).splitlines())
    return next((int(pair[1]) for pair in pairs if pair[:1] == ["oom_kill"] and len(pair) == 2), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # a system without such a file
        return ""
