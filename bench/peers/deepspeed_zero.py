"""transformers' Llama under DeepSpeed 0.19.8's ZeRO: replicate as stage 2, zero3 as stage 3.

    python deepspeed_zero.py JOB.json        (by torchrun)

bf16 is DeepSpeed's `bf16` section: bf16 weights with fp32 copies. The optimiser is its own AdamW (FusedAdam,
compiled for the CPU on the first start). Stage 2 keeps whole weights on each rank and divides gradients and
states; `held` counts a rank's part of each, with the fp32 copies among the states. Nothing is replaced: its
CPU accelerator runs on gloo.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from peer import BETAS, CLIP, LR, WEIGHT_DECAY, Job, held, job, run, settings, share
from transformers_loop import llama


def configuration(given: Job) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": given.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": given.precision == "bf16"},
        "zero_optimization": {"stage": 3 if given.layout == "zero3" else 2},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": BETAS, "weight_decay": WEIGHT_DECAY}},
    }


def stored(engine: Any) -> dict[str, Any]:
    """The numbers of `peer.held`: under stage 3 a rank's part of a parameter is its `ds_tensor`."""
    own = [getattr(each, "ds_tensor", each) for each in engine.module.parameters()]
    zero = engine.optimizer
    copies = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
    states = {**zero.optimizer.state, "copies": dict(enumerate(copies))}
    return held(SimpleNamespace(parameters=lambda: own), SimpleNamespace(state=states))  # type: ignore[arg-type]


def main() -> None:
    given = job()
    settings(given)
    logging.disable(logging.WARNING)
    import deepspeed

    deepspeed.init_distributed("gloo")
    model: nn.Module = llama(given)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=configuration(given)
    )

    def step(tokens: Tensor) -> float:
        mine = share(tokens)
        inputs = mine[:, :-1].contiguous()
        loss = engine(input_ids=inputs, labels=inputs, shift_labels=mine[:, 1:].contiguous()).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    run(given, step, lambda: stored(engine))


if __name__ == "__main__":
    main()
