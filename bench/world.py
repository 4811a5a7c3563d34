"""The world of a benchmark's processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def join(device_type: str, store: str, rank: int, ranks: int) -> torch.device:
    """The device of one rank of `ranks` that meet at the file `store`: gloo on a CPU, NCCL on CUDA."""
    shared: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": ranks}
    if device_type == "cpu":
        dist.init_process_group("gloo", **shared)
        return torch.device("cpu")
    device = torch.device(device_type, rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **shared)
    return device
