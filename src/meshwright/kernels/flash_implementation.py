"""The program that computes flash attention on NVIDIA GPUs: torch's own, FlashAttention 2 (Dao 2023), or
that of a package, FlashAttention 3 (Shah et al. 2024) or 4, which torch calls in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.spec import UserError
from meshwright.spec.train import FlashAttention

PACKAGES = {"FA3": ("flash_attn_interface", (9,)), "FA4": ("flash_attn.cute", (9, 10))}
"""Module of a package, and the major compute capabilities that it is for. Source: `_fa3.py` and `_fa4.py` of
torch 2.13."""


@contextmanager
def flash_implementation(name: FlashAttention, device: torch.device) -> Iterator[None]:
    """Block in which flash attention is that of `name`; without effect on a CPU. Raises `UserError`."""
    if name == "FA2" or device.type != "cuda":
        yield
        return
    module, majors = PACKAGES[name]
    major, minor = torch.cuda.get_device_capability(device)
    if major not in majors:
        needed = " or ".join(f"{each}.x" for each in majors)
        raise UserError(
            f"train.flash_attention: {name!r} needs a GPU of compute capability {needed}, and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; take 'FA2'"
        )
    try:  # an older torch has no such functions
        from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError, ValueError) as error:
        raise UserError(
            f"train.flash_attention: torch {torch.__version__} cannot take {name!r} from {module} ({error}); "
            "install that package for this torch, or take 'FA2'"
        ) from error
    try:
        yield
    finally:
        restore_flash_attention_impl()
