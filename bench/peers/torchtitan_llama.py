"""torchtitan 0.3.0's Llama 3 model under its own `parallelize_llama`, in a training loop like its trainer's.

    python torchtitan_llama.py JOB.json        (by torchrun, one process too)

FSDP2 with its mixed-precision policy (fp32 weights, bf16 products) in all layouts, as torchtitan always
does: `one` shards over one rank, `replicate` replicates over two, `zero3` shards over two; tp2 is sequence
parallel with its parallel cross entropy. No compiler, no recomputation; the loss is its `cross_entropy_loss`,
clipping its `clip_grad_norm_`, and the update torch's fused AdamW, which its optimizer container calls.
Weights begin with a standard deviation of 0.02 everywhere, so that the first loss is near other sides'.

Its SPMD backend is `partial_dtensor`: the default, `spmd_types`, gives FSDP2 plain tensors with a mesh of
several dimensions, which torch 2.13 refuses on two ranks. Replaced, because it needs CUDA:
- the device type that torchtitan finds, which would be `cuda` on a machine without a device;
- the module of its Triton kernels for expert parallelism, imported with all models and not called;
- flex attention, which has no backward pass on a CPU, by its own ScaledDotProductAttention, which its
  `get_attention_config` refuses for language models because it cannot take documents' positions;
- averages of reductions, which gloo lacks: FSDP2 sums (`set_force_sum_reduction_for_comms`).
"""

from __future__ import annotations

import functools
import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from peer import CLIP, Job, adamw, held, job, run, settings, share, world


def pretend(device: str) -> None:
    """Let torchtitan import and find a device of this type."""
    utilities: Any = torch._utils
    utilities._get_available_device_type = lambda: device
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()


def shape(given: Job) -> Any:
    """torchtitan's configuration of the model."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    start = {"weight": functools.partial(nn.init.normal_, std=0.02)}
    norm = functools.partial(
        RMSNorm.Config, normalized_shape=given.hidden, param_init={"weight": nn.init.ones_}
    )
    rotation = ComplexRoPE.Config(
        dim=given.hidden // given.heads, max_seq_len=given.seq_len, theta=10000.0, scaling="none"
    )
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=given.hidden, n_heads=given.heads, n_kv_heads=given.kv_heads, wqkv_param_init=start,
                wo_param_init=start, inner_attention=ScaledDotProductAttention.Config(), fuse_qkv=True,
                rope=rotation,
            ),
            feed_forward=make_ffn_config(
                dim=given.hidden, hidden_dim=given.ffn, w1_param_init=start, w2w3_param_init=start
            ),
        )
        for _ in range(given.layers)
    ]  # fmt: skip
    words, width = given.vocab_size, given.hidden
    return Llama3Model.Config(
        dim=width, vocab_size=words, norm=norm(), layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=words, embedding_dim=width, param_init=start),
        lm_head=Linear.Config(in_features=width, out_features=words, param_init=start),
    )  # fmt: skip


def build(given: Job) -> Any:
    """This rank's part of the model."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.llama3.parallelize import parallelize_llama
    from torchtitan.trainer import Trainer

    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=2 if given.layout == "replicate" else 1,
        data_parallel_shard_degree=2 if given.layout == "zero3" else 1,
        tensor_parallel_degree=2 if given.layout == "tp2" else 1,
        spmd_backend="partial_dtensor",
    )
    product = "bfloat16" if given.precision == "bf16" else "float32"
    training = TrainingConfig(seq_len=given.seq_len, mixed_precision_param=product, disable_cuda_graphs=True)
    dims = ParallelDims.from_config(parallelism, world()[1])
    distributed.set_spmd_backend(parallelism.spmd_backend)
    dims.build_mesh()
    config = shape(given)
    config.update_from_config(config=Trainer.Config(parallelism=parallelism, training=training))
    with torch.device("meta"):
        model = config.build()
    model = parallelize_llama(
        model, parallel_dims=dims, training=training, parallelism=parallelism,
        compile_config=CompileConfig(), ac_config=None, dump_folder="",
    )  # fmt: skip
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    return model.train()


def main() -> None:
    given = job()
    settings(given)
    world(alone=True)
    pretend("cpu")
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import clip_grad_norm_

    model = build(given)
    optimiser = adamw(model.parameters())
    split = given.layout in ("replicate", "zero3")

    def step(tokens: Tensor) -> float:
        mine = share(tokens) if split else tokens
        logits = model(mine[:, :-1].contiguous())
        # FSDP2 sums gradients here: the trainer divides each rank's sum by the tokens of all ranks.
        total = cross_entropy_loss(logits, mine[:, 1:].contiguous(), global_vocab_size=given.vocab_size)
        (total / tokens[:, 1:].numel()).backward()
        clip_grad_norm_(list(model.parameters()), CLIP, foreach=True)
        optimiser.step()
        optimiser.zero_grad()
        return float(total.detach()) / mine[:, 1:].numel()

    run(given, step, lambda: held(model, optimiser))


if __name__ == "__main__":
    main()
