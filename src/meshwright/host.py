"""The host of this process: which one it is, and how many of its cores the process may use."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from pathlib import Path


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


def cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use, at most as many as the `quota` of its container is worth."""
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = quota.read_text(encoding="utf-8").split()
        return given if time == "max" else max(1, min(given, round(int(time) / int(period))))
    except (OSError, ValueError):  # another system, or control groups of version 1
        return given
