"""Presets are the published models: their config.json, as it is read, and their number of parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from published_configs import PUBLISHED_DENSE, Config
from published_expert_configs import FURTHER, PUBLISHED_EXPERTS
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.spec import ModelSpec
from meshwright.spec.hf.families import SAME_AS
from meshwright.spec.model_names import REPOSITORIES
from meshwright.spec.presets import PRESETS

PUBLISHED = PUBLISHED_DENSE | PUBLISHED_EXPERTS

UNPUBLISHED = {"tiny", "small", "moe-tiny", "moe-small", "base", "gpt3-175b", "llama3-405b"}
"""Our own sizes, GPT-3, and Llama 3 405B, whose file is that of 3.1, trained on longer sequences."""


def read(folder: Path, config: Config) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSpec.model_validate({"hf": str(folder)})


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_are_the_published_models(preset: str, tmp_path: Path) -> None:
    _, parameters, config = PUBLISHED[preset]
    ignored = {"hf", "preset"}
    model = ModelSpec.model_validate({"preset": preset})
    assert model.model_dump(exclude=ignored) == read(tmp_path, config).model_dump(exclude=ignored)
    assert model.parameters == parameters


def test_every_preset_is_compared_or_said_not_to_be() -> None:
    assert PUBLISHED.keys() | UNPUBLISHED == PRESETS.keys()
    assert not PUBLISHED.keys() & UNPUBLISHED
    assert len({model for model, _, _ in PUBLISHED.values()}) == len(PUBLISHED)
    assert {preset: names[0] for preset, names in REPOSITORIES.items()} == {
        preset: model for preset, (model, _, _) in PUBLISHED.items()
    }


@pytest.mark.parametrize("preset", PUBLISHED)
def test_transformers_builds_models_of_the_same_size(preset: str) -> None:
    keys = {**PUBLISHED[preset][2]}
    name = keys.pop("model_type")
    config = AutoConfig.for_model(SAME_AS.get(name, name), **keys)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    model = ModelSpec.model_validate({"preset": preset})
    layers = theirs.get_decoder()
    layers = layers.h if model.family == "gpt2" else layers.layers
    assert len(layers) == model.layers
    assert theirs.get_input_embeddings().weight.shape == (model.vocab_size, model.hidden)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == model.parameters


@pytest.mark.parametrize("preset", FURTHER)
def test_files_of_glm_count_the_layer_for_further_tokens(preset: str) -> None:
    model = ModelSpec.model_validate({"preset": preset, "mtp_num_layers": 1})
    assert model.moe is not None
    biases = model.moe.experts * (model.layers + 1 - model.moe.dense_first)
    counted = model.parameters + 2 * model.vocab_size * model.hidden + biases
    assert counted == PUBLISHED[preset][1] + FURTHER[preset]


ACTIVE = {
    "qwen3-30b-a3b": (3.3, 0), "qwen3-235b-a22b": (22, 0), "qwen3-coder-480b-a35b": (35, 0),
    "olmoe-1b-7b": (1.3, 0), "gpt-oss-20b": (3.61, 1), "gpt-oss-120b": (5.13, 1), "glm4.5": (32, 2),
    "glm4.5-air": (12, 2), "mixtral-8x7b": (12.9, 0), "mixtral-8x22b": (39, 0), "deepseek-v2-lite": (2.4, 1),
    "deepseek-v2": (21, 0), "deepseek-v3": (37, 0), "moonlight-16b-a3b": (2.24, 2), "kimi-k2": (32.6, 0),
}  # fmt: skip
"""Parameters that one token is computed with, in billions, by papers and model cards, and how many matrices
of the vocabulary they leave out."""


@pytest.mark.parametrize("preset", PUBLISHED_EXPERTS)
def test_active_parameters_are_the_published_ones(preset: str) -> None:
    published, left_out = ACTIVE[preset]
    model = ModelSpec.model_validate({"preset": preset})
    active = model.active_parameters - left_out * model.vocab_size * model.hidden
    assert active / 1e9 == pytest.approx(published, rel=0.025)
