"""Memory of a container or a job: its limit, and the processes that were killed for want of it.

Linux control groups of version 1 and 2, as processes see them under /proc and /sys/fs/cgroup.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.host import CONTROL_GROUPS, PROC, content, control_groups

_LIMITS = "memory.max", "memory.limit_in_bytes"
_EVENTS = "memory.events", "memory.oom_control"


def memory_limit(proc: Path = PROC, root: Path = CONTROL_GROUPS) -> int | None:
    """Return the least limit, in bytes, of this process's control group and of those above it.

    It is None where there is none, and a number beyond any machine's memory in version 1 without a limit.
    """
    texts = (
        content(folder / name).strip() for folder in control_groups("memory", proc, root) for name in _LIMITS
    )
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def oom_kills(proc: Path = PROC, root: Path = CONTROL_GROUPS) -> int | None:
    """Return how many processes the kernel has killed so far for want of memory.

    It counts those of this process's control group and of the groups below it, or those of the whole host
    where the group has no counter; None where neither is there. A number that rose while a process was ended
    by SIGKILL tells why.
    """
    for folder in control_groups("memory", proc, root):
        for name in _EVENTS:
            if (count := _count(folder / name)) is not None:
                return count
    return _count(proc / "vmstat")


def _count(path: Path) -> int | None:
    """Return the number after `oom_kill` in a file of such lines."""
    pairs = (line.split() for line in content(path).splitlines())
    return next((int(pair[1]) for pair in pairs if pair[:1] == ["oom_kill"] and len(pair) == 2), None)
