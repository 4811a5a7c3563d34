"""Model FLOPs utilisation (MFU): the share of devices' FLOP/s that the model takes (Chowdhery et al. 2022).

For T tokens/s, N weights that a token is multiplied by, L layers of H heads of d channels and S tokens of a
sequence, in one of two conventions and against one of two rates:

    customary  (6 N + 12 L H d S) T / rate    attention counts all keys, as PaLM and torchtitan do
    causal     (6 N +  6 L H d S) T / rate    it counts those that the causal mask leaves

The first rate is that of a large matrix product which this machine has been seen to reach, the second the
dense peak of the datasheet, by which runs of different machines and programs are compared. Sliding windows,
frozen parameters and forwards of other models are counted as `spec/training_flops.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.hardware.catalogue import cluster_of_gpu
from meshwright.parallel.step_part import StepPart
from meshwright.planner.cost.kernels import peak
from meshwright.spec import RunSpec
from meshwright.spec.training_flops import flops_per_token


def datasheet_flops_per_second(device: torch.device, format: str) -> float | None:
    """Dense peak in FLOP/s of a GPU for products of a format, by the catalogue; None for others and CPUs.

    A format that the device has no peak for counts as in plans: fp32 as tf32, fp8 as bf16.
    """
    known = cluster_of_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if known is None else peak(known.device, format)


def shares_of_rates(
    spec: RunSpec,
    parts: Sequence[StepPart],
    tokens_per_second: float,
    measured: float,
    datasheet: float | None,
) -> dict[str, float]:
    """The MFU of a run by the names of its record: `mfu` is customary, against the `measured` FLOP/s of all
    ranks; `mfu_datasheet` and `causal_mfu_datasheet`, where their peak is known, are against that."""
    beside = sum(part.flops_per_token() for part in parts)
    whole, causal = (
        (flops_per_token(spec, causal=causal) + beside) * tokens_per_second for causal in (False, True)
    )
    found = {"mfu": whole / measured}
    if datasheet is not None:
        found |= {"mfu_datasheet": whole / datasheet, "causal_mfu_datasheet": causal / datasheet}
    return found
