"""Checkpoints that other programs write with their own code, each with the logits that it computes.

Run by `foreign_checkpoints.py` with the Python of an environment that has the program:
`python foreign_writers.py NAME FOLDER` writes FOLDER/checkpoint, FOLDER/config.json where the format has no
config, and FOLDER/logits.pt with `tokens` and `logits`. It imports nothing of meshwright.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

TOKENS = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(0))
LLAMA: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "initializer_range": 0.1, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "head_dim": 16,
}  # fmt: skip


def hf_model(tied: bool = False) -> Any:
    """A Llama of transformers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "tie_word_embeddings": tied})).float().eval()
    _shake(model)
    return model


def _shake(model: torch.nn.Module) -> None:
    """Give norms and biases values of their own, which are ones and zeros in new models."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


def _save_logits(folder: Path, logits: torch.Tensor) -> None:
    torch.save({"tokens": TOKENS, "logits": logits.detach().float()}, folder / "logits.pt")


def _alone(port: int = 29617) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo")


def dcp(folder: Path) -> None:
    """A model of transformers, nested beside an optimiser, by torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as checkpoint

    model = hf_model()
    adam = torch.optim.AdamW(model.parameters())
    model(TOKENS, labels=TOKENS).loss.backward()
    adam.step()
    state = {"model": model.state_dict(), "optim": adam.state_dict(), "step": 1}
    checkpoint.save(state, checkpoint_id=folder / "checkpoint", no_dist=True)
    model.config.save_pretrained(folder)
    _save_logits(folder, model(TOKENS).logits)


def torchtitan(folder: Path) -> None:
    """torchtitan's Llama 3 of its debugging size."""
    import torch.distributed.checkpoint as checkpoint
    from torchtitan.models.llama3 import llama3_configs
    from transformers import LlamaConfig, LlamaForCausalLM

    build = llama3_configs["debugmodel"]
    config = build("flex") if callable(build) else build
    torch.manual_seed(0)
    model = config.build()
    model.init_states() if hasattr(model, "init_states") else model.init_weights()
    _shake(model)
    state = model.state_dict()
    checkpoint.save({**state, "train_state": torch.zeros(3)}, checkpoint_id=folder / "checkpoint" / "step-7",
                    no_dist=True)  # fmt: skip
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    hf = Llama3StateDictAdapter(config, None).to_hf(state)
    width = hf["model.layers.0.mlp.gate_proj.weight"].shape[0]
    layers = sum(name.endswith("input_layernorm.weight") for name in hf)
    attention = config.layers[0].attention
    theirs = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=attention.n_heads, num_key_value_heads=attention.n_kv_heads or attention.n_heads,
        rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False, max_position_embeddings=2048,
    )  # fmt: skip
    again = LlamaForCausalLM(theirs).eval()
    again.load_state_dict(hf)
    again.config.save_pretrained(folder)
    _save_logits(folder, again(TOKENS).logits)


def _megatron(folder: Path, experts: int | None) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    # Its saves and forwards ask for a GPU in a few places, without need of one.
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    _alone()
    parallel_state.initialize_model_parallel(1, 1)
    mixture: dict[str, Any] = (
        {"num_moe_experts": experts, "moe_router_topk": 2, "moe_ffn_hidden_size": 48} if experts else {}
    )
    fused = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion",
             "gradient_accumulation_fusion", "persist_layer_norm", "add_bias_linear")  # fmt: skip
    config = TransformerConfig(
        num_layers=3, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2,
        use_cpu_initialization=True, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        normalization="RMSNorm", layernorm_epsilon=1e-5, params_dtype=torch.float32, hidden_dropout=0.0,
        attention_dropout=0.0, **dict.fromkeys(fused, False), **mixture,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = get_gpt_layer_local_spec(experts, False, normalization="RMSNorm")
    model = GPTModel(config, layer, vocab_size=128, max_sequence_length=128, position_embedding_type="rope",
                     rotary_base=10000, share_embeddings_and_output_weights=False)  # fmt: skip
    _shake(model)
    arguments = argparse.Namespace(
        num_layers=3, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, group_query_attention=True,
        num_query_groups=2, kv_channels=16, normalization="RMSNorm", norm_epsilon=1e-5, swiglu=True,
        rotary_base=10000, rotary_percent=1.0, padded_vocab_size=128, position_embedding_type="rope",
        untie_embeddings_and_output_weights=True, add_bias_linear=False, add_qkv_bias=False,
        max_position_embeddings=128, qk_layernorm=False, num_experts=experts, moe_router_topk=2,
        moe_ffn_hidden_size=48, params_dtype=torch.float32,
    )  # fmt: skip
    step = folder / "checkpoint" / "iter_0000005"
    step.mkdir(parents=True)
    dist_checkpointing.save(
        {"args": arguments, "iteration": 5, "model": model.sharded_state_dict()}, str(step)
    )
    (step.parent / "latest_checkpointed_iteration.txt").write_text("5")
    _without_cuda()
    model.eval()
    length = TOKENS.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    _save_logits(folder, model(TOKENS, torch.arange(length)[None].expand(2, -1), mask))


def _without_cuda() -> None:
    """Take the places of Megatron's forward that need CUDA or Transformer Engine off it."""
    import megatron.core.tensor_parallel as tensor_parallel
    import megatron.core.transformer.moe.moe_utils as moe_utils

    class Tracker:
        def fork(self, *_: object) -> Any:
            return contextlib.nullcontext()

    tensor_parallel.get_cuda_rng_tracker = lambda *_, **__: Tracker()
    tensor_parallel.random.get_cuda_rng_tracker = tensor_parallel.get_cuda_rng_tracker
    moe_utils.te_general_gemm = None


def megatron(folder: Path) -> None:
    """Megatron-Core's GPT model as a Llama, saved as torch_dist."""
    _megatron(folder, None)


def megatron_experts(folder: Path) -> None:
    """Megatron-Core's GPT model with experts."""
    _megatron(folder, 4)


def litgpt(folder: Path) -> None:
    """litgpt's Llama, with the config that it saves."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import save_config

    config = Config(
        name="small", block_size=128, vocab_size=101, padded_vocab_size=128, n_layer=3, n_head=4,
        n_embd=64, n_query_groups=2, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", norm_eps=1e-5, mlp_class_name="LLaMAMLP", intermediate_size=96,
        rope_base=10000,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT(config).eval()
    _shake(model)
    place = folder / "checkpoint"
    place.mkdir(parents=True)
    torch.save({"model": model.state_dict()}, place / "lit_model.pth")
    save_config(config, place)
    _save_logits(folder, model(TOKENS))


def _deepspeed(folder: Path, stage: int) -> None:
    """Train a step on two ranks under ZeRO, save, and convert to a universal checkpoint, too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--master-port", "29618", __file__, "deepspeed_rank", str(folder), str(stage)]  # fmt: skip
    own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=os.environ | own)


