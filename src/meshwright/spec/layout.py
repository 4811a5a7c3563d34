"""The layout: how many ways each axis of the mesh splits the work."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.spec.base import Part

ContextMode = Literal["ring", "ulysses", "gather", "ring+ulysses"]


def ulysses_ranks(ranks: int, kv_heads: int, mode: ContextMode) -> int:
    """How many context ranks exchange tokens for heads; the others of `ranks` form rings.

    All of them in mode 'ulysses', none in 'ring' and 'gather'. In 'ring+ulysses' the most that divide both
    ranks and key-value heads and leave some to the ring; a prime number of ranks goes to one of the two.
    """
    if mode != "ring+ulysses":
        return ranks if mode == "ulysses" else 1
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    proper = divisors if len(divisors) <= 2 else divisors[:-1]
    return max(size for size in proper if kv_heads % size == 0)


class Layout(Part):
    """Sizes of the mesh's axes. World size = replicate x dp x cp x tp x pp; experts fold into dp x cp."""

    dp: int = Field(1, ge=1, description="data-parallel ranks; ZeRO shards over dp x cp")
    replicate: int = Field(1, ge=1, description="copies of the ZeRO-sharded group (hybrid sharding)")
    zero: Literal[0, 1, 2, 3] = Field(
        0,
        description="ZeRO stage: 0 replicates, 1 shards optimiser states, 2 gradients too, 3 parameters too",
    )
    tp: int = Field(1, ge=1, description="tensor-parallel ranks")
    sequence_parallel: bool = Field(True, description="shard the residual stream over tp between its regions")
    cp: int = Field(1, ge=1, description="context-parallel ranks")
    context_mode: ContextMode = Field("ring", description="how attention crosses the context axis")
    pp: int = Field(1, ge=1, description="pipeline stages' ranks")
    virtual: int = Field(1, ge=1, description="virtual stages per pipeline rank")
    schedule: str = Field("1f1b", description="pipeline schedule")
    ep: int = Field(1, ge=1, description="expert-parallel ranks, folded out of dp x cp")
    micro_batch: int | None = Field(
        None, ge=1, description="sequences in one microbatch of one rank; by default, all that fit"
    )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.dp * self.cp * self.tp * self.pp

    def kv_copies(self, kv_heads: int) -> int:
        """Tensor ranks that hold the same key-value head."""
        return max(1, self.tp // kv_heads)

    def ulysses(self, kv_heads: int) -> int:
        """Context ranks that exchange tokens for heads, for a model with `kv_heads`."""
        return ulysses_ranks(self.cp, self.local_kv_heads(kv_heads), self.context_mode)

    def local_kv_heads(self, kv_heads: int) -> int:
        """Key-value heads that one tensor rank computes."""
        return max(1, kv_heads // self.tp)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different samples."""
        return self.replicate * self.dp

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that ZeRO shards states over."""
        return self.dp * self.cp

    def describe(self) -> str:
        """One line: the axes larger than one, for messages and tables."""
        sizes = {name: getattr(self, name) for name in ("replicate", "dp", "cp", "tp", "pp", "ep")}
        shown = [f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "dp"]
        return " x ".join(shown) + f", zero={self.zero}"
