"""Keys that a run file leaves open, and that the device decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.profile.machine import gpus
from meshwright.spec.load import Overrides

COMPUTE = "precision.compute"


def is_open(key: str, tree: Mapping[str, Any], overrides: Overrides) -> bool:
    """True if neither the run file's tables nor the flags give a dotted key of a table."""
    table, name = key.split(".")
    given = tree.get(table)
    return key not in dict(overrides) and not (isinstance(given, Mapping) and name in given)


def with_device_defaults(
    tree: Mapping[str, Any], overrides: Overrides, bf16: bool | None = None
) -> Overrides:
    """Return the flags, with `precision.compute = bf16` where it is open and the devices have bf16.

    `bf16` says whether they have; None asks this machine's GPUs. On processors the format stays what the
    spec says, fp32, so that a run file computes the same numbers on each.
    """
    if is_open(COMPUTE, tree, overrides) and (has_bf16_gpu() if bf16 is None else bf16):
        return [*overrides, (COMPUTE, "bf16")]
    return overrides


def has_bf16_gpu() -> bool:
    """True if the GPUs of this machine multiply in bf16."""
    if not gpus():
        return False
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)
