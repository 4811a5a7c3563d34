"""The world of a benchmark's processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.mesh import build_mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer


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


def trainer_of(spec: RunSpec, device: torch.device) -> tuple[Trainer, Batch]:
    """A trainer of a lone rank with initial weights, and the first batch of the run's corpus."""
    mesh = build_mesh(spec.layout, device)
    assert mesh is not None
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    loader = Loader(open_corpus(spec), spec, 0, 1)
    batch = loader.step(0)
    loader.close()
    return trainer, batch
