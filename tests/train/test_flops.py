"""Counts of FLOPs that know the model: those of the operators of a dry run, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from covering import some
from meshwright.comm.mesh import Mesh
from meshwright.distil.stored_answers import StoredAnswers
from meshwright.distil.teacher import Teacher
from meshwright.dryrun.rank_step import rehearse
from meshwright.model.attention import attention_mask
from meshwright.spec import ModelSpec, RunSpec, load
from meshwright.spec.architecture import Architecture
from meshwright.spec.other_models import teacher_of
from meshwright.train.metrics import Metrics
from meshwright.train.parts import Sources
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult
from ranks import Ranks

LENGTH = 32
BASE: dict[str, object] = {
    "model.layers": 2, "model.hidden": 48, "model.ffn": 64, "model.heads": 4, "model.kv_heads": 2,
    "model.head_dim": 16, "model.vocab_size": 96, "model.max_seq_len": 64, "data.corpus": "synthetic",
    "data.seq_len": LENGTH, "train.batch_tokens": 2 * LENGTH, "precision.compute": "fp32",
    "layout.micro_batch": 2,
}  # fmt: skip
MOE: dict[str, object] = {"model.moe.experts": 4, "model.moe.top_k": 2, "model.moe.ffn": 24}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen3": {"model.qk_norm": "true", "model.tied": "true"},
    "mistral": {"model.sliding_window": 8},
    "qwen2": {"model.qkv_bias": "true"},
    "smollm3": {"model.rope_layers": "true,false"},
    "granite": {"model.embedding_scale": 3, "model.residual_scale": 0.5, "model.attention_scale": 0.2},
    "phi3": {"model.rope_dim": 12},
    "starcoder2": {"model.norm": "layernorm", "model.activation": "gelu_tanh", "model.mlp_bias": "true"},
    "gemma2": {
        "model.norm_placement": "both", "model.norm_unit_offset": "true", "model.activation": "geglu_tanh",
        "model.attention_softcap": 50, "model.logit_softcap": 30, "model.sliding_window": 8,
        "model.layer_types": "sliding_attention,full_attention", "model.tied": "true",
    },
    "gemma3_text": {
        "model.norm_placement": "both", "model.norm_unit_offset": "true", "model.qk_norm": "true",
        "model.activation": "geglu_tanh", "model.sliding_window": 8,
        "model.layer_types": "sliding_attention,full_attention",
    },
    "glm4": {"model.norm_placement": "both", "model.rope_dim": 8},
    "cohere2": {"model.parallel_block": "true", "model.norm": "layernorm", "model.norm_bias": "false"},
    "olmo2": {"model.norm_placement": "post", "model.qk_norm": "true", "model.qk_norm_over": "all"},
    "olmo3": {
        "model.norm_placement": "post", "model.qk_norm": "true", "model.qk_norm_over": "all",
        "model.sliding_window": 8, "model.layer_types": "sliding_attention,full_attention",
    },
    "gpt2": {
        "model.norm": "layernorm", "model.activation": "gelu_tanh", "model.position": "learned",
        "model.qkv_bias": "true", "model.out_bias": "true", "model.mlp_bias": "true", "model.tied": "true",
        "model.kv_heads": 4,
    },
    "mixtral": MOE | {"model.sliding_window": 12},
    "qwen3_moe": MOE | {
        "model.layers": 3, "model.qk_norm": "true", "model.moe.dense_first": 1, "model.moe.every": 2,
    },
    "olmoe": MOE | {"model.qk_norm": "true", "model.qk_norm_over": "all"},
    "qwen2_moe": MOE | {
        "model.qkv_bias": "true", "model.moe.shared_ffn": 40, "model.moe.shared_gate": "true",
    },
    "glm4_moe": MOE | {
        "model.rope_dim": 8, "model.moe.shared_ffn": 24, "model.moe.router": "sigmoid",
        "model.moe.bias": "true", "model.moe.dense_first": 1,
    },
    "deepseek_v2": MOE | {
        "model.moe.shared_ffn": 40, "model.moe.groups": 2, "model.moe.group_score": "max",
        "model.moe.renormalise": "false", "model.kv_heads": 4, "model.mla.kv_rank": 8,
        "model.mla.rope_dim": 6, "model.mla.v_dim": 10,
    },
    "gpt_oss": MOE | {
        "model.attention_sinks": "true", "model.moe.router_bias": "true", "model.moe.expert_bias": "true",
        "model.moe.activation": "clamped_swiglu", "model.qkv_bias": "true", "model.out_bias": "true",
        "model.sliding_window": 8, "model.layer_types": "sliding_attention,full_attention",
    },
    "granitemoe": MOE | {"model.embedding_scale": 3, "model.attention_scale": 0.2},
    "deepseek_v3": MOE | {
        "model.moe.shared_ffn": 40, "model.moe.dense_first": 1, "model.kv_heads": 4, "model.mla.q_rank": 12,
        "model.mla.kv_rank": 8, "model.mla.rope_dim": 6, "model.mla.v_dim": 10,
    },
}  # fmt: skip


def spec_of(family: str, **flags: object) -> RunSpec:
    given = BASE | {"model.family": family} | FAMILIES[family]
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in given.items()])


def counted(spec: RunSpec) -> int:
    """FLOPs of the matrix products and attention of one rank's step."""
    found, step = [], Trainer.step

    def stepped(trainer: Trainer, *arguments: Any, **more: Any) -> StepResult:
        with FlopCounterMode(display=False) as counter:
            result = step(trainer, *arguments, **more)
        found.append(counter.get_total_flops())
        return result

    with patch.object(Trainer, "step", stepped):
        rehearse(spec, 0, torch.device("cpu"))
    (total,) = found
    return int(total)


