"""Software stacks: training programs, with the properties that change the time or memory of a layout.

The figures are in `stacks.toml`, each table with its source or the runs that it was fitted on.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from meshwright.hardware.attention_backend import AttentionBackend
from meshwright.hardware.sourced import read_tables
from meshwright.planner.cost.remat import Remat
from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.records import Count, Integer, NotNegative, Record

Operators = Literal["unfused", "copying", "eager", "fused", "compiled"]
Hosting = Literal["modules", "eager", "compiled", "graphs"]
Attention = Literal["unfused", "flash1", "flash2", "flash3", "flash4", "cudnn"]
KERNELS: Mapping[AttentionBackend, Attention] = {
    "cudnn": "cudnn", "FA2": "flash2", "FA3": "flash3", "FA4": "flash4", "efficient": "flash1",
    "math": "unfused", "tiles": "unfused", "cpu": "flash2",
}  # fmt: skip
"""The kernels that this program chooses, by the names that stacks have for them."""
Loss = Literal["unfused", "fused", "compiled", "chunked"]
Overlapped = Literal["data", "parameters", "tensor", "expert", "pipeline"]


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
class Numbers(Record):
    """Numbers of the kinds of programs, the same for all programs of a kind; seconds, bytes and shares."""

    elementwise: Mapping[Operators, NotNegative]
    """Bytes that norms, activations, residuals and copies move, as a multiple of one fused pass each."""
    launch: Mapping[Hosting, NotNegative]
    """Host seconds per operator of a block; a faster device waits for the host."""
    logits: Mapping[Loss, NotNegative]
    """Bytes per logit at the peak of the loss, wider copies and gradients included."""
    overlap: Mapping[str, NotNegative]
    """Share of the messages of an axis that can overlap compute."""
    contention: NotNegative
    """Seconds that compute loses per second of overlapped collective."""
    step: NotNegative
    """Seconds of a step outside operators: the data loader, loss scaling, agreement between hosts."""
    fragmentation: NotNegative
    """Bytes that the allocator reserves beyond the allocated ones, as a share of these."""


@dataclass(frozen=True)
class SoftwareStack(Record):
    """A training program, in kinds, and the numbers of these; `stacks.toml` has both."""

    name: str
    describes: str
    numbers: Numbers
    operators: Operators
    """Memory-bound operators: unfused, with dropout between them (2021), eager with queries, keys and values
    laid out anew around attention (copying), eager, fused, or compiled."""
    hosting: Hosting
    """How the host launches operators: through modules that do more in Python, eager PyTorch, compiled
    blocks, or CUDA graphs that are replayed."""
    loss: Loss
    """The loss keeps wider copies of the logits, is fused, is compiled to keep their gradient alone beside
    them, or computes them in chunks."""
    attention: Attention
    """Attention's kernels: a release of FlashAttention (Dao et al. 2022), or cuDNN's, which are written for
    each device; unfused attention stores its scores."""
    overlaps: tuple[Overlapped, ...]
    """Messages that overlap compute: gradients and ZeRO-3's parameters ('data'), the all-gathers of ZeRO-1
    and 2 ('parameters'), those of the tensor and the expert axis, and those between stages."""
    dropout: bool
    """Hidden states and attention scores have dropout, whose masks are kept."""
    blocking: bool
    """The host waits for each operator before it launches the next, so that launch times add up."""
    blocking_experts: bool
    """The host waits for the number of tokens of each expert before it launches what computes them."""
    merged_copies: bool
    """A token is sent once to each node that has experts of it, within a node once to each rank."""
    pads_experts: bool
    """Rows of each expert are padded to its capacity, if it has one, and sent so."""
    by_tensor: bool
    """Gradients and parameters are communicated tensor by tensor over the data axis, not in buckets."""
    accumulates: bool
    """Gradients of a microbatch are added to an fp32 copy of their own after it, not by the products."""
    selective: Literal["attention", "half", "elementwise", "latents", "named"]
    """Operators that selective recomputation repeats: attention, half the products, elementwise ones, these
    and the products that latents of attention are widened by, or what `remat` does not name."""
    remat: Remat
    """Outputs of a block that selective recomputation keeps by name."""
    planned_memory: bool
    """A compiler places the tensors of a whole step in one memory ahead of it: none is reserved beyond them,
    and logits, what a block's backward makes, and gradients are not held before or after they are needed."""
    scatter_pipeline: bool
    """Tensor ranks send a slice each between stages, and gather it there (Narayanan et al. 2021, 4.1)."""
    gradient_bytes: Count
    """Bytes per gradient as it is reduced over the data axis."""
    gather_bytes: Count
    """Bytes per parameter as ZeRO gathers it."""
    low_states: bool
    """Parameters are gathered, and inputs of products kept, in the format that computes below 16 bits."""
    flat_rings: bool
    """A group's ring enters each node through one interface, even if several members are in the node."""
    recipe: Recipe
    """Bytes of the training states."""
    fuses_gates: bool
    """The activation of gated channels and its product with the others are one operator, which keeps the
    inputs; else what the activation gives is kept, too."""
    kept_messages: NotNegative
    """Hidden states, whole on each tensor rank, that a stage keeps of each microbatch beside its blocks'."""
    unit: NotNegative
    """Share of a block's parameters that ZeRO-3 gathers at a time."""
    whole_gradients: bool
    """In a pipeline, gradients stay unsharded from microbatch to microbatch at any ZeRO stage."""
    habitual_zero: Integer
    """ZeRO stage to assume where a published run does not state it."""
    habitual_sequence_parallel: bool
    """Sequence parallelism to assume where a published run does not state it."""
    microbatches_are_stages: bool
    """Assume as many microbatches as pipeline ranks where a published run does not state them."""
    tuned: Literal["no", "always", "untold"]
    """When to assume tuned virtual stages where a published run does not state them: never, always, or if it
    does not state its microbatch size either."""
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
    staged_launch: NotNegative
    """Growth of the host's seconds by each rank of a tensor group, where stages of a pipeline are on several
    nodes: its collectives wait for each other's hosts, which also move what stages send."""
    spread: NotNegative
    """Standard deviation of its runs' seconds about the predicted ones, over that of other programs' runs."""
    agreements: Integer
    """All-reduces of single numbers over all ranks per step."""

    @property
    def fused_attention(self) -> bool:
        """True if attention stores no score matrix."""
        return self.attention != "unfused"

    @property
    def elementwise(self) -> float:
        """Bytes that memory-bound operators move, as a multiple of one fused pass each."""
        return self.numbers.elementwise[self.operators]

    @property
    def launch(self) -> float:
        """Host seconds per operator of a block."""
        return self.numbers.launch[self.hosting]

    @property
    def logits(self) -> float:
        """Bytes per logit at the peak of the loss."""
        return self.numbers.logits[self.loss]

    def overlap(self, kind: Overlapped) -> float:
        """Share of the messages of a kind that can overlap compute."""
        return self.numbers.overlap[kind] if kind in self.overlaps else 0.0

    @property
    def ours(self) -> bool:
        """True for this program, on any device."""
        return self.name.startswith("meshwright")


