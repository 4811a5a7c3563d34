"""The machine of a run, as its record tells it."""

from __future__ import annotations

import socket
from typing import Any

import torch

from meshwright.host import cores
from meshwright.profile.machine import processor
from meshwright.rank.env import worker
from meshwright.rank.gpu import bound_node


def machine(device: torch.device) -> dict[str, Any]:
    """Return this rank's host, its processor, the cores that it may use, its GPU with the NUMA node that the
    rank is bound to, and the run's hosts."""
    place, on_gpu = worker(), device.type == "cuda"
    return {
        "host": socket.gethostname(),
        "hosts": -(-place.world_size // place.local_world_size) if place else 1,
        "processor": processor(),
        "cores": cores(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "numa_node": bound_node(device) if on_gpu else None,
    }
