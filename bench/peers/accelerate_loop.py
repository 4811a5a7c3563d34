"""transformers' Llama in a training loop of Hugging Face Accelerate 1.15.0.

    python accelerate_loop.py JOB.json

The loop is the one of `transformers_loop.py` with Accelerate's `prepare`, `backward` and `clip_grad_norm_`;
bf16 is its mixed precision (autocast, fp32 weights). zero3 asks for FSDP2, by a plugin that shards each
decoder layer; `note` says what was prepared instead where ranks hold whole parameters. Nothing is replaced.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from peer import CLIP, Job, adamw, held, job, local, run, settings, share
from transformers_loop import llama


def accelerator_of(given: Job) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    sharded = given.layout == "zero3"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    return Accelerator(
        cpu=True,
        mixed_precision="bf16" if given.precision == "bf16" else "no",
        fsdp_plugin=plugin if sharded else None,
    )


def elements(model: nn.Module) -> int:
    """Parameters that this rank stores."""
    return sum(local(each).numel() for each in model.parameters())


def main() -> None:
    given = job()
    settings(given)
    accelerator = accelerator_of(given)
    model: Any = llama(given)
    whole = elements(model)
    model, optimiser = accelerator.prepare(model, adamw(model.parameters()))
    own = elements(model)
    note = ""
    if given.layout == "zero3" and own == whole:
        kind = accelerator.distributed_type.value
        note = (
            f"Asked for FSDP2, Accelerate prepared {type(model).__name__} ({kind}): each rank holds all"
            f" {whole} parameters."
        )

    def step(tokens: Tensor) -> float:
        mine = share(tokens)
        inputs = mine[:, :-1].contiguous()
        loss = model(input_ids=inputs, labels=inputs, shift_labels=mine[:, 1:].contiguous()).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        optimiser.zero_grad()
        return float(loss.detach())

    run(given, step, lambda: held(model, optimiser), note)


if __name__ == "__main__":
    main()
