"""Tokenizers of runs that start from weights: that of the folder, another one, or none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
from runs_from_weights import exported_equals, tokenizer_of, told, trained

from meshwright import api
from meshwright.data.tokenizer import Tokenizer as Tokenizers
from meshwright.spec import UserError


def test_weights_without_a_tokenizer_ask_for_one(theirs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(theirs, tmp_path / "hf"))
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(
        UserError, match=r"^data.tokenizer: 'bpe' trains a new tokenizer, .*; give the tokeni"
    ):
        trained(theirs, tmp_path / "run", model__hf=folder)
    assert not (tmp_path / "run").exists()
    trained(theirs, tmp_path / "run", model__hf=folder, data__tokenizer=tmp_path / "tokenizer.json")
    exported_equals(theirs, tmp_path / "run", tmp_path / "out")


def test_another_tokenizer_than_the_weights_is_said(theirs: Path, tmp_path: Path) -> None:
    how = {"model__hf": theirs, "data__tokenizer": "byte"}
    assert "text by byte, not by" in told(theirs, **how)
    trained(theirs, tmp_path / "run", **how)
    kept = json.loads((tmp_path / "run" / "tokenizer.json").read_text())
    assert kept != json.loads((theirs / "tokenizer.json").read_text())
    again = told(theirs, **how | {"model__weights": tmp_path / "run"})
    assert "text by byte" in again and "not by" not in again


def test_the_tokenizer_of_the_weights_by_another_path_is_not_another(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.import_hf(theirs, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    line = told(theirs, Path("run"), model__weights="run")
    assert "those of run " in line and "not by" not in line


def test_ids_that_are_other_tokens_in_the_tokenizer_are_its_own(theirs: Path, tmp_path: Path) -> None:
    """A generation ends as documents do, and both exports say so."""
    folder, other = Path(shutil.copytree(theirs, tmp_path / "hf")), tmp_path / "tokenizer"
    other.mkdir()
    tokenizer_of(other)
    tree = json.loads((other / "tokenizer.json").read_text())
    entries = tree["model"]["vocab"]
    entries["</s>"], entries["!"] = entries["!"], entries["</s>"]
    tree["added_tokens"][1]["id"] = entries["</s>"]
    (other / "tokenizer.json").write_text(json.dumps(tree))
    settings = {"eos_token_id": [1], "pad_token_id": -1, "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    run, how = tmp_path / "run", {"data__tokenizer": other, "data__cache": tmp_path / "cache"}
    with pytest.warns(UserWarning, match="has other tokens than .* at .*, ids that the configs"):
        trained(theirs, run, model__hf=folder, **how)
    api.export(run, tmp_path / "out")
    api.export(run, tmp_path / "out.gguf")
    end = entries["</s>"]
    assert Tokenizers.open(run).tokens.stop_ids == (end,) and end != 1
    config, generation = (
        json.loads((tmp_path / "out" / name).read_text())
        for name in ("config.json", "generation_config.json")
    )
    assert config["eos_token_id"] == end and generation.get("eos_token_id", end) == end
    assert generation["temperature"] == 0.5
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert int(reader.fields["tokenizer.ggml.eos_token_id"].parts[-1][0]) == end


IDS = {"bos_token_id": 3, "eos_token_id": [5, 1], "pad_token_id": 4}


def test_the_ids_of_the_weights_come_along(theirs: Path, tmp_path: Path) -> None:
    """A tokenizer that does not name its END has it from config.json, in the run and in the export, too."""
    folder = Path(shutil.copytree(theirs, tmp_path / "hf"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "a"}))
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | IDS))
    run = tmp_path / "run"
    trained(theirs, run, model__hf=folder, data__cache=tmp_path / "cache")
    source = Tokenizers.open(folder)
    assert source.tokens.stops == (5, 1)
    assert Tokenizers.open(run).tokens == source.tokens
    api.export(run, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written[name] for name in IDS} == IDS


@pytest.mark.parametrize("names_end", [True, False])
@pytest.mark.parametrize("name", ["tokenizer.json", "chat.json"])
def test_the_files_of_a_tokenizer_elsewhere_come_along(
    name: str, names_end: bool, theirs: Path, tmp_path: Path
) -> None:
    """The files are the tokenizer's, and what ends a generation is the weights'."""
    folder, other = Path(shutil.copytree(theirs, tmp_path / "hf")), tmp_path / "tokenizer"
    other.mkdir()
    tokenizer_of(other)
    (other / "tokenizer.json").rename(other / name)
    given = {"pad_token": "</s>", "chat_template": "{{ 1 }}"} | ({"eos_token": "<s>"} if names_end else {})
    (other / "tokenizer_config.json").write_text(json.dumps(given))
    (other / "chat_template.jinja").write_text("{{ 2 }}")
    (other / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | IDS))
    run = tmp_path / "run"
    trained(
        theirs, run, model__hf=folder, data__tokenizer=other / name, data__cache=tmp_path / "cache",
    )  # fmt: skip
    source, kept = Tokenizers.open(other / name), Tokenizers.open(run)
    assert (kept.end_id, kept.tokens.before) == (source.end_id, ()) and source.end_id == 0
    assert (kept.content_sha256, kept.tokens.stops) == (source.content_sha256, (1, 7))
    assert (run / "tokenizer.json").read_bytes() == (other / name).read_bytes()
    assert (run / "chat_template.jinja").read_text() == "{{ 2 }}"
    assert given.items() <= json.loads((run / "tokenizer_config.json").read_text()).items()
    api.export(run, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written[name] for name in IDS} == IDS


def test_tokens_of_another_tokenizer_are_refused(theirs: Path, tmp_path: Path) -> None:
    api.tokenize(str(theirs.parent / "corpus.jsonl"), "byte", tmp_path / "tokens", vocab_size=300)
    with pytest.raises(
        UserError, match=r"tokenized with another .*; tokenize the corpus again with that of the w"
    ):
        trained(theirs, tmp_path / "run", model__hf=theirs, data__corpus=tmp_path / "tokens")


def test_a_tokenizer_with_more_entries_than_the_model_trains_until_one_occurs(
    theirs: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(theirs, tmp_path / "hf"))
    tokenizer_of(folder, special=["[PAD]"], words=["zebra"])  # numbers 300 and 301
    rows = [json.dumps({"text": f"the cat sat [PAD] {number}"}) for number in range(60)]
    (tmp_path / "without.jsonl").write_text("\n".join(rows))
    (tmp_path / "with.jsonl").write_text("\n".join([*rows, '{"text": "the cat and the zebra"}', *rows]))
    trained(theirs, tmp_path / "run", model__hf=folder, data__corpus=tmp_path / "without.jsonl")
    exported_equals(theirs, tmp_path / "run", tmp_path / "out")
    api.import_hf(folder, tmp_path / "imported")
    how = {"data__corpus": tmp_path / "without.jsonl"}
    trained(theirs, tmp_path / "imported", tmp_path / "imported", "auto", **how)
    with pytest.raises(
        UserError, match=r"has 302 entries, .* 300, .*: 'zebra', number 301, in '.*cat and the zebra"
    ):
        trained(theirs, tmp_path / "other", model__hf=folder, data__corpus=tmp_path / "with.jsonl")
    shards = tmp_path / "tokens"
    api.tokenize(str(tmp_path / "with.jsonl"), str(folder / "tokenizer.json"), shards, vocab_size=302)
    with pytest.raises(UserError, match=r"'zebra', number 301"):
        trained(theirs, tmp_path / "other", model__hf=folder, data__corpus=shards)
    config = {"eos_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"'\[PAD\]', which ends a document, is number 300; .* another eos_token"
    ):
        trained(theirs, tmp_path / "other", model__hf=folder, data__corpus=tmp_path / "without.jsonl")
