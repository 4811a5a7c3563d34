"""Megatron-Core 0.16.1's GPTModel under its own schedules, DistributedDataParallel and optimiser.

    python megatron_core.py JOB.json        (by torchrun, one process too)

The local layer spec (no Transformer Engine): RMSNorm, SwiGLU, RoPE, untied. Microbatches go through
`get_forward_backward_func` (pp2: 1F1B without interleaving), gradients through `finalize_model_grads`; tp2
is sequence parallel. Its fusions by torch.compile are on (SwiGLU, bias-dropout-add), those that need CUDA
off; its attention is not fused and computes the softmax in the weights' format, as its training script does
by default. Experts run one after another, since its grouped product needs CUDA.

Variants: `main` holds bf16 weights with fp32 copies and sums gradients in fp32, as its training script does
with --bf16; `bf16` holds bf16 weights alone, which Megatron has no optimiser for: torch's AdamW steps them,
and the norm is summed here over the ranks. For fp32, `main` has no copies.

What needs CUDA is replaced in `megatron_cpu.py`, which names each replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_cpu import Norm, model_settings, pretend_cuda
from peer import BETAS, CLIP, LR, WEIGHT_DECAY, Job, adamw, held, job, run, settings, share, world


def build(given: Job) -> Any:
    """This rank's part of the model, in Megatron's DistributedDataParallel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = model_settings(given)
    config.finalize_model_grads_func = finalize_model_grads
    parallel_state.initialize_model_parallel(
        config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    )
    layer = get_gpt_layer_local_spec(config.num_moe_experts, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    own = config.num_layers // config.pipeline_model_parallel_size
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model: Any = GPTModel(
        config, TransformerBlockSubmodules(layer_specs=[layer] * own, layer_norm=Norm),
        vocab_size=given.vocab_size, max_sequence_length=given.seq_len, pre_process=first, post_process=last,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip
    if config.bf16:
        model = Float16Module(config, model)
    sums = DistributedDataParallelConfig(grad_reduce_in_fp32=given.variant == "main")
    return DistributedDataParallel(config, sums, model)


def clip(parameters: list[nn.Parameter]) -> None:
    """Scale gradients to a norm of at most CLIP; what tensor-parallel ranks hold alike is counted once."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate as counts

    own = [each.grad for each in parameters if counts(each) and each.grad is not None]
    total = nn.utils.get_total_norm(own).float() ** 2
    dist.all_reduce(total, group=parallel_state.get_model_parallel_group())
    nn.utils.clip_grads_with_norm_(parameters, CLIP, total.sqrt())


def optimiser_of(model: Any, given: Job) -> tuple[Callable[[], None], Any]:
    """The update of the weights, and an object with all states that it stores, copies of weights too."""
    if given.variant == "bf16":
        parameters = list(model.parameters())
        plain = adamw(parameters)

        def update_alone() -> None:
            for each in parameters:
                each.grad = each.main_grad
            clip(parameters)
            plain.step()

        return update_alone, plain
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=LR, weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        clip_grad=CLIP, bf16=given.precision == "bf16",
    )  # fmt: skip
    whole = get_megatron_optimizer(config, [model])
    inner = [each.optimizer for each in whole.chained_optimizers if each.optimizer is not None]
    copies = [each.main_param for each in model.parameters() if getattr(each, "main_param", None) is not None]
    states = SimpleNamespace(state={"copies": dict(enumerate(copies))})

    def update() -> None:
        whole.step()
        whole.zero_grad()
        states.state.update({id(key): value for each in inner for key, value in each.state.items()})

    return update, states


def main() -> None:
    given = job()
    settings(given)
    world(alone=True)
    pretend_cuda()
    model = build(given)
    update, states = optimiser_of(model, given)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    schedule = get_forward_backward_func()
    length = given.seq_len
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(length).expand(given.micro_batch, -1)

    def mean(losses: Tensor) -> tuple[Tensor, Tensor]:
        loss = losses.float().mean()
        return loss, loss.detach().clone()  # the schedule divides `loss` in place

    def forward(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        tokens = next(batches)
        return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), mean

    def step(tokens: Tensor) -> float:
        mine = share(tokens) if given.layout == "replicate" else tokens
        parts = torch.split(mine, given.micro_batch)
        model.zero_grad_buffer()
        losses = schedule(
            forward_step_func=forward, data_iterator=iter(parts), model=[model], num_microbatches=len(parts),
            seq_length=length, micro_batch_size=given.micro_batch,
        )  # fmt: skip
        update()
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        if given.layout == "pp2":
            dist.broadcast(loss, 1)
        return float(loss)

    run(given, step, lambda: held(model, states))


if __name__ == "__main__":
    main()