COMPILED_BLOCK = 0.72
"""Bytes that this program's compiled blocks move beside products and attention, as a multiple of one fused
pass each: an operator that is fused with the one before reads nothing. Source: counted in dry runs on a faked
H100 (tests/dryrun/test_compiled_blocks.py)."""


def elementwise_passes(stack: SoftwareStack, compiled: bool) -> float:
    """Bytes that memory-bound operators of a block move, as a multiple of one fused pass each."""
    return COMPILED_BLOCK if compiled and stack.name == "meshwright" else stack.elementwise


_DATA = Path(__file__).parent / "stacks.toml"
STACKS = read_tables(SoftwareStack, tomllib.loads(_DATA.read_text(encoding="utf-8")), f"{_DATA.name}: ")
MESHWRIGHT, MESHWRIGHT_ON_CPU = STACKS["meshwright"], STACKS["meshwright-cpu"]


PROGRAM_NAMES: Mapping[str, str] = {
    "torchtitan": "fsdp-compiled-loss",
    "fsdp2": "fsdp",
    "megatron": "megatron-core",
    "megatron-bridge": "nemo",
    "deepseek": "hai-llm",
    "deepspeed": "deepspeed-zero3",
}
"""Names that people have for programs -> the newest stack of each."""


def stack_named(name: str) -> SoftwareStack:
    """The software stack of this name, or of a program that people know by it. Raises `UserError`."""
    known = PROGRAM_NAMES.get(name, name)
    if known not in STACKS:
        names = (*STACKS, *PROGRAM_NAMES)
        hint = did_you_mean(name, names) or f"; they are {', '.join(STACKS)}"
        raise UserError(f"--stack: there is no stack '{name}'{hint}")
    return STACKS[known]
