"""Models by the names that people know, and what is said of a name that no model has."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from meshwright.spec import UserError, load
from meshwright.spec.model_argument import model_tables
from meshwright.spec.model_names import REPOSITORIES, preset_named
from meshwright.spec.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("gpt-oss-120b", "gpt-oss-120b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("qwen2.5:72b", "qwen2.5-72b"),
        ("Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Kimi-K2", "kimi-k2"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2"),
        ("GLM-4.5-Air", "glm4.5-air"),
        ("zai-org/GLM-4.5-Base", "glm4.5"),
        ("google/gemma-3-27b-it", "gemma3-27b"),
        ("allenai/Olmo-3-7B-Think", "olmo3-7b"),
        ("allenai/OLMo-2-0325-32B-Instruct", "olmo2-32b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("llama-3.3-70b", "llama3.1-70b"),
        ("unsloth/Llama-3.2-1B-Instruct", "llama3.2-1b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3"),
        ("microsoft/phi-4", "phi4"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama3.1-8b"),
    ],
)
def test_people_s_names_find_the_preset(name: str, preset: str) -> None:
    assert preset_named(name) == preset
    assert model_tables(name) == ({"model": {"preset": preset}}, "")


def test_the_key_of_a_preset_takes_the_same_names(tmp_path: Path) -> None:
    """In run files and as a flag, and the run has the preset's own name."""
    file = tmp_path / "run.toml"
    file.write_text('model = { preset = "Qwen/Qwen2.5-7B-Instruct" }\n')
    flag = [("model.preset", "Qwen/Qwen2.5-7B-Instruct")]
    for spec in (load(file), load(None, flag)):
        assert spec == load(None, [("model.preset", "qwen2.5-7b")])
    for name, says in (
        ("Qwen3-9B", "is not the name of a preset; did you mean 'qwen3-8b' or 'qwen3-14b'?"),
        (
            "acme/rocket",
            "is not the name of a preset; give a folder that holds its config.json, or one of the ",
        ),
        ("meta-llama/Llama-4-Scout-17B-16E", "has attention in chunks"),
    ):
        with pytest.raises(UserError, match=re.escape(f"--model.preset: '{name}' {says}")):
            load(None, [("model.preset", name)])
    with pytest.raises(UserError, match=r"it is the name of a preset: give --model\.preset qwen3-8b"):
        load(Path("Qwen/Qwen3-8B"))


def test_every_preset_and_repository_is_found_by_its_name() -> None:
    assert all(preset_named(preset) == preset for preset in PRESETS)
    assert all(preset_named(name) == preset for preset, names in REPOSITORIES.items() for name in names)
    names = Counter(preset_named(preset.upper().replace("-", "_")) for preset in PRESETS)
    assert set(names) == set(PRESETS)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama3-8", r"neither a preset, .*, nor a run file; did you mean 'llama3-8b'\?"),
        ("gpt2-larg", r"nor a run file; did you mean 'gpt2-large'\?"),
        ("lama-8b", r"nor a run file; did you mean 'llama3.1-8b', 'llama3-8b' or 'llama2-7b'\?"),
        ("Qwen3-9B", r"nor a run file; did you mean 'qwen3-8b' or 'qwen3-14b'\?"),
        ("Qwen/Qwen2.5-8B-Instruct", r"did you mean 'qwen2\.5-7b' or 'qwen2\.5-14b'\?"),
        ("Qwen2-7B", r"did you mean 'qwen2.5-7b'\?"),
        ("Llama-3.2-7B", r"did you mean 'llama3.1-8b' or 'llama3-8b'\?"),
        ("codellama-7b", r"did you mean 'llama2-7b', "),
        ("mixtral-8x7", r"did you mean 'mixtral-8x7b'\?"),
        (
            "mistral",
            r"did you mean 'mistral-7b', 'mistral-nemo-12b', 'mistral-small-24b' or 'mistral-large-123b'\?",
        ),
        ("deepseek", r"did you mean 'deepseek-v3', 'deepseek-v2' or 'deepseek-v2-lite'\?"),
        ("mistral-small", r"did you mean 'mistral-small-24b'\?"),
        ("gpt-oss", r"did you mean 'gpt-oss-20b' or 'gpt-oss-120b'\?"),
        ("acme/rocket", "give a folder that holds its config.json, or one of the presets that"),
        ("rocket", "nor a run file; give one of the presets that `meshwright spec presets` lists"),
        (
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            r"linear-attention layers \(linear_attention of layer_",
        ),
        ("meta-llama/Llama-4-Scout-17B-16E", r"\(attention_chunk_size\) .*, which no key of model says"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", r"an indexer chooses \(index_topk\)"),
        ("nvidia/Nemotron-H-8B-Base-8K", "state-space layers"),
        ("microsoft/Phi-4-mini-instruct", r"\(long_factor\), .*; give a folder that holds its config.json"),
    ],
)
def test_a_name_that_no_model_has_is_one_sentence(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        model_tables(name)
    assert str(error.value).startswith(f"MODEL: '{name}' ") and "\n" not in str(error.value)


def test_a_folder_is_not_taken_for_a_model_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Qwen/Qwen3-8B").mkdir(parents=True)
    for name in ("Qwen/Qwen3-8B", "runs/tiny", "a/b/qwen3-8b"):
        with pytest.raises(UserError, match="nor an HF folder"):
            model_tables(name)
    Path("Qwen/Qwen3-8B/config.json").write_text("{}")
    assert model_tables("Qwen/Qwen3-8B") == ({"model": {"hf": "Qwen/Qwen3-8B"}}, "")
