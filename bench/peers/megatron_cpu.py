"""Megatron-Core 0.16.1 on a CPU: its settings, and what is replaced.

Replaced, because it needs CUDA or refuses a CPU:
- the current device, `torch.cuda.synchronize`, `device="cuda"` of torch.zeros and torch.tensor, and the names
  of tensor types (Megatron's optimiser asks for `torch.cuda.FloatTensor`);
- the CUDA random states (nothing draws: dropout is 0, weights are drawn on the CPU);
- Apex's FusedAdam, by torch's fused AdamW rather than Megatron's fallback, which is not fused;
- the local spec's norm, which refuses sequence parallelism, by torch's RMSNorm with its weight marked, so
  that `finalize_model_grads` sums its gradient over the ranks;
- the router's product of a mixture of experts, which calls Transformer Engine without looking whether it is
  there: it is told that there is none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from peer import Job


def pretend_cuda() -> None:
    """Let Megatron-Core take the CPU for its CUDA device."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda device=None: None
    every: Any = torch

    def here(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*shape: Any, device: Any = None, **rest: Any) -> Tensor:
            return make(*shape, device="cpu" if device == "cuda" else device, **rest)

        return made

    every.zeros, every.tensor = here(torch.zeros), here(torch.tensor)
    kind = Tensor.type

    def named(self: Tensor, *arguments: Any, **rest: Any) -> Any:
        found = kind(self, *arguments, **rest)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    every.Tensor.type = named
    every.optim.AdamW = functools.partial(torch.optim.AdamW, fused=True)
    from megatron.core.tensor_parallel import random as states
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None

    @contextlib.contextmanager
    def fork(self: Any, name: str = "") -> Iterator[None]:
        yield

    states.CudaRNGStatesTracker.fork = fork


class Norm(nn.RMSNorm):
    """torch's RMSNorm with Megatron-Core's arguments."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel


def model_settings(given: Job) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    half = given.precision == "bf16"
    dtype = torch.bfloat16 if half else torch.float32
    return TransformerConfig(
        num_layers=given.layers, hidden_size=given.hidden, ffn_hidden_size=given.ffn,
        num_attention_heads=given.heads, num_query_groups=given.kv_heads, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=nn.functional.silu, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, bf16=half, params_dtype=dtype, pipeline_dtype=dtype,
        tensor_model_parallel_size=2 if given.layout == "tp2" else 1, sequence_parallel=given.layout == "tp2",
        pipeline_model_parallel_size=2 if given.layout == "pp2" else 1, deallocate_pipeline_outputs=True,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        attention_softmax_in_fp32=False, bias_activation_fusion=True, bias_dropout_fusion=True,
        **mixture(given),
    )  # fmt: skip


def mixture(given: Job) -> dict[str, Any]:
    """Settings of a mixture of experts: one after another, since the grouped product needs CUDA."""
    moe = given.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe["experts"], "moe_router_topk": moe["top_k"], "moe_ffn_hidden_size": moe["ffn"],
        "moe_shared_expert_intermediate_size": moe["shared_ffn"], "moe_router_score_function": moe["router"],
        "moe_router_enable_expert_bias": moe["bias"], "moe_router_bias_update_rate": moe["bias_rate"],
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": moe["aux_loss"],
        "moe_token_dispatcher_type": "allgather",
    }  # fmt: skip
