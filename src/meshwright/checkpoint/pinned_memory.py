"""Memory of the host that a GPU copies from and to directly: pages that the system must not move.

Where the memory is not torch's own, such as a slot of a snapshot, CUDA is told of it. Else each copy passes
through a buffer of the driver's, and the host waits for it.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from meshwright.units import gigabytes


def pin(memory: Tensor) -> str:
    """Pin host memory (bytes,) that torch has not allocated; returns "", or why it stays as it was."""
    cudart = torch.cuda.cudart()
    status = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) == 0:
        return ""
    with suppress(RuntimeError):  # CUDA keeps the error for the next launch, which would raise it
        torch.zeros(1, device="cuda")
    return (
        f"{gigabytes(memory.numel())} for snapshots were not pinned (cudaHostRegister: "
        f"{cudart.cudaGetErrorString(status)}), so copies from the GPU take longer and hold up training; "
        f"raise the limit of locked memory (ulimit -l unlimited; LimitMEMLOCK of a service) and start again"
    )


def unpin(memory: Tensor) -> None:
    """Undo `pin`, before the memory is unmapped or mapped anew."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
