"""Description of this machine, in words and as a `Device`."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

from meshwright.hardware.catalogue import cluster_of_gpu
from meshwright.hardware.cluster import Device, DeviceKind, ProfiledTimes, Rates
from meshwright.host import cores, cpu_info
from meshwright.profile import cgroup

if TYPE_CHECKING:
    import torch

Work = tuple[str, float, float]
"""(format, FLOPs, seconds) of a product."""
GPU_DRIVERS = "/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/kfd", "/dev/dxg"
"""Files of Linux's drivers: NVIDIA's, that of its Jetsons, AMD's, and that of Windows' subsystem."""


def gpus() -> int:
    """GPUs that torch can use here.

    A supervisor asks, for which torch would be its memory and a second of its start: where no driver has left
    its file, torch is not imported.
    """
    if not has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def has_gpu_driver() -> bool:
    """True if there may be GPUs here: a driver has left its file, or the system is another than Linux."""
    return sys.platform != "linux" or any(Path(file).exists() for file in GPU_DRIVERS)


def processor() -> str:
    """The name of this host's processor."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def taken(device: torch.device) -> dict[str, str]:
    """When and on what a measurement was made."""
    import torch

    words = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": str(cores()),
    }
    if device.type == "cuda":
        words["device"] = torch.cuda.get_device_name(device)
        words["driver"] = str(torch.version.cuda or torch.version.hip)
    return words


def device_of(device: torch.device, measured: ProfiledTimes) -> Device:
    """The device: of the catalogue where its name is known, else with the best that was measured as peaks.

    `Rates` are those of the measurement: products and attention by the geometric mean of the larger half of
    the shapes. On the CPU the whole host is the device, which as many ranks shared as `measured` says; what
    one of them did at best, as many do at once as there are cores.
    """
    import torch

    ranks = measured.ranks if device.type == "cpu" else 1
    at_once = min(ranks, cores())
    peak: dict[str, float] = {}
    for point in measured.matmul:
        peak[point.format] = max(peak.get(point.format, 0.0), at_once * point.flops / point.seconds)
    source = f"meshwright profile, {measured.taken['date']}"
    memory_rate = at_once * (measured.memory_bandwidth or 0.0)
    if device.type == "cpu":
        known = Device(processor(), peak, host_memory(), memory_rate, _cache(), cores(), source, kind="cpu")
    elif (cluster := cluster_of_gpu(torch.cuda.get_device_name(device))) is not None:
        known = cluster.device
    else:
        gpu = torch.cuda.get_device_properties(device)
        sizes = gpu.L2_cache_size, gpu.multi_processor_count
        kind: DeviceKind = "rocm" if torch.version.hip else "cuda"
        capability = None if torch.version.hip else (gpu.major, gpu.minor)
        memory = gpu.total_memory
        known = Device(gpu.name, peak, memory, memory_rate, *sizes, source, kind=kind, capability=capability)
    matmul = [(p.format, p.flops, p.seconds) for p in measured.matmul]
    # Two products of a causal half in the forward, five in the backward
    attention = [(p.format, 3.5 * p.flops, p.forward + p.backward) for p in measured.attention]
    rates = Rates(
        matmul=_attained(matmul, known.peak, ranks, Rates.matmul),
        attention=_attained(attention, known.peak, ranks, Rates.attention),
        memory=min(1.0, memory_rate / known.bandwidth),
        launch=measured.launch or Rates.launch,
        link=1.0,  # a link's rate is a measured one
    )
    return replace(known, rates=rates)


def _attained(work: Sequence[Work], peak: Mapping[str, float], ranks: int, default: float) -> float:
    """Attained share of the peak, over the larger half of the products; without any, `default`."""
    large = sorted(work, key=lambda product: product[1])[len(work) // 2 :]
    shares = [ranks * flops / seconds / peak[name] for name, flops, seconds in large if name in peak]
    return min(1.0, geometric_mean(shares)) if shares else default


def host_memory() -> int:
    """Bytes of this host's memory, or of the part that a container or a job may use."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, cgroup.memory_limit() or whole)


def free_memory() -> int:
    """Bytes of this host's memory that processes may still take, caches of files included."""
    lines = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
    whole = host_memory()
    return min(int(lines["MemAvailable"].split()[0]) * 1024, whole) if "MemAvailable" in lines else whole


def _cache() -> int:
    """Bytes of the last level of cache; 0 where the system does not tell."""
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [_text(str(file)).strip() for file in files]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:  # a system without such a file
        return ""
