"""The line that says what a run takes of trained weights: family, format, template, tokenizer, and where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from runs_from_weights import flags, told, trained
from safetensors.torch import load_file

from foreign_files import WRITERS, write_adapter
from meshwright import api
from meshwright.api.initial_weights import initial_weights_told
from meshwright.api.source import keys_of_source
from meshwright.cli.main import main
from meshwright.spec import UserError, load

DCP = "a checkpoint in the format torch DCP with the names of"
KINDS = {
    "torch dcp": f"{DCP} HF", "torchtitan": f"{DCP} torchtitan", "megatron": f"{DCP} Megatron-Core",
    "litgpt": "a checkpoint in the format torch.save with the names of litgpt",
    "zero 2": "a checkpoint in the format DeepSpeed ZeRO with the names of HF",
    "universal": "a checkpoint in the format DeepSpeed universal with the names of HF",
    "pytorch_model.bin": "an HF folder",
}  # fmt: skip


def line_from(source: Path | str, theirs: Path) -> str:
    return initial_weights_told(load(None, [*keys_of_source(str(source)), *flags(theirs).items()])) or ""


def written(kind: str, theirs: Path, folder: Path) -> Path:
    """A checkpoint of another program, with the config.json and the tokenizer of `theirs` beside it."""
    state = load_file(theirs / "model.safetensors")
    WRITERS[kind](state, json.loads((theirs / "config.json").read_text()), folder)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(theirs / file, folder / "source" / file)
    return folder / "source"


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_another_program_is_told(kind: str, theirs: Path, tmp_path: Path) -> None:
    source = written(kind, theirs, tmp_path)
    described = "" if kind.startswith("pytorch") else f", described by {source / 'config.json'}"
    line = line_from(source, theirs)
    assert line.startswith(f"weights: those of {source} (131k parameters)")
    assert f"; {KINDS[kind]}{described}, family llama, " in line
    assert line.endswith(
        f", chat template of {source / 'tokenizer_config.json'}; text by {source / 'tokenizer.json'}"
    )


def test_an_hf_folder_and_a_run_are_told(theirs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(theirs, tmp_path / "hf"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    line = line_from(folder, theirs)
    assert f"; an HF folder, family llama, chat template of {folder / 'chat_template.jinja'}; text by" in line
    trained(theirs, tmp_path / "run", model__hf=folder)
    for source, kind in (("run", "newest checkpoint"), ("run/checkpoints/step-00000001", "of step 1")):
        line = line_from(tmp_path / source, theirs)
        assert "; a run, its " in line and f"{kind}, family llama, chat template of" in line
    assert "chat template" not in told(theirs, model__hf=folder, data__tokenizer="byte")


def test_an_adapter_is_told_with_its_base(theirs: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", {}, base_model_name_or_path=str(theirs))
    line = line_from(tmp_path / "adapter", theirs)
    assert f"; an adapter of PEFT on {theirs}, described by {theirs / 'config.json'}, family llama" in line


def test_a_model_of_the_hubs_cache_is_told(theirs: Path, tmp_path: Path) -> None:
    cached = tmp_path / "models--org--small" / "snapshots" / ("0" * 40)
    shutil.copytree(theirs, cached)
    assert "; org/small of the hub, in its cache on this machine, family llama, " in line_from(cached, theirs)


def test_the_folder_that_describes_bare_weights_gives_the_tokenizer(theirs: Path, tmp_path: Path) -> None:
    WRITERS["torch dcp"](
        load_file(theirs / "model.safetensors"), json.loads((theirs / "config.json").read_text()), tmp_path
    )
    given = {"model.weights": str(tmp_path / "source"), "model.hf": str(theirs)}
    spec = load(None, [*given.items(), *flags(theirs).items()])
    assert spec.data.tokenizer == str(theirs / "tokenizer.json")
    assert spec.model.weights == str(tmp_path / "source")


def test_a_plan_for_weights_without_a_config_asks_for_the_model(theirs: Path, tmp_path: Path) -> None:
    source = written("litgpt", theirs, tmp_path)
    (source / "config.json").unlink()
    words = ["plan", "--from", str(source), "--cluster", "h100", "--gpus", "8", "--batch-tokens", "1M"]
    with pytest.raises(
        UserError, match=rf"^--from: {source} has no config\.json, by which a model is planned"
    ):
        main(words)


def test_errors_have_the_key_that_names_the_checkpoint(theirs: Path, tmp_path: Path) -> None:
    """A model that no config.json describes, and names that are not known, for each way to open it."""
    source = written("torchtitan", theirs, tmp_path)
    config = json.loads((source / "config.json").read_text()) | {"model_type": "mistral"}
    (source / "config.json").write_text(json.dumps(config))
    names = rf"{source}/step-10: torchtitan's names are read for"
    with pytest.raises(UserError, match=f"^--from: {names}"):
        keys_of_source(str(source))
    with pytest.raises(UserError, match=f"^model.weights: {names}"):
        trained(theirs, tmp_path / "run", model__weights=source, model__hf=source)
    with pytest.raises(UserError, match=f"^import: {names}"):
        api.import_hf(source, tmp_path / "imported")
    (source / "config.json").unlink()
    with pytest.raises(
        UserError, match=rf"^--from: .* give --model.weights {source} --model.hf FOLDER, one with the model's"
    ):
        keys_of_source(str(source))
