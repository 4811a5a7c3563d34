"""Checkpoints in the files of other programs, made by torch itself of one small HF folder.

Each writer is given the HF state dict and its config, and writes what the program writes: its names, the
order of its rows, its nesting. Orders are written out apart from the readers, so that a mistake does not meet
itself.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor

State = dict[str, Tensor]
Keys = dict[str, Any]


def save_dcp(state: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True)
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def torch_dcp(state: State, config: Keys, folder: Path) -> None:
    optimiser = {"exp_avg": {name: torch.zeros_like(value) for name, value in state.items()}}
    save_dcp({"model": state, "optimizer": {"state": optimiser}, "step": 3}, folder / "source")


def paired(rows: Tensor, heads: int) -> Tensor:
    """Rows of halves (0, 2, 4, ..., 1, 3, 5, ...) as pairs (0, 1, 2, ...) in each head."""
    half = rows.shape[0] // heads // 2
    order = [
        head * 2 * half + part * half + channel
        for head in range(heads)
        for channel in range(half)
        for part in (0, 1)
    ]
    return rows[order].clone()


TITAN = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "model.layers": "layers",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def _titan(state: State, config: Keys, attention: str, head: str) -> State:
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    found = {}
    for name, value in state.items():
        for theirs, new in {**TITAN, "lm_head": head}.items():
            name = name.replace(theirs, new)
        for x in "qkv":
            if f"self_attn.{x}_proj" in name:
                value = paired(value, heads[x]) if x in heads else value
                name = name.replace(f"self_attn.{x}_proj", f"{attention}.w{x}")
        found[name] = value
    return found


def torchtitan(state: State, config: Keys, folder: Path) -> None:
    named = _titan(state, config, "attention.qkv_linear", "lm_head")
    older = {name: torch.zeros_like(value) for name, value in named.items()}
    save_dcp({**older, "train_state": torch.zeros(4)}, folder / "source" / "step-9")
    save_dcp({**named, "train_state": torch.zeros(4)}, folder / "source" / "step-10")


def torchtitan_before_03(state: State, config: Keys, folder: Path) -> None:
    save_dcp(_titan(state, config, "attention", "output"), folder / "source")


def by_group(parts: list[Tensor], config: Keys) -> Tensor:
    """Queries, keys and values, with those of each group of heads together."""
    groups = config["num_key_value_heads"]
    return torch.cat([part.chunk(groups)[group] for group in range(groups) for part in parts])


def _layer(state: State, layer: int) -> Callable[[str], Tensor]:
    return lambda name: state[f"model.layers.{layer}.{name}.weight"]


def _megatron(state: State, config: Keys) -> State:
    layers = [_layer(state, layer) for layer in range(config["num_hidden_layers"])]
    qkv = [by_group([one(f"self_attn.{x}_proj") for x in "qkv"], config) for one in layers]
    stacked = {
        "self_attention.linear_qkv.weight": qkv,
        "self_attention.linear_qkv.layer_norm_weight": [one("input_layernorm") for one in layers],
        "self_attention.linear_proj.weight": [one("self_attn.o_proj") for one in layers],
        "mlp.linear_fc1.layer_norm_weight": [one("post_attention_layernorm") for one in layers],
        "mlp.linear_fc1.weight": [
            torch.cat([one("mlp.gate_proj"), one("mlp.up_proj")]) for one in layers
        ],
        "mlp.linear_fc2.weight": [one("mlp.down_proj") for one in layers],
    }  # fmt: skip
    padding = torch.full((27, config["hidden_size"]), 9.0)
    return {
        **{f"decoder.layers.{name}": torch.stack(parts) for name, parts in stacked.items()},
        "embedding.word_embeddings.weight": torch.cat([state["model.embed_tokens.weight"], padding]),
        "output_layer.weight": torch.cat([state["lm_head.weight"], padding]),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }


def megatron(state: State, config: Keys, folder: Path) -> None:
    named, place = _megatron(state, config), folder / "source" / "iter_0000012"
    moments = {f"optimizer.state.exp_avg.{name}": value for name, value in named.items()}
    save_dcp({**named, **moments, "rng_state": b"0"}, place)
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / "source" / "latest_checkpointed_iteration.txt").write_text("12\n")


def megatron_arguments(config: Keys, rows: int) -> argparse.Namespace:
    """Arguments of Megatron-LM for the config of a Llama whose embedding has this many rows."""
    return argparse.Namespace(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"], num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"], group_query_attention=True,
        kv_channels=config["head_dim"], normalization="RMSNorm", norm_epsilon=config["rms_norm_eps"],
        swiglu=True, rotary_base=10000, position_embedding_type="rope", padded_vocab_size=rows,
        untie_embeddings_and_output_weights=True, add_bias_linear=False,
        max_position_embeddings=config["max_position_embeddings"],
    )  # fmt: skip


def _litgpt(state: State, config: Keys, fused: str) -> State:
    found = {
        "transformer.wte.weight": state["model.embed_tokens.weight"],
        "transformer.ln_f.weight": state["model.norm.weight"],
        "lm_head.weight": state["lm_head.weight"],
    }
    rest = {"self_attn.o_proj": "attn.proj", "mlp.gate_proj": "mlp.fc_1", "mlp.up_proj": "mlp.fc_2",
            "mlp.down_proj": "mlp.proj", "input_layernorm": "norm_1",
            "post_attention_layernorm": "norm_2"}  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        one, new = _layer(state, layer), f"transformer.h.{layer}"
        parts = [one(f"self_attn.{x}_proj") for x in "qkv"]
        rows = by_group(parts, config) if fused == "attn.attn" else torch.cat(parts)
        found[f"{new}.{fused}.weight"] = rows
        found |= {f"{new}.{theirs}.weight": one(name) for name, theirs in rest.items()}
    return found


def _save_litgpt(state: State, config: Keys, folder: Path, fused: str) -> None:
    place = folder / "source"
    place.mkdir(parents=True)
    torch.save({"model": _litgpt(state, config, fused), "step_count": 5}, place / "lit_model.pth")
    given = {
        "name": "small", "block_size": config["max_position_embeddings"],
        "padded_vocab_size": config["vocab_size"], "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"], "n_query_groups": config["num_key_value_heads"],
        "n_embd": config["hidden_size"], "head_size": config["head_dim"],
        "intermediate_size": config["intermediate_size"], "norm_class_name": "RMSNorm",
        "norm_eps": config["rms_norm_eps"], "mlp_class_name": "LLaMAMLP", "bias": False,
        "parallel_residual": False, "rotary_percentage": 1.0, "rope_base": 10000,
    }  # fmt: skip
    (place / "model_config.yaml").write_text(yaml.dump(given))


def litgpt(state: State, config: Keys, folder: Path) -> None:
    _save_litgpt(state, config, folder, "attn.qkv")


def litgpt_before_05(state: State, config: Keys, folder: Path) -> None:
    _save_litgpt(state, config, folder, "attn.attn")


def _parts(flat: Tensor, ranks: int, multiple: int = 1) -> list[Tensor]:
    """A flat vector, padded to a multiple, in equal parts."""
    size = -(-flat.numel() // (ranks * multiple)) * multiple
    padded = torch.cat([flat, flat.new_full((size * ranks - flat.numel(),), 7.0)])
    return [part.clone() for part in padded.split(size)]


def _zero(state: State, folder: Path, stage: int, ranks: int) -> None:
    place = folder / "source" / "global_step4"
    place.mkdir(parents=True)
    names = list(state)
    groups = [names[::2], names[1::2]]
    shapes = [{name: state[name].shape for name in group} for group in groups]
    about = {"module": {}, "buffer_names": [], "shared_params": {}, "param_shapes": shapes}
    held: list[list[Tensor]] = [[] for _ in range(ranks)]
    for group in groups:
        if stage == 3:  # each parameter is divided by itself
            cut = [_parts(state[name].flatten(), ranks) for name in group]
            for rank in range(ranks):
                held[rank].append(torch.cat([parts[rank] for parts in cut]))
        else:
            flat = torch.cat([state[name].flatten() for name in group])
            for rank, part in enumerate(_parts(flat, ranks, 2)):
                held[rank].append(part)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for rank in range(ranks):
        optimiser = {"zero_stage": stage, "partition_count": ranks, key: held[rank]}
        file = place / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimiser}, file)
        if stage == 3:
            torch.save(about, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage < 3:
        torch.save(about, place / "mp_rank_00_model_states.pt")
    (folder / "source" / "latest").write_text("global_step4")


def zero2(state: State, config: Keys, folder: Path) -> None:
    _zero(state, folder, 2, 3)


def zero3(state: State, config: Keys, folder: Path) -> None:
    _zero(state, folder, 3, 11)


def universal(state: State, config: Keys, folder: Path) -> None:
    place = folder / "source" / "global_step4_universal"
    for name, value in state.items():
        file = place / "zero" / name / "fp32.pt"
        file.parent.mkdir(parents=True)
        torch.save({"param": value, "cat_dim": 0}, file)
    (folder / "source" / "latest_universal").write_text("global_step4_universal")


def pickled(state: State, config: Keys, folder: Path) -> None:
    (folder / "source").mkdir(parents=True)
    torch.save(state, folder / "source" / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def pickled_shards(state: State, config: Keys, folder: Path) -> None:
    place = folder / "source"
    place.mkdir(parents=True)
    names = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(state)}
    for file in set(names.values()):
        torch.save({name: state[name] for name in state if names[name] == file}, place / file)
    (place / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


WRITERS = {
    "torch dcp": torch_dcp, "torchtitan": torchtitan, "torchtitan before 0.3": torchtitan_before_03,
    "megatron": megatron, "litgpt": litgpt, "litgpt before 0.5": litgpt_before_05, "zero 2": zero2,
    "zero 3": zero3, "universal": universal, "pytorch_model.bin": pickled,
    "pytorch_model.bin, two files": pickled_shards,
}  # fmt: skip


def write_adapter(folder: Path, tensors: State, **config: Any) -> None:
    """An adapter of PEFT: its names begin with `base_model.model.`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    named = {f"base_model.model.{name}": value for name, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    keys = {"peft_type": "LORA", "lora_alpha": 6, "r": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(keys))


def merged(weight: Tensor, a: Tensor, b: Tensor, alpha: float, rs: bool, magnitude: Tensor | None) -> Tensor:
    """The merged weight, by the papers' formulas, element by element, in float64."""
    scale = alpha / (math.sqrt(a.shape[0]) if rs else a.shape[0])
    change = torch.einsum("or,ri->oi", b.double(), a.double()) * scale
    whole = weight.double() + change
    if magnitude is None:
        return whole
    return magnitude.double()[:, None] * whole / whole.square().sum(1, keepdim=True).sqrt()
