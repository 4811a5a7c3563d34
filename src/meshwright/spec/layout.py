"""The layout: how many ways each axis of the mesh splits the work."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.spec.base import Part

ContextMode = Literal["ring", "ulysses", "gather", "ring+ulysses"]


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
