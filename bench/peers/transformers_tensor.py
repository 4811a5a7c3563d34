"""transformers' Llama under torch's `parallelize_module`, by the plan of torch's tensor-parallel tutorial."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from peer import world

ENDS = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}
LAYER = {
    "input_layernorm": SequenceParallel(),
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    ),
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "post_attention_layernorm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
}


def parallel(model: nn.Module) -> nn.Module:
    """The model, split over all ranks, norms and residuals by the sequence."""
    mesh = init_device_mesh("cpu", (world()[1],))
    parallelize_module(model, mesh, ENDS)
    for block in model.model.layers:
        parallelize_module(block, mesh, LAYER)
    return model


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of LlamaForCausalLM, under `loss_parallel`: LlamaModel's own forward takes positions from the
    embedding's output, which here has only this rank's tokens, so its parts are called in turn."""
    decoder = model.model
    x = decoder.embed_tokens(inputs)
    rotation = decoder.rotary_emb(x, position_ids=torch.arange(inputs.shape[1]).unsqueeze(0))
    for block in decoder.layers:
        x = block(x, position_embeddings=rotation)
    logits = model.lm_head(decoder.norm(x))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
