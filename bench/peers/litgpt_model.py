"""litgpt 0.5.13's GPT with a Llama's configuration, under Lightning Fabric 2.6.6 as in `litgpt pretrain`.

    python litgpt_model.py JOB.json

Variants: Fabric's precisions `bf16-mixed` (autocast, fp32 weights), `bf16-true` (weights in bf16) and
`32-true`, and `compiled` (bf16-mixed or 32-true with `torch.compile(model)`, which `litgpt pretrain` always
does). The loss is litgpt's `chunked_cross_entropy` as its pretraining calls it. `replicate` is Fabric's
strategy `ddp`. Nothing is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peer import CLIP, Job, adamw, held, job, run, settings, share, world


def shape(given: Job) -> Any:
    """litgpt's configuration of the model."""
    from litgpt import Config

    return Config(
        name="peer",
        block_size=given.seq_len,
        vocab_size=given.vocab_size,
        padded_vocab_size=given.vocab_size,
        n_layer=given.layers,
        n_head=given.heads,
        n_query_groups=given.kv_heads,
        n_embd=given.hidden,
        intermediate_size=given.ffn,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )


def main() -> None:
    given = job()
    settings(given)
    ranks = world()[1]
    from lightning import Fabric
    from litgpt import GPT
    from litgpt.utils import chunked_cross_entropy

    of_run = "bf16-mixed" if given.precision == "bf16" else "32-true"
    fabric = Fabric(
        accelerator="cpu",
        devices=ranks,
        strategy={"one": "auto", "replicate": "ddp"}[given.layout],
        precision=of_run if given.variant == "compiled" else given.variant,
    )
    fabric.launch()
    with fabric.init_module():
        bare = GPT(shape(given))
    bare.apply(bare._init_weights)
    model = fabric.setup(torch.compile(bare) if given.variant == "compiled" else bare)
    optimiser = fabric.setup_optimizers(adamw(model.parameters()))

    def step(tokens: Tensor) -> float:
        mine = share(tokens)
        logits = model(mine[:, :-1].contiguous())
        loss = chunked_cross_entropy(logits, mine[:, 1:].contiguous())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimiser, max_norm=CLIP)
        optimiser.step()
        optimiser.zero_grad()
        return float(loss.detach())

    run(given, step, lambda: held(model, optimiser))


if __name__ == "__main__":
    main()
