"""Reading config.json: defaults, and what the decoder does not compute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec import ModelSpec, UserError

LLAMA = {
    "model_type": "llama", "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral", "num_key_value_heads": 2}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_key_value_heads": 2}
QWEN3_MOE = LLAMA | {"model_type": "qwen3_moe", "num_key_value_heads": 2}
DEEPSEEK = LLAMA | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "first_k_dense_replace": 1}
GPT2 = {"model_type": "gpt2", "vocab_size": 101, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 96}


def read(folder: Path, config: dict[str, Any]) -> ModelSpec:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSpec.model_validate({"hf": str(folder)})


def test_both_generations_of_rope_keys_read_alike(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}  # fmt: skip
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    assert read(tmp_path, old) == read(tmp_path, new)
    assert read(tmp_path, new).rope_theta == 5e5


def test_rope_scaling_comes_before_rope_parameters(tmp_path: Path) -> None:
    """One of both objects is taken whole, with its own base, as transformers does."""
    linear = {"rope_type": "linear", "factor": 4.0}
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
    both = read(tmp_path, LLAMA | newer | {"rope_scaling": linear})
    assert both == read(tmp_path, LLAMA | {"rope_scaling": linear})
    assert both.rope_theta == 1e4
    inner = read(tmp_path, LLAMA | {"rope_theta": 500.0, "rope_scaling": linear | {"rope_theta": 7.0}})
    assert inner.rope_theta == 7.0
    with pytest.raises(UserError, match="partial_rotary_factor"):
        read(tmp_path, LLAMA | newer)


def test_a_mistral_without_the_key_has_the_default_window(tmp_path: Path) -> None:
    assert read(tmp_path, MISTRAL).sliding_window == 4096
    assert read(tmp_path, MISTRAL | {"sliding_window": None}).sliding_window is None
    assert read(tmp_path, MISTRAL | {"model_type": "llama", "sliding_window": 7}).sliding_window is None


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_absent_keys_have_the_defaults_of_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = LLAMA | {"model_type": family, "hidden_size": 64, "num_attention_heads": 32}
    theirs = transformers.AutoConfig.for_model(**config)
    ours = read(tmp_path, config)
    assert ours.head_dim == theirs.head_dim
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.max_seq_len == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "qwen2_moe", "glm4_moe", "granitemoe", "gpt_oss"]


@pytest.mark.parametrize("family", MIXTURES)
def test_absent_keys_of_mixtures_have_the_defaults_of_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    heads, layers = {"deepseek_v3": 128}.get(family, 32), 5
    config = LLAMA | {"model_type": family, "num_attention_heads": heads, "num_hidden_layers": layers}
    if family != "deepseek_v3":
        config["hidden_size"] = 256
    theirs, ours = transformers.AutoConfig.for_model(**config), read(tmp_path, config)
    moe, windows = ours.moe, ("mixtral", "gpt_oss")
    assert moe is not None
    assert ours.kv_heads == theirs.num_key_value_heads
    assert (ours.max_seq_len, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours.sliding_window, ours.tied) == (theirs.sliding_window if family in windows else None, False)
    experts = theirs.num_experts if family == "qwen2_moe" else theirs.num_local_experts
    assert (moe.experts, moe.top_k) == (experts, theirs.num_experts_per_tok)
    assert moe.ffn == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert moe.renormalise == getattr(theirs, "norm_topk_prob", True)
    assert moe.aux_loss == getattr(theirs, "router_aux_loss_coef", 0.0)
    if family == "qwen2_moe":
        assert (moe.shared_ffn, ours.qkv_bias) == (theirs.shared_expert_intermediate_size, theirs.qkv_bias)
    if family == "glm4_moe":
        assert (moe.groups, moe.top_groups) == (theirs.n_group, theirs.topk_group)
        assert (moe.scale, moe.dense_first) == (theirs.routed_scaling_factor, theirs.first_k_dense_replace)
        assert ours.rope_dim == ours.head_dim * theirs.rope_parameters["partial_rotary_factor"]
    if family == "deepseek_v3":
        mla = ours.mla
        assert mla is not None
        assert (mla.kv_rank, mla.q_rank) == (theirs.kv_lora_rank, theirs.q_lora_rank)
        assert (mla.rope_dim, mla.v_dim) == (theirs.qk_rope_head_dim, theirs.v_head_dim)
        assert ours.head_dim == theirs.qk_head_dim
        assert (moe.groups, moe.top_groups) == (theirs.n_group, theirs.topk_group)
        assert (moe.scale, moe.dense_first) == (theirs.routed_scaling_factor, theirs.first_k_dense_replace)
        assert moe.shared_ffn == theirs.n_shared_experts * theirs.moe_intermediate_size


def test_yarn_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 32}
    old = read(tmp_path, DEEPSEEK | {"rope_theta": 5e4, "rope_scaling": yarn | {"type": "yarn"}})
    new = read(tmp_path, DEEPSEEK | {"rope_parameters": yarn | {"rope_theta": 5e4}})
    assert old == new and old.rope_theta == 5e4
    given = {"beta_fast": 32, "beta_slow": 1, "mscale": 0, "mscale_all_dim": 0, "truncate": True}
    assert read(tmp_path, DEEPSEEK | {"rope_theta": 5e4, "rope_scaling": yarn | given}) == old
    bare = {"rope_type": "yarn", "factor": 40}
    for config in ({"max_position_embeddings": 48}, {"original_max_position_embeddings": 48}):
        scaling = read(tmp_path, LLAMA | config | {"rope_scaling": bare}).rope_scaling
        assert scaling is not None and scaling.kind == "yarn" and scaling.original_max_seq_len == 48


@pytest.mark.parametrize(
    ("step", "dense", "layers", "sparse"),
    [
        (1, [], 4, [0, 1, 2, 3]),
        (1, None, 4, [0, 1, 2, 3]),
        (1, [0, 1], 4, [2, 3]),
        (2, [], 5, [1, 3]),
        (2, [1], 8, [3, 5, 7]),
        (1, [0, 2], 4, [1, 3]),
        (3, [], 3, [2]),
        (2, [], 3, [1]),
        (1, [1], 4, None),
        (1, [2, 3], 4, None),
        (1, [0, 1, 2, 3], 4, None),
        (5, [], 4, None),
    ],
)
def test_layers_with_experts_are_those_of_transformers(
    step: int, dense: list[int] | None, layers: int, sparse: list[int] | None, tmp_path: Path
) -> None:
    config = QWEN3_MOE | {
        "num_hidden_layers": layers,
        "decoder_sparse_step": step,
        "mlp_only_layers": dense,
    }
    if sparse is None:
        with pytest.raises(UserError, match="mlp_only_layers" if dense else "decoder_sparse_step"):
            read(tmp_path, config)
        return
    spec = read(tmp_path, config)
    assert [layer for layer in range(layers) if spec.has_experts(layer)] == sparse


def test_experts_are_counted_by_either_name(tmp_path: Path) -> None:
    for config, names in (
        (QWEN3_MOE, ("num_experts", "num_local_experts")),
        (DEEPSEEK, ("n_routed_experts", "num_local_experts")),
    ):
        old, new = (read(tmp_path, config | {name: 16}) for name in names)
        assert old == new and old.moe is not None and old.moe.experts == 16


def test_only_llama_and_qwen3_have_attention_biases(tmp_path: Path) -> None:
    for family, biases in (("llama", True), ("qwen3", True), ("mistral", False)):
        config = LLAMA | {"model_type": family, "num_key_value_heads": 2, "attention_bias": True}
        spec = read(tmp_path, config)
        assert (spec.qkv_bias, spec.out_bias) == (biases, biases)


WRONG = [None, "4", [4], True, 0, -4, 1.5, {}]
SIZES = [
    *((LLAMA, key) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                               "num_attention_heads", "max_position_embeddings")),
    (LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2}, "head_dim"),
    *((MIXTRAL, key) for key in ("num_local_experts", "num_experts_per_tok")),
    *((QWEN3_MOE, key) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size",
                                   "decoder_sparse_step")),
    *((DEEPSEEK, key) for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
                                  "n_group", "topk_group", "n_shared_experts", "kv_lora_rank",
                                  "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")),
    *((GPT2, key) for key in ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")),
]  # fmt: skip


@pytest.mark.parametrize(("config", "key"), SIZES)
def test_wrong_sizes_are_named(config: dict[str, Any], key: str, tmp_path: Path) -> None:
    for value in WRONG:
        with pytest.raises(UserError, match=rf"config\.json has {key} "):
            read(tmp_path, config | {key: value})


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (LLAMA, "num_key_value_heads"),
        (LLAMA, "head_dim"),
        (MISTRAL, "sliding_window"),
        (GPT2, "n_inner"),
    ],
)
def test_null_is_a_default_only_where_transformers_takes_it(
    config: dict[str, Any], key: str, tmp_path: Path
) -> None:
    read(tmp_path, config | {key: None})
    for value in WRONG[1:]:
        with pytest.raises(UserError, match=rf"config\.json has {key} "):
            read(tmp_path, config | {key: value})


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "initializer_range"])
def test_wrong_numbers_are_named(key: str, tmp_path: Path) -> None:
    for value in [None, "1", [1], True, 0, -1.0, float("nan"), float("inf")]:
        with pytest.raises(UserError, match=rf"config\.json has {key} "):
            read(tmp_path, LLAMA | {key: value})


def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    for content, message in (
        ("[" * 100_000, "nested too deeply"),
        ("{", "is not JSON"),
        ("[]", "JSON object"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=rf"config\.json .*{message}"):
            ModelSpec.model_validate({"hf": str(tmp_path)})
    with pytest.raises(UserError, match="cannot be used"):
        ModelSpec.model_validate({"hf": str(tmp_path / ("x" * 300))})

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"config\.json cannot be read \(Permission denied\)"):
        ModelSpec.model_validate({"hf": str(tmp_path)})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "falcon"}, 'model_type "falcon"; none of the \d+ families that are read'),
        (LLAMA | {"model_type": "mamba"}, "it has state-space layers, which this decoder does not compute"),
        (LLAMA | {"model_type": "nemotron_h"}, "it has state-space layers"),
        (LLAMA | {"model_type": "qwen3_next"}, "it has linear-attention layers"),
        (LLAMA | {"model_type": "lfm2"}, "it has convolution layers"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 3}, "layer_types .*; only full_attention"),
        (MIXTRAL | {"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv 8.0; only null is computed"),
        (
            DEEPSEEK | {"model_type": "deepseek_v2", "num_experts_per_tok": 3, "topk_method": "noaux_tc"},
            'topk_method "noaux_tc"',
        ),
        (
            MIXTRAL | {"model_type": "qwen2_moe", "use_sliding_window": True},
            "use_sliding_window true; only false is computed",
        ),
        (LLAMA | {"hidden_act": "relu"}, "relu"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "lacks the key 'short_factor'"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, -1], "long_factor": [1]}},
            r"short_factor \[1, -1\]; it must be a list of numbers above 0",
        ),
        (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0; only null is computed"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (MISTRAL | {"layer_types": ["full_attention"]}, r"layer_types \[.*; computed are"),
        (LLAMA | {"model_type": "qwen3", "layer_types": ["chunked"] * 3}, r"layer_types \[.*; computed are"),
        (
            MISTRAL | {"sliding_window": None, "layer_types": ["sliding_attention"] * 3},
            r"layer_types .*; sliding_attention has no window, as sliding_window is null",
        ),
        (
            LLAMA | {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3},
            r"layer_types .*; sliding_attention has no window, as use_sliding_window is false",
        ),
        ({key: LLAMA[key] for key in LLAMA if key != "hidden_size"}, "hidden_size"),
        (GPT2 | {"activation_function": "relu"}, "relu"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2 | {"n_embd": 66}, "n_embd 66; n_head 4"),
        (LLAMA | {"hidden_size": 66}, "hidden_size 66; num_attention_heads 4"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        (MIXTRAL | {"num_local_experts": 1}, "num_experts_per_tok null; a layer has 1 experts"),
        (
            MIXTRAL | {"router_aux_loss_coef": -1},
            "router_aux_loss_coef -1; it must be a number of at least 0",
        ),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers 3; it must be a list"),
        (QWEN3_MOE | {"mlp_only_layers": [True]}, r"mlp_only_layers \[true\]; it must be a list"),
        (QWEN3_MOE | {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        (DEEPSEEK | {"scoring_func": "softmax"}, 'scoring_func "softmax"; only "sigmoid"'),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK | {"attention_bias": True}, "attention_bias"),
        (
            DEEPSEEK | {"num_key_value_heads": 2},
            "num_key_value_heads 2; latent attention",
        ),
        (DEEPSEEK | {"n_group": 7}, "n_group 7; equal groups"),
        (DEEPSEEK | {"n_group": 256}, "n_group 256; equal groups of at least 2"),
        (DEEPSEEK | {"topk_group": 9}, "topk_group 9"),
        (DEEPSEEK | {"n_group": 128, "topk_group": 1}, "topk_group 1; a token takes 8 experts"),
        (DEEPSEEK | {"first_k_dense_replace": 3}, "first_k_dense_replace 3; with it none of the 3 layers"),
        (DEEPSEEK | {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7; it must be even"),
        (DEEPSEEK | {"v_head_dim": 256}, "v_head_dim 256"),
        (DEEPSEEK | {"q_lora_rank": 0}, "q_lora_rank 0"),
        (LLAMA | {"rope_scaling": {"type": "yarn"}}, "rope_scaling of .* lacks the key 'factor'"),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": -1}}, "mscale -1"),
        (LLAMA | {"model_type": ["llama"]}, "model_type"),
        (LLAMA | {"model_type": "qwen9"}, r"model_type \"qwen9\"; none of the .* did you mean 'qwen\d'\?"),
        (
            LLAMA | {"model_type": "gemma3", "vision_config": {}},
            'model_type "gemma3"; its vision_config says that it takes more than text',
        ),
        (LLAMA | {"model_type": {}}, "model_type"),
        (LLAMA | {"attention_bias": "false"}, "attention_bias"),
        (LLAMA | {"rope_parameters": "default"}, "rope_parameters"),
        (LLAMA | {"rope_scaling": [1]}, "rope_scaling"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling of .* lacks the key 'factor'"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": "2"}}, 'rope_scaling of .* has factor "2"'),
        (LLAMA | {"rope_scaling": {"type": []}}, r"rope_scaling of .* has type \[\]"),
    ],
)
def test_what_is_not_computed_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, config)


def test_a_whole_record_needs_no_file(tmp_path: Path) -> None:
    spec = read(tmp_path / "model", LLAMA)
    shutil.rmtree(tmp_path / "model")
    assert ModelSpec.model_validate(spec.model_dump(mode="json")) == spec
