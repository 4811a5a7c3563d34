"""Plain PyTorch over transformers' Llama or Qwen2-MoE: eager or compiled; DDP, FSDP2 or DTensor.

    python transformers_loop.py JOB.json

Variants: `autocast` (fp32 weights), `bf16` (weights in bf16, which updates them in bf16, too), `compiled`
(autocast or fp32, decoder layers through torch.compile), and for fp32 `eager`. SDPA attention, the loss from
`labels`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel

import transformers_tensor
from peer import CLIP, Job, adamw, held, job, run, settings, share, world


def llama(given: Job) -> nn.Module:
    """A causal language model of the job's shape in fp32."""
    shape: dict[str, Any] = {
        "vocab_size": given.vocab_size,
        "hidden_size": given.hidden,
        "intermediate_size": given.ffn,
        "num_hidden_layers": given.layers,
        "num_attention_heads": given.heads,
        "num_key_value_heads": given.kv_heads,
        "max_position_embeddings": 2048,
        "attn_implementation": "sdpa",
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    if given.moe is None:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**shape))
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **shape,
            num_experts=given.moe["experts"],
            num_experts_per_tok=given.moe["top_k"],
            moe_intermediate_size=given.moe["ffn"],
            shared_expert_intermediate_size=given.moe["shared_ffn"],
            norm_topk_prob=True,
            output_router_logits=True,
            experts_implementation="grouped_mm",
        )
    )


def spread(model: nn.Module, given: Job) -> nn.Module:
    """The model in its layout."""
    if given.layout == "replicate":
        return nn.parallel.DistributedDataParallel(model)
    if given.layout == "zero3":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        half = given.precision == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
        for layer in [*model.model.layers, model]:
            fully_shard(layer, mesh=mesh, mp_policy=policy).set_force_sum_reduction_for_comms(True)
    elif given.layout == "tp2":
        transformers_tensor.parallel(model)
    elif given.layout != "one":
        raise SystemExit(f"transformers' Llama has no layout {given.layout} of plain PyTorch here")
    return model


def main() -> None:
    given = job()
    settings(given)
    world()
    model = llama(given)
    if given.variant == "bf16":
        model = model.to(torch.bfloat16)
    if given.variant == "compiled":
        for layer in model.model.layers:
            layer.compile()
    model = spread(model, given)
    optimiser = adamw(model.parameters())
    cast = given.precision == "bf16" and given.variant != "bf16" and given.layout != "zero3"
    split = given.layout in ("replicate", "zero3")

    def step(tokens: Tensor) -> float:
        mine = share(tokens) if split else tokens
        inputs = mine[:, :-1].contiguous()
        targets = mine[:, 1:].contiguous()
        with loss_parallel() if given.layout == "tp2" else nullcontext():
            with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
                if given.layout == "tp2":
                    loss = transformers_tensor.loss_of(model, inputs, targets)
                else:
                    loss = model(input_ids=inputs, labels=inputs, shift_labels=targets).loss
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        optimiser.zero_grad()
        return float(loss.detach())

    run(given, step, lambda: held(model, optimiser))


if __name__ == "__main__":
    main()
