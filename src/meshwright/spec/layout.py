"""The layout: how many ways each axis of the mesh splits the work."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, field_validator

from meshwright.spec.arithmetic import divisors
from meshwright.spec.base import MAX_RANKS, FrozenModel
from meshwright.spec.errors import UserError
from meshwright.spec.pipeline_schedules import DEFAULT_SCHEDULE, SCHEDULES, ScheduleName
from meshwright.spec.records import show

ContextMode = Literal["ring", "ulysses", "gather", "ring+ulysses"]

Cut = Literal["even", "balanced"]
GENERATION_KEYS = tuple(f"layout.{name}" for name in ("dp", "tp", "pp", "ep", "etp", "stages", "order"))
"""Keys that generation takes."""

Order = Literal["pp-replicate-dp-tp", "replicate-pp-dp-tp", "replicate-dp-pp-tp"]
"""Order of the axes in the numbers of ranks, outermost first; cp is inside dp."""


def ulysses_ranks(ranks: int, kv_heads: int, mode: ContextMode) -> int:
    """Return how many context ranks exchange tokens for heads; the others of `ranks` form rings.

    That is all ranks in mode 'ulysses' and one in 'ring' and 'gather'. In 'ring+ulysses' it is the largest
    proper divisor of `ranks` that divides the key-value heads; a prime number of ranks goes to one of these.
    """
    if mode != "ring+ulysses":
        return ranks if mode == "ulysses" else 1
    sizes = divisors(ranks)
    proper = sizes[:-1] if len(sizes) > 2 else sizes
    return max(size for size in proper if kv_heads % size == 0)


class Layout(FrozenModel):
    """Sizes of the mesh's axes. World size = replicate x dp x cp x tp x pp; ep x etp folds into it."""

    dp: int = Field(1, ge=1, le=MAX_RANKS, description="data-parallel ranks; ZeRO shards over dp x cp")
    replicate: int = Field(
        1, ge=1, le=MAX_RANKS, description="copies of the ZeRO-sharded group (hybrid sharding)"
    )
    zero: Literal[0, 1, 2, 3] = Field(
        0,
        description="ZeRO stage: 0 replicates, 1 shards optimiser states, 2 gradients too, 3 parameters too",
    )
    tp: int = Field(1, ge=1, le=MAX_RANKS, description="tensor-parallel ranks")
    sequence_parallel: bool = Field(True, description="shard the residual stream over tp between its regions")
    cp: int = Field(1, ge=1, le=MAX_RANKS, description="context-parallel ranks")
    context_mode: ContextMode = Field("ring", description="how attention crosses the context axis")
    pp: int = Field(1, ge=1, le=MAX_RANKS, description="pipeline ranks, each with some of the layers")
    virtual: int | None = Field(
        None,
        ge=1,
        description="stages of each pipeline rank; by default what the schedule needs: 1, or 2 for "
        "interleaved, bfs and those in a V",
    )
    schedule: ScheduleName = Field(
        DEFAULT_SCHEDULE,
        description="pipeline schedule; by default 1f1b for blocks that are compiled or recomputed",
    )
    stages: Cut | tuple[NonNegativeInt, ...] = Field(
        "balanced",
        description="blocks of the stages: as equal as can be, balanced by FLOPs with the head's, or a "
        "number for each of the pp x virtual stages: 3,5",
    )
    ep: int = Field(1, ge=1, le=MAX_RANKS, description="expert-parallel ranks, folded out of dp x cp x tp")
    etp: int = Field(
        1, ge=1, le=MAX_RANKS, description="ranks that share each expert's channels, folded likewise"
    )
    expert_parts: int = Field(
        1, ge=1, description="parts of a microbatch of which one is sent to the experts as another computes"
    )
    expert_buffer_factor: float | None = Field(
        None,
        ge=1,
        description="most rows that an expert rank sends to another, in even shares, so that no dispatch "
        "waits for their number; a step in which more are due is computed again without; by default none",
    )
    order: Order = Field(
        "pp-replicate-dp-tp",
        description="axes from the outermost to the innermost, whose ranks are neighbours; cp is inside dp",
    )
    micro_batch: int | None = Field(
        None,
        ge=1,
        description="sequences in one microbatch of one rank; by default the most that share the rank's "
        "evenly, within 8,192 tokens, and in a pipeline leave 2 x pp microbatches",
    )

    @field_validator("stages", mode="before")
    @classmethod
    def _cut(cls, given: Any) -> Any:
        """Raise one sentence for a value that is neither a cut nor a list; a flag gives numbers as text."""
        if given in ("even", "balanced"):
            return given
        items = [_whole(item) for item in given] if isinstance(given, (list, tuple)) else [None]
        if None not in items:
            return tuple(items)
        raise UserError(
            f"layout.stages: {show(given)} is not valid: it should be 'even', 'balanced', or a list of the "
            f"blocks in each stage, such as [3, 5] or, as a flag, 3,5"
        )

    @property
    def chunks(self) -> int:
        """Stages of each pipeline rank: `virtual`, or as many as the schedule needs; 1 without a pipeline."""
        if self.pp == 1:
            return 1
        if self.virtual is not None:
            return self.virtual
        return SCHEDULES[self.schedule].stages or 2

    @property
    def axes_in_order(self) -> tuple[tuple[str, int], ...]:
        """(axis, ranks), the outermost first: 'pp', 'replicate', 'dp' (with cp inside it) and 'tp'."""
        sizes = {"pp": self.pp, "replicate": self.replicate, "dp": self.shard_ranks, "tp": self.tp}
        return tuple((name, sizes[name]) for name in self.order.split("-"))

    @property
    def strides(self) -> dict[str, int]:
        """Difference of the numbers of neighbouring ranks on each axis of `axes_in_order`."""
        strides, step = {}, 1
        for name, size in reversed(self.axes_in_order):
            strides[name] = step
            step *= size
        return strides

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
    def splits_backward(self) -> bool:
        """True if the schedule of a pipeline defers gradients of weights."""
        return self.pp > 1 and SCHEDULES[self.schedule].splits

    def shards(self, trainable: bool) -> bool:
        """True if the ranks of the shard axis share the storage of parameters that are `trainable`, or not.

        ZeRO-1 and 2 share what belongs to updates, of which parameters that are not trained have nothing.
        """
        return self.zero == 3 or (self.zero > 0 and trainable)

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that ZeRO shards states over."""
        return self.dp * self.cp

    @property
    def expert_ranks(self) -> int:
        """Number of ranks of one stage and replica, which the expert axis is folded out of."""
        return self.dp * self.cp * self.tp

    @property
    def bounds_dispatch(self) -> bool:
        """True if messages to experts have a size of their own, whatever the routing."""
        return self.expert_buffer_factor is not None and self.ep * self.etp > 1

    @property
    def remark(self) -> str:
        """A sentence on a key that has no effect with the others; "" if there is none."""
        if self.expert_buffer_factor is None or self.bounds_dispatch:
            return ""
        return (
            f"layout.expert_buffer_factor: {self.expert_buffer_factor:g} has no effect, as with layout.ep = "
            f"1 and layout.etp = 1 no rank sends to experts of another; leave it out, or give layout.ep"
        )

    @property
    def expert_data_ranks(self) -> int:
        """Number of ranks that hold the same experts, and that ZeRO shards their states over."""
        return self.expert_ranks // (self.ep * self.etp)

    def describe(self) -> str:
        """One line: the axes larger than one, for messages and tables."""
        sizes = {name: getattr(self, name) for name in ("replicate", "dp", "cp", "tp", "pp", "ep", "etp")}
        shown = [f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "dp"]
        placed = "" if self.order == "pp-replicate-dp-tp" else f", order={self.order}"
        pipeline = f", schedule={self.schedule}" if self.pp > 1 else ""
        pipeline += f", virtual={self.chunks}" if self.chunks > 1 else ""
        return " x ".join(shown) + f", zero={self.zero}{pipeline}{placed}"


def _whole(item: Any) -> int | None:
    """Return a whole number of at least 0, which may be given as text; None for anything else."""
    if isinstance(item, str) and item.isascii() and item.isdecimal() and len(item) < 10:
        return int(item)
    return item if isinstance(item, int) and not isinstance(item, bool) and item >= 0 else None
