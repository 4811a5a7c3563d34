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


def test_a_mistral_without_the_key_has_the_default_window(tmp_path: Path) -> None:
    mistral = LLAMA | {"model_type": "mistral", "num_key_value_heads": 2}
    assert read(tmp_path, mistral).sliding_window == 4096
    assert read(tmp_path, mistral | {"sliding_window": None}).sliding_window is None
    assert read(tmp_path, mistral | {"model_type": "llama", "sliding_window": 7}).sliding_window is None


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
        (LLAMA | {"model_type": "mistral", "num_key_value_heads": 2}, "sliding_window"),
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
    with pytest.raises(UserError, match="cannot be read"):
        ModelSpec.model_validate({"hf": str(tmp_path / ("x" * 300))})

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UserError, match=r"config\.json cannot be read \(Permission denied\)"):
        ModelSpec.model_validate({"hf": str(tmp_path)})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "mamba"}, "mamba"),
        (LLAMA | {"hidden_act": "relu"}, "relu"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window"),
        ({key: LLAMA[key] for key in LLAMA if key != "hidden_size"}, "hidden_size"),
        (GPT2 | {"activation_function": "relu"}, "relu"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2 | {"n_embd": 66}, "n_embd 66; n_head 4"),
        (LLAMA | {"hidden_size": 66}, "hidden_size 66; num_attention_heads 4"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        (LLAMA | {"model_type": ["llama"]}, "model_type"),
        (LLAMA | {"model_type": {}}, "model_type"),
        (LLAMA | {"attention_bias": "false"}, "attention_bias"),
        (LLAMA | {"rope_parameters": "default"}, "rope_parameters"),
        (LLAMA | {"rope_scaling": [1]}, "rope_scaling"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling of .* lacks the key 'factor'"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling of .* has factor '2'"),
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
