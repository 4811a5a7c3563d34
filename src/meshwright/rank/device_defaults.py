"""Keys that a run file leaves open, and that the device decides."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from meshwright.hardware.cluster import DeviceKind
from meshwright.profile.machine import gpus
from meshwright.spec.compiled import COMPILED_ON, is_open, with_compiled_blocks
from meshwright.spec.load import Overrides

COMPUTE = "precision.compute"


def with_device_defaults(
    tree: dict[str, Any], overrides: Overrides, kind: DeviceKind | None = None, ours: bool = True
) -> Overrides:
    """Return the flags, with what the devices decide of keys that are open: `precision.compute = bf16` where
    they have bf16, and `train.compile = true` on CUDA for what `with_compiled_blocks` says.

    `kind` is that of the devices that the run is asked about, of which all but processors have bf16; None
    asks this machine's. On processors these keys stay what the spec says, so that a run file computes the
    same numbers on each. Where the run is not `ours` but another program's, its blocks are that program's.
    """
    bf16 = has_bf16_gpu() if kind is None else kind != "cpu"
    found = [*overrides, (COMPUTE, "bf16")] if bf16 and is_open(COMPUTE, tree, overrides) else overrides
    compiler = has_compiler() if kind is None else kind in COMPILED_ON
    return with_compiled_blocks(tree, found) if compiler and ours else found


def has_bf16_gpu() -> bool:
    """True if the GPUs of this machine multiply in bf16."""
    if not gpus():
        return False
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def has_compiler() -> bool:
    """True if this machine has GPUs and Triton, by which torch compiles for them."""
    return gpus() > 0 and find_spec("triton") is not None
