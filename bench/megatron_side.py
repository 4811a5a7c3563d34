"""One rank of Megatron-Core's GPTModel on the CPU, for `bench/tensor.py`; runs in a venv of its own.

    python bench/megatron_side.py --rank R --ranks 2 --store FILE

Reads a number of steps a line from standard input, trains so many, and writes the seconds that a step took;
between those it waits at the pipe. The model is `small` from Megatron-Core's local layer spec (no Transformer
Engine): RMSNorm, SwiGLU, RoPE, 4 query groups, untied, bf16 weights without fp32 copies, sequence parallel.
Its fusions by torch.compile are on (SwiGLU, bias-dropout-add), those that need CUDA off; its attention is not
fused and computes the softmax in bf16, as its training script does by default.

What Megatron-Core does not do on a CPU is replaced here: device names, the CUDA random states (nothing draws,
dropout is 0), and the local spec's norm, which refuses sequence parallelism: torch's RMSNorm with its weight
marked, whose gradient is summed over the ranks after the backward pass. So is its gradient clipping, which
takes only CUDA tensors: the norm is summed over both ranks and the gradients are scaled.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SEQ_LEN, SEQUENCES, VOCABULARY, HIDDEN = 512, 8, 8192, 512
FUSIONS = os.environ.get("MEGATRON_FUSIONS", "swiglu dropout").split()
"""The kernels among `swiglu`, `dropout` and `loss` that torch.compile fuses."""


def pretend_cuda() -> None:
    """Let Megatron-Core take the CPU for its current CUDA device."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]


def without_random_states() -> None:
    """Let `fork` of the CUDA random states do nothing."""
    from megatron.core.tensor_parallel import random as states

    @contextlib.contextmanager
    def fork(self: Any, name: str = "") -> Iterator[None]:
        yield

    states.CudaRNGStatesTracker.fork = fork


class Norm(nn.RMSNorm):
    """torch's RMSNorm with Megatron-Core's arguments."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def settings(ranks: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=8,
        hidden_size=HIDDEN,
        ffn_hidden_size=1408,
        num_attention_heads=8,
        num_query_groups=4,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32="fp32softmax" in FUSIONS,
        bias_activation_fusion="swiglu" in FUSIONS,
        bias_dropout_fusion="dropout" in FUSIONS,
        cross_entropy_loss_fusion="loss" in FUSIONS,
    )


def build(ranks: int) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    without_random_states()
    config = settings(ranks)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=Norm),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQ_LEN,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).bfloat16()


def sum_marked(model: nn.Module) -> None:
    """Add the gradients of parameters that saw only this rank's tokens, in one message."""
    grads = [p.grad for p in model.parameters() if getattr(p, "sequence_parallel", False)]
    flat = torch.cat([grad.view(-1) for grad in grads])
    dist.all_reduce(flat)
    for grad, whole in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(whole.view_as(grad))


def clip(model: nn.Module, limit: float) -> None:
    """Scale the gradients to a norm of at most `limit`; what both ranks hold alike is counted once."""
    split = [p.grad for p in model.parameters() if getattr(p, "tensor_model_parallel", False)]
    alike = [p.grad for p in model.parameters() if not getattr(p, "tensor_model_parallel", False)]
    total = nn.utils.get_total_norm(split).float() ** 2
    dist.all_reduce(total)
    total = (total + nn.utils.get_total_norm(alike).float() ** 2).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, total)


def training_step(model: nn.Module) -> Callable[[Tensor], float]:
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    positions = torch.arange(SEQ_LEN).expand(SEQUENCES, -1)
    mask = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu(1)[None, None]

    def step(tokens: Tensor) -> float:
        losses: Tensor = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
        loss = losses.float().mean()
        loss.backward()
        sum_marked(model)
        clip(model, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return float(loss.detach())

    return step


def serve(step: Callable[[Tensor], float]) -> None:
    draw = torch.Generator().manual_seed(0)
    print("ready", flush=True)
    for line in sys.stdin:
        shape = (int(line), SEQUENCES, SEQ_LEN + 1)
        batches = torch.randint(VOCABULARY, shape, generator=draw)
        dist.barrier()
        start = time.perf_counter()
        losses = [step(batch) for batch in batches]
        dist.barrier()
        print((time.perf_counter() - start) / len(batches), losses[-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True, help="a file that does not exist yet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pretend_cuda()
    dist.init_process_group(
        "gloo", init_method=f"file://{options.store}", rank=options.rank, world_size=options.ranks
    )
    torch.manual_seed(0)
    serve(training_step(build(options.ranks)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