def deepspeed_rank(folder: Path, stage: int) -> None:
    """One of the two ranks of `_deepspeed`."""
    import deepspeed
    import deepspeed.comm.torch

    # Messages by gloo, without minutes of compiling; the package's own attribute `torch` is the library.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    model = hf_model(tied=True)
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage}, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    deepspeed.init_distributed(dist_backend="gloo")
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    engine.backward(engine(TOKENS, labels=TOKENS).loss)
    engine.step()
    engine.save_checkpoint(str(folder / "checkpoint"))
    gather = deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3)
    with gather, torch.no_grad():
        logits = engine.module(TOKENS).logits
    if engine.global_rank == 0:
        model.config.save_pretrained(folder)
        _save_logits(folder, logits)


def zero1(folder: Path) -> None:
    """DeepSpeed's ZeRO stage 1 of a tied Llama."""
    _deepspeed(folder, 1)


def zero2(folder: Path) -> None:
    """DeepSpeed's ZeRO stage 2."""
    _deepspeed(folder, 2)


def zero3(folder: Path) -> None:
    """DeepSpeed's ZeRO stage 3."""
    _deepspeed(folder, 3)


def universal(folder: Path) -> None:
    """A universal checkpoint, made by DeepSpeed's ds_to_universal of one of stage 2."""
    _deepspeed(folder, 2)
    given = folder / "checkpoint" / "global_step1"
    made = folder / "universal" / "global_step1_universal"
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
                    "--input_folder", str(given), "--output_folder", str(made), "--inject_missing_state"],
                   check=True)  # fmt: skip
    (folder / "checkpoint").rename(folder / "zero")
    (folder / "universal").rename(folder / "checkpoint")
    (folder / "checkpoint" / "latest_universal").write_text("global_step1_universal")


def _peft(folder: Path, model: Any, **how: Any) -> None:
    from peft import LoraConfig, get_peft_model

    base = folder / "base"
    model.save_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **how)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder / "checkpoint")
    _save_logits(folder, adapted(TOKENS).logits)


def lora(folder: Path) -> None:
    """A LoRA adapter of attention and the embedding, with a module saved whole and an alpha of its own."""
    _peft(folder, hf_model(), r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "embed_tokens"],
          modules_to_save=["lm_head"], alpha_pattern={"layers.1.self_attn.q_proj": 3})  # fmt: skip


def rslora(folder: Path) -> None:
    """An rsLoRA adapter."""
    _peft(folder, hf_model(), r=4, lora_alpha=6, use_rslora=True, target_modules=["down_proj", "o_proj"])


def dora(folder: Path) -> None:
    """A DoRA adapter."""
    _peft(folder, hf_model(), r=4, use_dora=True, target_modules=["q_proj", "down_proj"])


def lora_gpt2(folder: Path) -> None:
    """A LoRA adapter of GPT-2, whose weights are transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=96)).eval()
    _peft(folder, model, r=4, fan_in_fan_out=True, target_modules=["c_attn", "c_proj"])


WRITERS = {
    "dcp": dcp, "torchtitan": torchtitan, "megatron": megatron, "megatron_experts": megatron_experts,
    "litgpt": litgpt, "zero1": zero1, "zero2": zero2, "zero3": zero3, "universal": universal, "lora": lora,
    "rslora": rslora, "dora": dora, "lora_gpt2": lora_gpt2,
}  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1] == "deepspeed_rank":
        deepspeed_rank(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        WRITERS[sys.argv[1]](Path(sys.argv[2]))
