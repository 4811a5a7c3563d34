"""Memory of this process: what it holds, and the most that it has held, on its device."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


def memory_bytes(device: torch.device) -> int:
    """Return the memory that this rank holds: allocated on CUDA, resident on the CPU.

    Where the system is not Linux and the device the CPU, the most that it has held until now.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return peak_memory_bytes(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has held: allocated on CUDA, resident on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
