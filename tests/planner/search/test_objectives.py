"""The largest model of a shape: its proportions, that it fits and the next does not, and its run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.planner.search.objectives import described, largest_model, sized
from meshwright.planner.search.problem import SearchProblem
from meshwright.planner.search.request import PlanRequest
from meshwright.spec import ModelSpec, RunSpec, UserError, load
from meshwright.spec.toml import to_toml

SMALL: dict[str, Any] = {"seq_len": 1024, "batch_tokens": "64k"}


def wish(model: str, gpus: int, seq_len: int = 1024) -> SearchProblem:
    problems, _ = PlanRequest(model, "h100", gpus, seq_len, 64 * seq_len).problems()
    return problems[0]


SHAPES = ("llama3-8b", "qwen3-32b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "base")


@pytest.mark.parametrize("preset", SHAPES)
@pytest.mark.parametrize("size", [-4, 1, 4, 11])
def test_proportions_are_kept(preset: str, size: int) -> None:
    given = ModelSpec(preset=preset)
    model = sized(given, size)
    ends = [(1 if each.tied else 2) * each.vocab_size * each.hidden for each in (model, given)]
    blocks = (given.parameters - ends[1]) * 2 ** (size / 4)
    assert model.parameters - ends[0] == pytest.approx(blocks, rel=0.1)
    assert model.heads * given.kv_heads == given.heads * model.kv_heads
    assert model.hidden * given.kv_heads == pytest.approx(given.hidden * model.kv_heads, abs=given.kv_heads)
    assert model.ffn * given.hidden == pytest.approx(given.ffn * model.hidden, rel=0.05)
    aspect = model.hidden / model.layers / (given.hidden / given.layers)
    assert 0.6 < aspect < 1.7
    kept = ("head_dim", "vocab_size", "family", "norm", "activation", "mla", "tied", "max_seq_len")
    assert all(getattr(model, name) == getattr(given, name) for name in kept)
    if given.moe is not None and model.moe is not None:
        assert (model.moe.experts, model.moe.top_k) == (given.moe.experts, given.moe.top_k)
        assert model.moe.ffn * given.hidden == pytest.approx(given.moe.ffn * model.hidden, rel=0.05)


def test_sizes_grow() -> None:
    given = ModelSpec(preset="llama3-8b")
    found = [sized(given, size).parameters for size in range(-8, 21)]
    assert found == sorted(set(found))
    assert sized(given, 0) == given


def test_the_largest_model_fits_and_the_next_size_does_not(tmp_path: Path) -> None:
    found = api.plan("base", "h100", gpus=1, objective="largest-model", top=1, **SMALL)
    model = found.model_found
    assert model is not None and model == found.best.spec.model
    sizes = [sized(ModelSpec(preset="base"), size) for size in range(1, 60)]
    place = sizes.index(model)
    assert not wish("base", 1).with_model(sizes[place + 1]).fits()
    told = json.loads(json.dumps(found.to_json()))
    assert told["model_found"]["layers"] == model.layers and told["parameters"] == model.parameters
    written = tmp_path / "plan.toml"
    written.write_text(to_toml(found.best.spec))
    assert load(written) == found.best.spec
    assert RunSpec.model_validate(found.best.spec.to_json()) == found.best.spec
    assert str(model.layers) in described(model) and f"{model.hidden:,}" in described(model)


def test_a_model_that_does_not_fit_is_made_smaller() -> None:
    found = largest_model(wish("llama3-70b", 8)).base.model
    given = wish("llama3-70b", 8).base.model
    assert found.parameters < given.parameters
    sizes = [sized(given, size) for size in range(-20, 0)]
    assert not wish("llama3-70b", 8).with_model([*sizes, given][sizes.index(found) + 1]).fits()


def test_where_not_even_the_smallest_fits_there_is_a_sentence() -> None:
    with pytest.raises(UserError, match="not even the smallest model of the shape of base") as error:
        api.plan("base", "h100", gpus=1, objective="largest-model", max_memory=7e8, **SMALL)
    assert "\n" not in str(error.value)
    assert api.plan("base", "h100", gpus=1, top=1, **SMALL).model_found is None
