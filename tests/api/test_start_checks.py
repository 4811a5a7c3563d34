"""Checks that cost nothing come before a machine is measured, a plan made or a rank started."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshwright.api import runs
from meshwright.api.folders import folder_of
from meshwright.api.start_checks import check_writable_folder
from meshwright.cli.main import main
from meshwright.rank import auto_layout
from meshwright.spec import UserError
from meshwright.spec.hf.safetensors_header import check_whole_files


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a machine was measured, or ranks were started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(auto_layout, "present", refused)
    monkeypatch.setattr(auto_layout, "plan", refused)
    monkeypatch.setattr(runs, "train_on_ranks", refused)
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "bad.json").write_text('{"a": 1')
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text " * 1000)


MISTAKES = [
    (["--data.corpus", "gone.txt"], "data.corpus: there is no file or folder gone.txt"),
    (["--data.corpus", "chats.jsonl"], "data.tokenizer: chats.jsonl holds chats, which need the tokenizer"),
    (
        ["--data.mixture.file", "1", "--data.mixture.gone", "2"],
        "data.corpus: there is no file or folder gone",
    ),
    (["--data.corpus", "file", "--data.tokenizer", "gone.json"], "data.tokenizer: "),
    (["--data.corpus", "file", "--data.tokenizer", "bpe:9999999"], "data.tokenizer: 'bpe:9999999' has more"),
    (["--data.corpus", "file", "--out", "file/run"], "--out: "),
]


@pytest.mark.parametrize(("words", "sentence"), MISTAKES, ids=[words[1] for words, _ in MISTAKES])
@pytest.mark.parametrize("layout", [[], ["--layout.dp", "2"]], ids=["planned", "given"])
def test_inputs_are_looked_at_first(
    words: list[str], sentence: str, layout: list[str], tmp_path: Path
) -> None:
    out = [] if "--out" in words else ["--out", "run"]
    with pytest.raises(UserError) as refusal:
        main(["train", *words, *out, *layout])
    assert str(refusal.value).startswith(sentence) and refusal.value.code == 2
    assert not (tmp_path / "run").exists() and not (tmp_path / "runs").exists()


def test_good_inputs_pass() -> None:
    with pytest.raises(AssertionError, match="a machine was measured"):
        main(["train", "--data.corpus", "file", "--out", "run"])


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable_folder(tmp_path / "a" / "b")
    check_writable_folder(None)
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(
        UserError, match=r"--out: .*b cannot be written, as .* may not be; give another --out"
    ):
        check_writable_folder(tmp_path / "a" / "b")


@pytest.mark.parametrize("left", [1, 7, 50, -1])
def test_files_that_were_cut_are_told_by_their_headers(left: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64), "b": torch.ones(3)}, path)
    check_whole_files(tmp_path, "model.weights")
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    with pytest.raises(
        UserError,
        match=r"model.weights: .* is not a readable safetensors file: it has [\d,]+ of at least [\d,]+ bytes",
    ):
        check_whole_files(tmp_path, "model.weights")


def test_a_part_of_a_model_that_is_missing_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part.safetensors"}}')
    with pytest.raises(UserError, match=r"names the file part.safetensors, which is not in"):
        check_whole_files(tmp_path, "model.weights")


@pytest.mark.parametrize("there", [False, True])
def test_a_start_that_fails_takes_its_folder_with_it(there: bool, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    if there:
        out.mkdir()
    for name, kept in (("tokenizer.json", there), ("run.json", True)):
        with pytest.raises(UserError), folder_of(out) as folder:
            folder.mkdir(exist_ok=True)
            (folder / name).touch()
            raise UserError("the weights are not finite")
        assert (out / name).exists() == kept
