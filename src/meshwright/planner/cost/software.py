"""Software stacks: what a program does with the same layout, as far as it changes time or memory.

One entry a stack that really differs, none a model, a paper or a run. Shares and seconds are calibrated on
the rows that `planner/validation/calibration.py` lists; flags are what the programs do, read in their papers
and sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshwright.spec.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Recipe:
    """Bytes of a parameter's states in mixed precision, and which of them ZeRO shards at which stage."""

    copy: int = 2
    """The copy that computes, whole below ZeRO-3; 0 where shards are cast as they are gathered."""
    gradient: int = 4
    """A gradient; whole below ZeRO-2."""
    optimiser: int = 12
    """The master copy and both moments; whole at ZeRO-0."""
    wide: int = 0
    """Of a gradient more where it computes in bf16, whose sums need an accumulator of their own."""


@dataclass(frozen=True)
class SoftwareStack:
    """A training program."""

    name: str
    describes: str
    fused_attention: bool = True
    """Attention keeps no scores (Dao et al. 2022, FlashAttention)."""
    elementwise: float = 1.0
    """Bytes that norms, activations, residuals and copies move, over what one fused pass each would."""
    dropout: bool = False
    """Hidden states and scores are dropped out, and masks kept."""
    launch: float = 0.0
    """Seconds of the host for each operator of a block, below which the device waits for it."""
    blocking: bool = False
    """The host waits for each operator before it launches the next, so that launches add up."""
    native_attention: bool = True
    """Attention's kernels are written for the device's generation."""
    by_tensor: bool = False
    """Gradients and parameters cross the data axis tensor by tensor, and not in buckets."""
    step: float = 0.0
    """Seconds of a step that belong to no operator: the loader, the loss's scale, the host's agreement."""
    overlap_data: float = 1.0
    """Share of the data axis's messages that may run beside the backward (and, at ZeRO-3, the forward)."""
    overlap_gather_parameters: float = 0.0
    """Share of parameters' gathers at ZeRO-1 and 2 that may run beside the forward."""
    contention: float = 0.1
    """Seconds that compute loses for each second of a collective beside it."""
    overlap_gather: float = 0.0
    """Share of the tensor axis's gathers in the backward that run beside the products for inputs."""
    overlap_expert: float = 0.0
    """Share of the expert axis's messages that run beside other compute."""
    selective: str = "attention"
    """What selective recomputation does again: 'attention', 'half' the products, or 'elementwise'."""
    cast_bytes: float = 3.0
    """Bytes moved to cast an element to fp8, with scales."""
    overlap_tensor: float = 0.0
    """Share of the tensor axis's messages that run beside matrix products."""
    overlap_pipeline: bool = True
    """Whether messages between stages run beside compute."""
    scatter_pipeline: bool = False
    """Tensor ranks share a message between stages and gather it there (Narayanan et al. 2021, §4.1)."""
    gradient_bytes: int = 4
    """Bytes of a gradient as it is reduced over the data axis."""
    gather_bytes: int = 2
    """Bytes of a parameter as ZeRO gathers it."""
    network: float = 1.0
    """Share of what a node's network interfaces carry that its collectives over the data axis reach."""
    flat_rings: bool = False
    """A group's ring crosses each node through one interface, though more of its members are there."""
    recipe: Recipe = field(default_factory=lambda: Recipe())
    """Bytes of its states."""
    kept: float = 1.0
    """What a block keeps for its backward, over what its operators' inputs are."""
    unit: float = 1.0
    """Share of a block's parameters that ZeRO-3 gathers at a time."""
    logits: float = 6.0
    """Bytes of a logit at the loss's peak, copies in wider numbers and gradients included."""
    whole_gradients: bool = False
    """In a pipeline gradients stay whole from microbatch to microbatch, whatever ZeRO's stage."""
    fragmentation: float = 0.06
    """Share of the allocated bytes that the allocator reserves beyond."""
    habitual_zero: int = 0
    """ZeRO's stage where a published run does not say."""
    habitual_sequence_parallel: bool = True
    """Whether its tensor ranks share tokens between layers, where a published run does not say."""
    microbatches_are_stages: bool = False
    """A pipeline has as many microbatches as ranks, unless told otherwise."""
    tuned: str = "no"
    """Whether published runs that do not tell their virtual stages chose them well: 'no', 'always', or
    'untold', where they do not tell their microbatch either."""
    matmul: float = 1.0
    """Rate of its matrix products over the device's calibrated one."""
    host: float = 0.0
    """Bare operators, as profiled, that the host's work for an operator of a block is worth: Python, autograd
    and views. 0 where `launch` says it in seconds."""
    ends: float = 0.0
    """Operators of a microbatch that belong to no block, launched one by one."""
    packed: float = 0.0
    """Bytes moved to lay down a parameter's gradient in each microbatch."""
    unpacked: float = 0.0
    """Bytes moved to lay out a gathered parameter."""
    own: bool = False
    """This program: messages are counted call by call (`planner/traffic/messages.py`), and parameters
    are gathered in the format that computes."""
    agreements: int = 0
    """Sums of single numbers over ranks in a step."""

    @property
    def ours(self) -> bool:
        """Whether it is this program."""
        return self.name.startswith("meshwright")