def test_every_family_is_counted() -> None:
    assert set(FAMILIES) == set(get_args(Architecture.model_fields["family"].annotation))


QUICK = ("gemma2", "cohere2", "olmo3", "gpt2", "mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3")
"""Each kind of block, of attention and of router."""


@pytest.mark.parametrize("family", some(FAMILIES, QUICK))
def test_flops_are_those_of_the_operators_of_a_dry_run(family: str) -> None:
    """Equal but for what the operators' own count says otherwise of attention and of norms.

    An operator of attention is counted with every key of the sequence, and its backward with three products
    for the keys' channels in place of two, as it computes the scores again.
    """
    spec = spec_of(family)
    model, tokens = spec.model, spec.train.batch_tokens
    again = 2 * model.layers * model.heads * model.head_dim * LENGTH
    unseen = sum(3 * model.flops_per_key * (LENGTH - kind.keys_seen(LENGTH)) for kind in model.layer_kinds)
    assert (unseen > 0) == (model.sliding_window is not None)
    found = counted(spec) / tokens - again - unseen - norm_flops(model)
    assert found == model.flops_per_token(LENGTH)


def norm_flops(model: ModelSpec) -> float:
    """FLOPs on a token of RMSNorm's backward: two scalar products, by token and by channel."""
    if model.norm != "rmsnorm":
        return 0.0
    channels = model.hidden * (model.block_norms * model.layers + 1)
    if model.qk_norm:
        channels += model.layers * model.head_dim * (model.heads + model.kv_heads)
    if model.mla is not None:
        channels += model.layers * ((model.mla.q_rank or 0) + model.mla.kv_rank)
    return 4.0 * channels


@pytest.mark.parametrize(("length", "window"), [(32, None), (32, 32), (32, 8), (7, 3), (40, 1), (9, 64)])
def test_keys_are_those_that_the_mask_leaves(length: int, window: int | None) -> None:
    model = ModelSpec.model_validate({"sliding_window": window})
    (kind,) = model.kinds
    mask = attention_mask(length, length, window, None, torch.zeros(()))
    visible = torch.ones(length, length).tril() if mask is None else mask[0, 0].isfinite().double()
    assert kind.keys_seen(length) == (length if mask is None else int(visible.sum(1).max()))
    assert abs(kind.keys_visible(length) - float(visible.sum(1).mean())) <= 0.5
    whole, causal = model.flops_per_token(length), model.flops_per_token(length, causal=True)
    share = kind.keys_visible(length) / kind.keys_seen(length)
    weights = model.flops_per_token(0)
    assert causal - weights == pytest.approx(share * (whole - weights), rel=1e-12)
    assert 0.5 <= share <= 1.0


def mfu_at_one_flop_a_second(mesh: Mesh, spec: RunSpec) -> float:
    """The FLOPs that a run with a teacher counts for a token."""
    own = teacher_of(spec)
    assert own is not None
    metrics = Metrics(Trainer(spec, mesh, sources=Sources(Teacher(spec, own, mesh))))
    metrics.peak_flops = 1.0
    return float(metrics._mfu(1.0)["mfu"])


def test_a_teacher_that_answers_in_the_run_counts_its_forward(ranks: Ranks, tmp_path: Path) -> None:
    teacher = spec_of("mistral", model__layers=1)
    (tmp_path / "run.json").write_text(json.dumps({"spec": teacher.to_json()}))
    spec = spec_of("llama", distil__teacher=tmp_path)
    student, whole = (each.model.flops_per_token(LENGTH) for each in (spec, teacher))
    assert ranks.run(spec.layout, mfu_at_one_flop_a_second, spec) == [student + whole / 3]
    assert StoredAnswers.flops_per_token == 0
