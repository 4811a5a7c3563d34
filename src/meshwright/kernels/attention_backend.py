"""The kernels that `hardware/attention_backend.py` chooses, made those that torch calls.

FlashAttention 3 (Shah et al. 2024) and 4 are packages that torch calls in the place of its own release 2; the
kernel of scaled dot-product attention follows from what is switched on and in which order of preference.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.hardware.attention_backend import (
    NATIVE,
    AttentionBackend,
    AttentionBackends,
    AttentionGpu,
    attention_backends,
    check_release,
)
from meshwright.spec import RunSpec, UserError

PACKAGES: dict[AttentionBackend, str] = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
"""Release -> the module of its package. Source: `_fa3.py` and `_fa4.py` of torch 2.13."""
_CUDNN = 91501
"""The oldest release of cuDNN whose attention is right for every length, as `torch.backends.cudnn` has it."""


@contextmanager
def attention_backend(spec: RunSpec, device: torch.device) -> Iterator[AttentionBackends]:
    """Block in which attention is computed by the kernels of the run, which it gives.

    Raises `UserError` for one that `train.attention_backend` asks for and this machine does not have.
    """
    if device.type != "cuda":
        yield attention_backends(spec, None)
        return
    release = _release(spec, device)
    packages = frozenset({release} if release else ())
    found = attention_backends(spec, _gpu(device, packages))
    if found.flash != release:  # it does not take the run's heads
        release = None
    optional = spec.train.attention_backend != release
    restore = None if release is None else _activated(release, optional)
    if release is not None and restore is None:
        found = attention_backends(spec, _gpu(device, frozenset()))
    try:
        with preferred(found):
            yield found
    finally:
        if restore is not None:
            restore()


def backends_in_use(spec: RunSpec, device: torch.device) -> AttentionBackends:
    """The kernels of a run in a block of `attention_backend`, for its record."""
    if device.type != "cuda":
        return attention_backends(spec, None)
    packages: frozenset[str] = frozenset()
    with suppress(ImportError):  # an older torch has no such function
        from torch.nn.attention import current_flash_attention_impl

        packages = frozenset({current_flash_attention_impl() or "FA2"})
    return attention_backends(spec, _gpu(device, packages))


@contextmanager
def preferred(backends: AttentionBackends) -> Iterator[None]:
    """Block in which scaled dot-product attention prefers the kernel of whole sequences, as torch has them.

    cuDNN's is switched off where it is not chosen, since by itself torch would prefer it on some devices.
    """
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if backends.plain == "cudnn":
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    with sdpa_kernel(order, set_priority=True):
        yield


def _gpu(device: torch.device, packages: frozenset[str]) -> AttentionGpu:
    if torch.version.hip:  # the release 2 of ROCm, on every device that it supports
        return AttentionGpu((8, 0), cudnn=False)
    version = torch.backends.cudnn.version() or 0
    return AttentionGpu(torch.cuda.get_device_capability(device), packages, version >= _CUDNN)


def _release(spec: RunSpec, device: torch.device) -> AttentionBackend | None:
    """The release of FlashAttention that the run takes from a package, if any. Raises `UserError`."""
    chosen, capability = spec.train.attention_backend, torch.cuda.get_device_capability(device)
    if chosen == "FA3" or chosen == "FA4":
        check_release(chosen, capability, torch.cuda.get_device_name(device))
        return chosen
    native = None if chosen == "FA2" or torch.version.hip else NATIVE.get(capability[0])
    return native if native is not None and _is_installed(PACKAGES[native]) else None


def _is_installed(module: str) -> bool:
    """True if there is such a module; one whose parent cannot be imported counts as absent."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _activated(release: AttentionBackend, optional: bool) -> Callable[[], None] | None:
    """Let torch call a release; returns what undoes that.

    Where that fails, an `optional` one is told in a warning, and None returned. Raises `UserError`.
    """
    try:  # an older torch has no such functions
        from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

        activate_flash_attention_impl(release)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = f"torch {torch.__version__} cannot take {release!r} from {PACKAGES[release]} ({error})"
        if not optional:
            raise UserError(
                f"train.attention_backend: {reason}; install that package for this torch, or take 'auto'"
            ) from error
        warnings.warn(f"{reason}; attention takes FlashAttention 2", stacklevel=2)
        return None
    return restore_flash_attention_impl
