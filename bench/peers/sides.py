"""The sides of the comparison: which program trains which layouts, in which venv, and in which ways."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Side:
    """A peer's program in one of its ways to train."""

    name: str
    program: str
    """A file beside this one."""
    venv: str
    """Names the venv, and the file of its requirements under `requirements/`; "" for ours."""
    variant: str
    cases: tuple[str, ...]
    precisions: tuple[str, ...] = ("bf16",)
    models: tuple[str, ...] = ("small", "base")


_LOOP = ("transformers_loop.py", "transformers")
_DATA = ("one", "replicate", "zero3")
_ALL = ("small", "base", "moe-small")
_MEGATRON = ("one", "replicate", "tp2", "pp2")
SIDES = (
    Side("transformers, autocast", *_LOOP, "autocast", ("one", "replicate", "tp2")),
    Side("transformers, bf16 weights", *_LOOP, "bf16", ("one", "replicate", "tp2")),
    Side("transformers, compiled", *_LOOP, "compiled", ("one", "replicate"), ("bf16", "fp32")),
    Side("transformers, FSDP2", *_LOOP, "fsdp2", ("zero3",), ("bf16", "fp32")),
    Side("transformers", *_LOOP, "eager", ("one", "replicate", "tp2"), ("fp32",)),
    Side("Megatron-Core, fp32 copies", "megatron_core.py", "megatron", "main", _MEGATRON, models=_ALL),
    Side("Megatron-Core, bf16 weights", "megatron_core.py", "megatron", "bf16", _MEGATRON, models=_ALL),
    Side("Megatron-Core", "megatron_core.py", "megatron", "main", _MEGATRON, ("fp32",), _ALL),
    Side("torchtitan", "torchtitan_llama.py", "torchtitan", "fsdp2", (*_DATA, "tp2"), ("bf16", "fp32")),
    Side("litgpt, bf16-mixed", "litgpt_model.py", "litgpt", "bf16-mixed", ("one", "replicate")),
    Side("litgpt, bf16-true", "litgpt_model.py", "litgpt", "bf16-true", ("one", "replicate")),
    Side("litgpt, compiled", "litgpt_model.py", "litgpt", "compiled", ("one", "replicate"), ("bf16", "fp32")),
    Side("litgpt", "litgpt_model.py", "litgpt", "32-true", ("one", "replicate"), ("fp32",)),
    Side("Accelerate", "accelerate_loop.py", "transformers", "", _DATA, ("bf16", "fp32")),
    Side(
        "transformers' Trainer", "hf_trainer.py", "transformers", "", ("one", "replicate"), ("bf16", "fp32")
    ),
    Side(
        "Meshwright, independent runs", "independent_runs.py", "", "", ("replicate",), ("bf16", "fp32"), _ALL
    ),
    Side("DeepSpeed ZeRO", "deepspeed_zero.py", "deepspeed", "", ("replicate", "zero3"), ("bf16", "fp32")),
)