MESHWRIGHT = SoftwareStack(
    "meshwright",
    "this program",
    elementwise=1.6,
    launch=10e-6,
    step=5e-3,
    contention=0.3,
    native_attention=False,
    overlap_gather_parameters=1.0,
    selective="elementwise",
    logits=1.5,
    whole_gradients=True,
)
"""Never timed on a GPU: there its constants are those of eager FSDP."""

MESHWRIGHT_ON_CPU = replace(
    MESHWRIGHT,
    name="meshwright-cpu",
    describes="this program on processors",
    blocking=True,
    overlap_pipeline=False,
    overlap_gather_parameters=1.0,
    host=6.0,
    ends=200.0,
    packed=10.0,
    unpacked=8.0,
    own=True,
    agreements=4,
)
"""The host is the device, so what it does adds up, and so do messages within its memory. `host` and `ends`
are those of steps of blocks that compute next to nothing (one core, 2026-11-22: 0.9 ms a dense block and
microbatch, 2.8 ms one with 16 experts, 3 ms beyond blocks, where an operator on one number took 2.0 us)."""

STACKS = {
    stack.name: stack
    for stack in (
        MESHWRIGHT,
        MESHWRIGHT_ON_CPU,
        SoftwareStack(
            "megatron-2021",
            "Megatron-LM before fused attention (2021-2023)",
            fused_attention=False,
            dropout=True,
            elementwise=1.02,
            launch=80e-6,
            step=0.03,
            overlap_data=0.0,
            overlap_pipeline=False,
            scatter_pipeline=True,
            habitual_sequence_parallel=False,
            tuned="untold",
        ),
        SoftwareStack(
            "megatron-deepspeed",
            "Megatron-LM under DeepSpeed's pipeline engine (2021-2022)",
            fused_attention=False,
            dropout=True,
            elementwise=0.98,
            launch=93e-6,
            blocking=True,
            step=0.03,
            overlap_data=0.0,
            overlap_pipeline=False,
            gradient_bytes=2,
            recipe=Recipe(2, 4, 12, wide=4),
            habitual_sequence_parallel=False,
            habitual_zero=1,
        ),
        SoftwareStack(
            "deepspeed-zero3",
            "DeepSpeed's ZeRO-3 of 2021",
            fused_attention=False,
            dropout=True,
            elementwise=1.1,
            launch=40e-6,
            step=0.03,
            flat_rings=True,
            gradient_bytes=2,
            habitual_sequence_parallel=False,
            habitual_zero=3,
            unit=0.25,
            matmul=0.9,
            network=1.0,
            overlap_data=0.72,
        ),
        SoftwareStack(
            "megatron-core",
            "Megatron-Core and NeMo (2024 on)",
            elementwise=1.14,
            launch=8e-6,
            step=0.02,
            overlap_tensor=0.6,
            overlap_gather_parameters=1.0,
            habitual_zero=1,
            tuned="always",
            overlap_data=0.65,
        ),
        SoftwareStack(
            "hai-llm",
            "DeepSeek's own program, whose messages to experts run beside compute (2024)",
            elementwise=1.1,
            launch=8e-6,
            step=0.02,
            overlap_expert=0.95,
            overlap_gather_parameters=1.0,
            recipe=Recipe(2, 4, 8),
            selective="elementwise",
            habitual_zero=1,
        ),
        SoftwareStack(
            "fsdp",
            "PyTorch FSDP, eager: torchtitan",
            elementwise=1.6,
            launch=10e-6,
            step=0.02,
            contention=0.3,
            native_attention=False,
            selective="half",
            recipe=Recipe(0, 4, 12),
            logits=16.0,
            habitual_zero=3,
            microbatches_are_stages=True,
        ),
        SoftwareStack(
            "llm-foundry",
            "PyTorch FSDP under Composer, with a fused loss: llm-foundry",
            elementwise=1.5,
            launch=10e-6,
            step=0.02,
            contention=0.49,
            native_attention=False,
            selective="half",
            recipe=Recipe(0, 4, 12),
            logits=4.0,
            habitual_zero=3,
            microbatches_are_stages=True,
            overlap_data=0.78,
        ),
        SoftwareStack(
            "fsdp-compiled",
            "PyTorch FSDP with compiled blocks: torchtitan",
            elementwise=0.69,
            launch=5e-6,
            step=0.02,
            contention=0.3,
            native_attention=False,
            selective="half",
            recipe=Recipe(0, 4, 12),
            logits=13.0,
            habitual_zero=3,
            microbatches_are_stages=True,
        ),
        SoftwareStack(
            "nanotron",
            "nanotron",
            elementwise=1.3,
            launch=10e-6,
            step=0.06,
            overlap_data=0.0,
            overlap_pipeline=False,
            by_tensor=True,
            kept=1.4,
            logits=8.0,
        ),
    )
}


def stack_named(name: str) -> SoftwareStack:
    """One of the software stacks. Raises `UserError`."""
    if name not in STACKS:
        hint = did_you_mean(name, STACKS) or f"; they are {', '.join(STACKS)}"
        raise UserError(f"--stack: there is no stack '{name}'{hint}")
    return STACKS[name]
