"""Facts of the machine and of its software."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_day.devices import device_here
from gpu_day.results import Work
from meshwright.host import cores
from meshwright.version import commit

PACKAGES = (
    "pydantic", "pyyaml", "jinja2", "rich", "safetensors", "tokenizers", "fsspec", "numpy", "triton",
    "pytest", "hypothesis", "flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cudnn-frontend", "torchao",
    "transformer-engine",
)  # fmt: skip
"""Packages that decide what can run; those that are missing are told as such."""


def lacks_gpu() -> str:
    """A sentence if torch finds no GPU on this machine; "" if it does."""
    import torch

    if torch.cuda.is_available():
        return ""
    return (
        f"--device: is cuda, and torch {torch.__version__} finds no GPU on this machine; run it on one that "
        "has GPUs, or give --device fake"
    )


def run(work: Work) -> None:
    """Add a row for each fact; one that cannot be had is a row with the reason."""
    import torch

    device = device_here()
    properties = torch.cuda.get_device_properties(device)
    facts: dict[str, Callable[[], Any]] = {
        "GPUs": lambda: torch.cuda.device_count() if not work.faked else work.task.gpus,
        "GPU": lambda: torch.cuda.get_device_name(device),
        "compute capability": lambda: "{}.{}".format(*torch.cuda.get_device_capability(device)),
        "memory of a GPU, bytes": lambda: properties.total_memory,
        "multiprocessors": lambda: properties.multi_processor_count,
        "torch": lambda: torch.__version__,
        "CUDA of torch": lambda: torch.version.cuda,
        "driver": lambda: _driver(),
        "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())),
        "cuDNN": lambda: torch.backends.cudnn.version(),
        "Python": lambda: sys.version.split()[0],
        "system": platform.platform,
        "cores": cores,
        "commit": lambda: commit(),
        "nvidia-smi": lambda: _smi("name,driver_version,memory.total,clocks.max.sm,power.limit"),
    }
    for name, ask in facts.items():
        work.attempt({"fact": name}, lambda ask=ask: {"value": ask()})
    for name in PACKAGES:
        work.add({"fact": f"package {name}", "value": _version(name)})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    kernel_module = Path("/proc/driver/nvidia/version")
    if kernel_module.exists():
        return kernel_module.read_text(encoding="utf-8").splitlines()[0]
    return _smi("driver_version")


def _smi(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return "; ".join(asked.stdout.strip().splitlines())
