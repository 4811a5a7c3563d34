"""Initial weights as a function of (seed, parameter name, element index), and of nothing else.

Each parameter has its own counter-based stream (Salmon et al. 2011, "parallel random numbers: as easy as
1, 2, 3"): a 64-bit key hashed from seed and name, mixed with the element's index in the whole parameter by
splitmix64's finaliser (Steele et al. 2014), and mapped to a normal by the inverse of its distribution in
float64. A shard draws just the elements that it holds, wherever they are, and no layout changes a bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.splitmix64 import mix64_, shift, stream
from meshwright.model.decoder import Decoder
from meshwright.spec import ModelSpec
from meshwright.spec.lora import LORA_A, LORA_B, MAGNITUDE
from meshwright.spec.mup import init_factor
from meshwright.spec.tiling import tiling


class InitValue(NamedTuple):
    """How a parameter starts: normal with this mean and standard deviation, or constant where `std` is 0."""

    mean: float
    std: float


def init_value(spec: ModelSpec, name: str) -> InitValue:
    """The initial value of the parameter `name` (as in `Decoder.named_parameters`).

    Norms multiply by one, biases are zero, the rest N(0, init_std). The projections that write to the
    residual stream (attn.o, every down) are divided by sqrt(2 * layers), so that its variance does not grow
    with depth (Radford et al. 2019, GPT-2, §2.3). An adapter's B is zero, so that it adds nothing at first;
    its A is drawn by `init_part_`, and its magnitudes, here one, follow from weights (`train/magnitudes.py`).
    muP makes those of wider models smaller (`spec/mup.py`).
    """
    *path, leaf = name.split(".")
    if leaf.endswith("bias") or name.endswith(LORA_B):
        return InitValue(0.0, 0.0)
    if name.endswith(MAGNITUDE):
        return InitValue(1.0, 0.0)
    if path[-1].endswith("norm"):
        return InitValue(0.0 if spec.norm_unit_offset else 1.0, 0.0)
    std = spec.init_std * init_factor(spec, name)
    if path[-2:] == ["attn", "o"] or "down" in (path[-1], leaf):
        return InitValue(0.0, std / math.sqrt(2 * spec.layers))
    return InitValue(0.0, std)


def fill_(
    local: Tensor, *, seed: int, name: str, index_vectors: list[Tensor], shape: torch.Size, std: float
) -> Tensor:
    """Draw N(0, std) into `local`, the part of parameter `name` (of the whole `shape`) at these indices.

    `index_vectors[dim]` (local.shape[dim],) int64 holds the global indices along `dim` that `local` has. The
    same element has the same value in every part, on every device and in every layout. Returns `local`.
    """
    return _fill_(local, seed, name, index_vectors, shape, lambda uniform: _normal(uniform).mul_(std))


def fill_uniform_(
    local: Tensor, *, seed: int, name: str, index_vectors: list[Tensor], shape: torch.Size, bound: float
) -> Tensor:
    """Draw from the uniform distribution on (-bound, bound), with arguments as in `fill_`."""
    return _fill_(
        local, seed, name, index_vectors, shape, lambda uniform: uniform.mul_(2).sub_(1).mul_(bound)
    )


def _fill_(
    local: Tensor,
    seed: int,
    name: str,
    index_vectors: list[Tensor],
    shape: torch.Size,
    drawn: Callable[[Tensor], Tensor],
) -> Tensor:
    """Fill `local` with what `drawn` makes of uniform numbers in (0, 1)."""
    if local.shape != torch.Size(len(vector) for vector in index_vectors) or local.dim() != len(shape):
        raise ValueError(
            f"{name}: a part of shape {tuple(local.shape)} of {tuple(shape)} does not fit its indices"
        )
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    with torch.no_grad():
        for rows, index in flat_indices(index_vectors, shape, local.device):
            local[rows] = drawn(_uniform(index, key))
    return local


def flat_indices(
    index_vectors: Sequence[Tensor], shape: Sequence[int], device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, int64 index of each of their elements in the whole flattened) of a part, a chunk at a time.

    `index_vectors` are the indices of the part along each dim of the whole `shape`.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first, *rest = (
        vector.to(device=device, dtype=torch.int64) * stride
        for vector, stride in zip(index_vectors, strides, strict=True)
    )
    within = torch.zeros((), dtype=torch.int64, device=device)
    for offsets in rest:
        within = within.unsqueeze(-1) + offsets
    count = max(1, tiling().init_elements // max(1, within.numel()))
    for start in range(0, len(first), count):
        rows = slice(start, start + count)
        yield rows, first[rows].view(-1, *[1] * within.dim()) + within


def init_whole_(decoder: Decoder, seed: int) -> Decoder:
    """Fill every parameter of a decoder that lies on one device; returns it."""
    for name, parameter in decoder.named_parameters():
        whole, shape = parameter.data, parameter.shape
        indices = [torch.arange(size, device=whole.device) for size in shape]
        init_part_(whole, decoder.spec, seed=seed, name=name, index_vectors=indices, shape=shape)
    return decoder


def init_part_(
    local: Tensor, spec: ModelSpec, *, seed: int, name: str, index_vectors: list[Tensor], shape: torch.Size
) -> None:
    """Fill a part of the parameter `name` as `init_value` says; arguments as in `fill_`."""
    if name.endswith(LORA_A):  # as in PEFT; kaiming_uniform_ with a = sqrt(5) has this bound
        bound = shape[-1] ** -0.5
        fill_uniform_(local, seed=seed, name=name, index_vectors=index_vectors, shape=shape, bound=bound)
        return
    value = init_value(spec, name)
    if value.std:
        fill_(local, seed=seed, name=name, index_vectors=index_vectors, shape=shape, std=value.std)
    else:
        local.fill_(value.mean)


def _uniform(index: Tensor, key: int) -> Tensor:
    """Numbers between 0 and 1 in float64, one for each int64 index."""
    bits = mix64_(stream(index, key))
    # 53 bits make a float64 exactly; the half keeps it off 0 and 1, where the normal's inverse is infinite.
    return shift(bits, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)


def _normal(uniform: Tensor) -> Tensor:
    """Standard normals, one for each number between 0 and 1."""
    return torch.special.ndtri(uniform.clamp_(max=1 - 2.0**-53))
