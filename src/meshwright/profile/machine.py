"""Description of this machine, in words and as a `Device`."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import date
from math import exp, fsum, log
from pathlib import Path

import torch

from meshwright.hardware.catalogue import CLUSTERS, CUDA_NAMES
from meshwright.hardware.cluster import Device, Matmul, Measured, Rates


def host_id() -> str:
    """One text for all processes that share a kernel and its network: one host, or one container of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The name of this host's processor."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def taken(device: torch.device) -> dict[str, str]:
    """When and on what a measurement was made."""
    words = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    words |= {"processor": processor(), "cores": str(cores())}
    if device.type == "cuda":
        words["device"] = torch.cuda.get_device_name(device)
        words["driver"] = str(torch.version.cuda or torch.version.hip)
    return words


def device_of(device: torch.device, measured: Measured) -> Device:
    """The device: of the catalogue where its name is known, else with the best that was measured as peaks.

    `Rates` are those of the measurement: products and attention by the geometric mean of the larger half of
    the shapes. On the CPU the whole host is the device, which as many ranks shared as `measured` says; what
    one of them did at best, as many do at once as there are cores.
    """
    ranks = measured.ranks if device.type == "cpu" else 1
    at_once = min(ranks, cores())
    peak = {name: at_once * rate for name, rate in _best(measured.matmul).items()}
    source = f"meshwright profile, {measured.taken['date']}"
    memory_rate = at_once * (measured.memory_bandwidth or 0.0)
    if device.type == "cpu":
        found = Device(processor(), peak, host_memory(), memory_rate, _cache(), cores(), source, kind="cpu")
    else:
        found = _known(device) or _unknown(device, peak, memory_rate, source)
    shares = _matmul_share(measured, found.peak, ranks), _attention_share(measured, found.peak, ranks)
    rates = Rates(
        matmul=shares[0],
        attention=shares[1],
        memory=min(1.0, memory_rate / found.bandwidth),
        launch=measured.launch or Rates.launch,
        link=1.0,  # a link's rate is a measured one
    )
    return replace(found, rates=rates)


def _known(device: torch.device) -> Device | None:
    words = f" {torch.cuda.get_device_name(device)} "
    name = next((name for said, name in CUDA_NAMES.items() if f" {said} " in words), None)
    return CLUSTERS[name].device if name else None


def _unknown(device: torch.device, peak: Mapping[str, float], memory_rate: float, source: str) -> Device:
    said = torch.cuda.get_device_properties(device)
    return Device(
        said.name,
        peak,
        said.total_memory,
        memory_rate,
        said.L2_cache_size,
        said.multi_processor_count,
        source,
        kind="rocm" if torch.version.hip else "cuda",
    )


def _flops(point: Matmul) -> int:
    return 2 * point.m * point.n * point.k


def _best(points: Iterable[Matmul]) -> dict[str, float]:
    best: dict[str, float] = {}
    for point in points:
        best[point.format] = max(best.get(point.format, 0.0), _flops(point) / point.seconds)
    return best


def _matmul_share(measured: Measured, peak: Mapping[str, float], ranks: int) -> float:
    work = [(point.format, _flops(point), point.seconds) for point in measured.matmul]
    return _share(work, peak, ranks) or Rates.matmul


def _attention_share(measured: Measured, peak: Mapping[str, float], ranks: int) -> float:
    """Seven products of a causal half: two of them forward, five backward."""
    work = [
        (p.format, 7 * p.sequences * p.heads * p.length**2 * p.head_dim, p.forward + p.backward)
        for p in measured.attention
    ]
    return _share(work, peak, ranks) or Rates.attention


def _share(work: list[tuple[str, int, float]], peak: Mapping[str, float], ranks: int) -> float | None:
    """Attained share of the peak, over the larger half of the products (format, FLOPs, seconds)."""
    large = sorted(work, key=lambda each: each[1])[len(work) // 2 :]
    logs = [log(ranks * flops / seconds / peak[name]) for name, flops, seconds in large if name in peak]
    return min(1.0, exp(fsum(logs) / len(logs))) if logs else None


def host_memory() -> int:
    """Bytes of this host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cache() -> int:
    """Bytes of the last level of cache; 0 where the system does not tell."""
    sizes = [
        _text(str(file)).strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:  # a system without such a file
        return ""


def host_name() -> str:
    """Name of this host on the network."""
    return socket.gethostname()


def has_infiniband() -> bool:
    """True if this host has an InfiniBand adapter."""
    return any(Path("/sys/class/infiniband").glob("*"))
