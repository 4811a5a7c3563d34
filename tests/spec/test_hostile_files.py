"""Files and settings of anybody's: whatever their depth, length and numbers, they give one short sentence."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.planning import _measured
from meshwright.checkpoint import CheckpointError, Lease
from meshwright.data.sources import open_source
from meshwright.data.tokenize import build_tokenizer
from meshwright.data.verified import cache_folder
from meshwright.hardware import hardware_file
from meshwright.runs.record import last_checkpoint, read_metrics, read_run
from meshwright.spec import UserError, load
from meshwright.spec.hf.config_read import read_hf_config
from meshwright.spec.load import from_tree, read_tree

DEEP = "[" * 60_000
LONGEST = 400
"""Most characters of a sentence that quotes what a file holds."""


def refused(call: Callable[[], Any]) -> str:
    """The one sentence with which a call is refused."""
    with pytest.raises(UserError) as refusal:
        call()
    words = str(refusal.value)
    assert words.strip() and len(words.splitlines()) == 1
    assert len(words) < LONGEST, words[:1000]
    return words


RUN_FILES = {
    "nested lists": f"[train]\nlr = {DEEP}",
    "nested tables": "a = " + "{a=" * 60_000,
    "a deep list": "[train]\nlr = " + "[" * 200 + "]" * 200,
    "deep tables": f"[{'.'.join('a' * 2_000)}]",
    "a key of many parts": "a." * 100_000 + "a = 1",
    "many keys of many parts": "\n".join(f"{'a.' * 1_500}b{number} = 1" for number in range(500)),
    "more than a mebibyte": "#" * (1 << 21),
    "a number of many digits": f"[train]\nsteps = {'9' * 5_000}",
    "a hexadecimal number of many digits": f"[train]\nsteps = 0x{'f' * 5_000}",
}


@pytest.mark.parametrize("case", RUN_FILES)
def test_a_run_file_of_any_depth_and_length_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILES[case])
    assert "run.toml" in refused(lambda: load(file))


@pytest.mark.parametrize(
    "text", [DEEP, '{"spec": ' + '{"model":' * 300 + "1" + "}" * 301, '{"spec": {"train": {"steps": %s}}}']
)
def test_a_run_record_of_any_depth_and_length_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text.replace("%s", "9" * 5_000))
    words = refused(lambda: load(tmp_path))
    assert words.startswith(str(tmp_path)) and "no table" not in words


@pytest.mark.parametrize("key", ["--layout.stages", "--train.lr", "--data.mixture"])
def test_a_flag_of_any_depth_is_refused_in_one_sentence(key: str) -> None:
    assert key in refused(lambda: from_tree({}, [(key.removeprefix("--"), DEEP)]))


def jsonl(name: str, read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def call(folder: Path) -> Any:
        (folder / name).write_text(DEEP + "\n")
        return read(folder)

    return call


def lease(folder: Path) -> None:
    (folder / "lease.json").write_text(DEEP)
    with pytest.raises(CheckpointError, match=r"lease\.json"):
        Lease(folder, "a test").acquire()
    raise UserError("lease.json")


def hardware(folder: Path) -> None:
    (folder / "h.json").write_text(DEEP)
    hardware_file.read(folder / "h.json")


READERS: dict[str, Callable[[Path], Any]] = {
    "run.json": jsonl("run.json", read_run),
    "metrics.jsonl": jsonl("metrics.jsonl", read_metrics),
    "events.jsonl": jsonl("events.jsonl", last_checkpoint),
    "config.json": jsonl("config.json", read_hf_config),
    "lease.json": lease,
    "h.json": hardware,
}


@pytest.mark.parametrize("file", READERS)
def test_nested_json_is_refused_in_one_sentence(file: str, tmp_path: Path) -> None:
    assert file in refused(lambda: READERS[file](tmp_path))


MOE = {"experts": 4, "top_k": 2, "ffn": 8}
TREES: list[tuple[str, dict[str, Any]]] = [
    ("model.layers", {"model": {"layers": 10**9}}),
    ("model.hidden", {"model": {"hidden": 10**12}}),
    ("model.vocab_size", {"model": {"vocab_size": 10**40}}),
    ("model.moe.experts", {"model": {"moe": MOE | {"experts": 10**12}}}),
    ("model.moe.ffn", {"model": {"moe": MOE | {"ffn": 2**62}}}),
    ("model.max_seq_len", {"model": {"max_seq_len": 2**62}}),
    ("data.seq_len", {"data": {"seq_len": 2**62}}),
    ("layout.dp", {"layout": {"dp": 2**40}}),
    ("layout.micro_batch", {"layout": {"micro_batch": 10**30}}),
    ("layout", {"layout": {"dp": 2**16, "tp": 2**16}, "model": {"heads": 2**16, "hidden": 2**20}}),
    ("train.steps", {"train": {"steps": 10**40}}),
    ("train.tokens", {"train": {"tokens": 10**40}}),
    ("train.batch_tokens", {"train": {"batch_tokens": 10**40}}),
    ("checkpoint.every", {"train": {"warmup_steps": 10**4000}}),
]


@pytest.mark.parametrize(("key", "tree"), TREES, ids=str)
def test_a_number_beyond_every_machine_is_refused_with_its_bound(key: str, tree: dict[str, Any]) -> None:
    words = refused(lambda: from_tree(tree))
    assert key in words or "warmup_steps" in words
    assert "at most" in words or "less than or equal to" in words


def test_a_wrong_list_of_stages_is_not_printed_whole() -> None:
    stages = [1] * 100_000
    assert "layout.stages" in refused(lambda: from_tree({"layout": {"pp": 2, "stages": stages}}))


def test_a_value_of_config_json_is_not_printed_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x" * 10**6}))
    assert "model_type" in refused(lambda: read_hf_config(tmp_path))


PATHS: dict[str, Callable[[str], Any]] = {
    "data.corpus": lambda name: open_source(name, "text"),
    "data.tokenizer": lambda name: build_tokenizer(name, 300, [], 0.0),
    "data.cache": cache_folder,
    "model.hf": read_hf_config,
    "run file": lambda name: read_tree(Path(name)),
}


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 5_000, "/".join(["x" * 200] * 100), "a\0b"])
def test_a_path_that_cannot_be_is_refused_in_one_sentence(key: str, name: str) -> None:
    if key == "data.cache" and name[0] != "~":
        return  # made later, where the system says what is wrong
    assert refused(lambda: PATHS[key](name))


def test_a_user_without_a_home_is_told_which_folder_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> Any:
        raise KeyError("no such user")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert "data.cache" in refused(lambda: cache_folder(None))


@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, b""])
def test_a_mark_of_byte_order_is_no_part_of_a_file(tmp_path: Path, mark: bytes) -> None:
    """Editors of other systems put it before a run file, a run's record and a hardware file."""
    (tmp_path / "run.toml").write_bytes(mark + b"[train]\nsteps = 7\n")
    assert load(tmp_path / "run.toml").train.steps == 7
    record = json.dumps({"spec": load(tmp_path / "run.toml").to_json()}).encode()
    (tmp_path / "run.json").write_bytes(mark + record)
    assert load(tmp_path / "run.json").train.steps == 7
    (tmp_path / "chaos.json").write_bytes(mark + b'{"restart_seconds": 2.5}')
    assert _measured(tmp_path / "chaos.json", "restart_seconds") == 2.5


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_a_file_of_other_units_is_told_to_be_one(tmp_path: Path, encoding: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "run.toml").write_bytes((mark + "[train]\nsteps = 7\n").encode(encoding))
    with pytest.raises(
        UserError, match=r"run\.toml: cannot be read \(it is UTF-16 or UTF-32; save it as UTF-8\)"
    ):
        load(tmp_path / "run.toml")


def test_a_byte_order_mark_is_no_part_of_a_run_file_or_of_an_hf_config(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "run.toml").write_bytes(mark + b"[train]\nsteps = 7\n")
    assert load(tmp_path / "run.toml").train.steps == 7
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 64}  # fmt: skip
    (tmp_path / "config.json").write_bytes(mark + json.dumps(config).encode())
    assert load(None, [("model.hf", str(tmp_path))]).model.hidden == 32
