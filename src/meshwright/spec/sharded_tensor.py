"""A rectangle of a global tensor: the record on which parameters, buffers and checkpoints build."""

from __future__ import annotations

from dataclasses import dataclass

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) of a part of a tensor, one number per dim."""


def is_matrix(name: str, dims: int) -> bool:
    """True for a parameter of `dims` dims that multiplies, one matrix or one of each expert; norms and biases
    do not, nor those of the experts, which have a vector each."""
    return dims >= 2 and not name.endswith("_bias")


@dataclass(frozen=True)
class ShardedTensor:
    """The part of tensor `key` of shape `global_shape` that begins at `offset` and has `local_shape`.

    The vocabulary is that of Megatron-Core's `dist_checkpointing.ShardedTensor`.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """True if the whole tensor is a parameter that multiplies."""
        return is_matrix(self.key, len(self.global_shape))

    @property
    def rectangle(self) -> Rectangle:
        """(offset, local_shape)."""
        return self.offset, self.local_shape
