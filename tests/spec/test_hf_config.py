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
    mistral = LLAMA | {"model_type": "mistral"}
    assert read(tmp_path, mistral).sliding_window == 4096
    assert read(tmp_path, mistral | {"sliding_window": None}).sliding_window is None
    assert read(tmp_path, mistral | {"model_type": "llama", "sliding_window": 7}).sliding_window is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "mamba"}, "mamba"),
        (LLAMA | {"hidden_act": "relu"}, "relu"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window"),
        ({key: LLAMA[key] for key in LLAMA if key != "hidden_size"}, "hidden_size"),
        (GPT2 | {"activation_function": "relu"}, "relu"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights"),
    ],
)
def test_what_is_not_computed_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, config)


def test_a_whole_record_needs_no_file(tmp_path: Path) -> None:
    spec = read(tmp_path / "model", LLAMA)
    shutil.rmtree(tmp_path / "model")
    assert ModelSpec.model_validate(spec.model_dump(mode="json")) == spec
