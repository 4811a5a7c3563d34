"""Help: short enough to be read, and in full what is named after it."""

from __future__ import annotations

import re

import pytest

from meshwright.cli import help as helps
from meshwright.cli.main import find, main
from meshwright.cli.overview import SUMMARIES
from meshwright.spec import UserError
from meshwright.spec.run import RunSpec
from meshwright.spec.schema import known_keys

MOST_LINES = 60


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["spec"], *([*name.split(), "--help"] for name in SUMMARIES)]
)
def test_help_is_readable_and_fits_a_screen(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *words).splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) < MOST_LINES
    assert "meshwright" in lines[0]


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    program = shown(capsys, "--help")
    for name, summary in SUMMARIES.items():
        assert find(*name.split()).summary == summary
        assert name in program and summary.split()[0] in program


def test_help_all_has_every_key_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "train", "--help", "all")
    lines = re.sub(r"\|\n +", "|", text).splitlines()  # long lists of values go on
    for key in known_keys().values():
        head = f"  {key.name.split('.', 1)[1]} "
        assert any(line.startswith(head) and key.text in line for line in lines), key.name
    assert "megatron-2021 " in shown(capsys, "plan", "--help", "all")


@pytest.mark.parametrize("name", [name for name in SUMMARIES if find(*name.split()).keys])
def test_help_has_the_keys_most_used(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *name.split(), "--help")
    keys = re.findall(r"^  --(\w+\.\S+)", text, re.M)
    listed = [key for argument in find(*name.split()).arguments for key in argument.listed]
    assert set(keys) == set(listed) if listed else len(set(keys)) == len(keys) == 10
    assert set(keys) <= known_keys().keys()
    assert f"meshwright {name} --help all" in " ".join(text.split())


def test_each_list_of_keys_is_of_a_verb() -> None:
    assert helps.COMMON.keys() <= SUMMARIES.keys()


def test_names_after_help_are_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    table = shown(capsys, "train", "--help", "recompute")
    assert table.startswith("[recompute]  none: ") and "list of attention|matmul" in table
    two = shown(capsys, "train", "--help", "train.lr", "layout", "--train.steps", "3")
    assert re.findall(r"^\[(\w+)\]", two, re.M) == ["train", "layout"]
    assert two.count("= 0.0003") == 1 and "steps " not in two and "context_mode " in two
    assert "expert" in shown(capsys, "plan", "--help", "model.moe")
    assert "adamw8bit" in shown(capsys, "train", "--help", "optimiser")
    assert "nemo-graphs" in shown(capsys, "plan", "--help", "stack")
    assert shown(capsys, "train", "--help=recompute") == table
    for parts in (["precision"], ["--help", "precision"]):  # a flag and a table have that name
        both = shown(capsys, "verify", "--help", *parts)
        assert "--precision FORMATS" in both and "[precision]" in both


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "--help", "layuot"], ["'layuot'", "of train", "did you mean 'layout'"]),
        (["train", "--help", "optimizer"], ["did you mean 'train.optimiser'"]),
        (["train", "-h", "zzzz"], ["'zzzz'", "the tables are model, data"]),
        (["export", "--help", "train"], ["'train' is no flag of export"]),
        (["generate", "--help", "train"], ["'train'", "of generate", "the tables are layout"]),
    ],
)
def test_an_unknown_name_is_a_mistake(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        main(words)
    assert all(part in str(refusal.value) for part in parts) and refusal.value.code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--train.lr", "3", "--help", "--nproc", "2"],
        ["--help", "run.toml", "--layout.dp", "2"],
        ["--nproc", "2", "-h"],
        ["gone", "--help", "tests"],
    ],
)
def test_help_anywhere_is_help_on_the_verb(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helps.Path, "exists", lambda path: path.name == "tests")
    assert shown(capsys, "train", *words) == shown(capsys, "train", "--help")


def test_a_table_of_the_name_of_a_folder_is_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helps.Path, "exists", lambda path: True)
    assert helps.wanted(["--help", "data", "src", *RunSpec.model_fields]) == ["data", *RunSpec.model_fields]
