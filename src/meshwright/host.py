"""The host of this process: which one it is, and how many of its cores the process may use."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

PROC, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def host_id() -> str:
    """One text for all processes that share a kernel and its network: one host, or one container of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def host_number() -> int:
    """`host_id` as a number of 56 bits, for messages between ranks."""
    return int.from_bytes(hashlib.sha256(host_id().encode()).digest()[:7], "big")


def cpu_info(key: str) -> str:
    """The value of `key`, such as "model name", of the first processor in /proc/cpuinfo; "" without one."""
    try:
        listed = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return ""
    found = re.search(rf"^{key}\s*:\s*(.+)$", listed, re.MULTILINE)
    return found[1] if found else ""


def is_switched_on(name: str) -> bool:
    """True if the environment variable `name` is set to anything but 0."""
    return os.environ.get(name, "") not in ("", "0")


def cores(proc: Path = PROC, root: Path = CONTROL_GROUPS) -> int:
    """Cores that this process may use, at most as many as the quota of its container or job is worth.

    A quota is read at every level of Linux's control groups, in version 1 and 2.
    """
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [worth for folder in control_groups("cpu", proc, root) if (worth := _quota(folder)) is not None]
    return max(1, min([given, *map(round, quotas)]))


def _quota(folder: Path) -> float | None:
    """Return the cores that a control group may use by itself; None without a limit."""
    both = content(folder / "cpu.max").split()  # version 2
    both = both or [content(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(both) != 2 or not all(text.isdecimal() for text in both) or int(both[1]) == 0:
        return None  # "max", or in version 1 -1
    return int(both[0]) / int(both[1])


def control_groups(controller: str, proc: Path = PROC, root: Path = CONTROL_GROUPS) -> Iterator[Path]:
    """Yield the folders of this process's control groups for a controller, such as "memory", each one before
    those above it.

    In a container the path of its group may be the host's, which is not to be seen: then only the folder at
    the top exists, and is the container's.
    """
    for line in content(proc / "self" / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":  # version 2, alone or beside version 1
            tops = [root, root / "unified"]
        else:  # several in one hierarchy are mounted under their names, and linked under each
            own = controller in controllers.split(",")
            tops = list(dict.fromkeys((root / controllers, root / controller))) if own else []
        names = [name for name in path.split("/") if name]
        if ".." in names:  # outside of what this process sees
            names = []
        for top in tops:
            yield from (top.joinpath(*names[:depth]) for depth in range(len(names), -1, -1))


def content(path: Path) -> str:
    """Return the text of a file of the kernel; "" on a system without it."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
