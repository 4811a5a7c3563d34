"""Software stacks: training programs, with the properties that change the time or memory of a layout.

The figures are in `stacks.toml`, each table with its source or the runs that it was fitted on.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from meshwright.hardware.sourced import read_tables
from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.records import Count, Integer, NotNegative, Record


@dataclass(frozen=True)
class Recipe(Record):
    """Bytes per parameter of the training states in mixed precision, and the ZeRO stage that shards each."""

    copy: Integer
    """Copy that computes, whole below ZeRO-3; 0 where shards are cast as they are gathered."""
    gradient: Integer
    """Gradient, whole below ZeRO-2."""
    optimiser: Integer
    """Master copy and both moments, whole at ZeRO-0."""
    wide: Integer
    """Extra bytes per gradient when computing in bf16, for the fp32 accumulator."""


@dataclass(frozen=True)
class SoftwareStack(Record):
    """A training program; seconds, bytes and shares as `stacks.toml` has them."""

    name: str
    describes: str
    fused_attention: bool
    """Attention stores no score matrix (Dao et al. 2022, FlashAttention)."""
    elementwise: NotNegative
    """Bytes that norms, activations, residuals and copies move, as a multiple of one fused pass each."""
    dropout: bool
    """Hidden states and attention scores have dropout, whose masks are kept."""
    launch: NotNegative
    """Host seconds per operator of a block; a faster device waits for the host."""
    blocking: bool
    """The host waits for each operator before it launches the next, so that launch times add up."""
    native_attention: bool
    """The attention kernels are written for the device's generation."""
    by_tensor: bool
    """Gradients and parameters are communicated tensor by tensor over the data axis, not in buckets."""
    step: NotNegative
    """Seconds of a step outside operators: the data loader, loss scaling, agreement between hosts."""
    overlap_data: NotNegative
    """Share of the data axis's communication that can overlap the backward (at ZeRO-3 also the forward)."""
    overlap_gather_parameters: NotNegative
    """Share of the parameter all-gathers of ZeRO-1 and 2 that can overlap the forward."""
    contention: NotNegative
    """Seconds that compute loses per second of overlapped collective."""
    overlap_gather: NotNegative
    """Share of the tensor axis's all-gathers in the backward that overlap the input-gradient products."""
    overlap_expert: NotNegative
    """Share of the expert axis's communication that overlaps other compute."""
    selective: Literal["attention", "half", "elementwise"]
    """Operators that selective recomputation repeats: attention, half the products, or elementwise ones."""
    cast_bytes: NotNegative
    """Bytes moved to cast one element to fp8, scales included."""
    overlap_tensor: NotNegative
    """Share of the tensor axis's communication that overlaps matrix products."""
    overlap_pipeline: bool
    """True if messages between pipeline stages overlap compute."""
    scatter_pipeline: bool
    """Tensor ranks send a slice each between stages, and gather it there (Narayanan et al. 2021, 4.1)."""
    gradient_bytes: Count
    """Bytes per gradient as it is reduced over the data axis."""
    gather_bytes: Count
    """Bytes per parameter as ZeRO gathers it."""
    network: NotNegative
    """Share of a node's network bandwidth that collectives over the data axis attain."""
    flat_rings: bool
    """A group's ring enters each node through one interface, even if several members are in the node."""
    recipe: Recipe
    """Bytes of the training states."""
    kept: NotNegative
    """Activation bytes kept for the backward, as a multiple of the operators' inputs."""
    unit: NotNegative
    """Share of a block's parameters that ZeRO-3 gathers at a time."""
    logits: NotNegative
    """Bytes per logit at the peak of the loss, wider copies and gradients included."""
    whole_gradients: bool
    """In a pipeline, gradients stay unsharded from microbatch to microbatch at any ZeRO stage."""
    fragmentation: NotNegative
    """Bytes that the allocator reserves beyond the allocated ones, as a share of these."""
    habitual_zero: Integer
    """ZeRO stage to assume where a published run does not state it."""
    habitual_sequence_parallel: bool
    """Sequence parallelism to assume where a published run does not state it."""
    microbatches_are_stages: bool
    """Assume as many microbatches as pipeline ranks where a published run does not state them."""
    tuned: Literal["no", "always", "untold"]
    """When to assume tuned virtual stages where a published run does not state them: never, always, or if it
    does not state its microbatch size either."""
    matmul: NotNegative
    """Further factor on the device's attained rate of matrix products."""
    host: NotNegative
    """Host work per operator of a block (Python, autograd, views), in measured launches of a bare operator. 0
    where `launch` has it in seconds."""
    ends: NotNegative
    """Operators per microbatch outside blocks, launched one by one."""
    packed: NotNegative
    """Bytes moved per parameter and microbatch to lay out its gradient."""
    unpacked: NotNegative
    """Bytes moved per parameter to lay it out after a gather."""
    own: bool
    """This program's own messages are counted call by call (`planner/traffic/messages.py`), and
    parameters are gathered in the compute format."""
    agreements: Integer
    """All-reduces of single numbers over all ranks per step."""

    @property
    def ours(self) -> bool:
        """True for this program, on any device."""
        return self.name.startswith("meshwright")


_DATA = Path(__file__).parent / "stacks.toml"
STACKS = read_tables(SoftwareStack, tomllib.loads(_DATA.read_text(encoding="utf-8")), f"{_DATA.name}: ")
MESHWRIGHT, MESHWRIGHT_ON_CPU = STACKS["meshwright"], STACKS["meshwright-cpu"]


def stack_named(name: str) -> SoftwareStack:
    """The software stack of this name. Raises `UserError`."""
    if name not in STACKS:
        hint = did_you_mean(name, STACKS) or f"; they are {', '.join(STACKS)}"
        raise UserError(f"--stack: there is no stack '{name}'{hint}")
    return STACKS[name]
