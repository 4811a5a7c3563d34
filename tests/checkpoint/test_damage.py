"""No flipped bit, cut file or made-up manifest gets into a model."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from faults import as_version_1, same, tensors, write_root, zeros_like
from meshwright.checkpoint import BadCheckpointError, CheckpointError, CheckpointStore
from meshwright.checkpoint.inspect import verify_checkpoint
from meshwright.spec import UserError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path, 2)
    store.save(10, tensors(10), {"step": 10, "note": "ok"})
    store.close()
    return tmp_path / "step-00000010"


def refused(checkpoint: Path) -> str:
    """Loading fails with a sentence and leaves the live tensors alone; returns the sentence."""
    target = tensors(77)
    with pytest.raises(UserError) as refusal:
        CheckpointStore(checkpoint.parent, 2).load(10, target)
    assert isinstance(refusal.value, BadCheckpointError) or "shape" in str(refusal.value)
    assert same(target, tensors(77))
    assert verify_checkpoint(checkpoint.parent, 10).problems
    return str(refusal.value)


def test_no_flipped_bit_goes_unseen(checkpoint: Path) -> None:
    draw = random.Random(0)
    for file in ("rank-00000.bin", "part-00000.json", "manifest.json"):
        path = checkpoint / file
        original = path.read_bytes()
        for position in [0, len(original) - 1, *draw.sample(range(len(original)), 250)]:
            data = bytearray(original)
            data[position] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
            assert file in refused(checkpoint), f"{file}: byte {position}"
        path.write_bytes(original)
    assert not verify_checkpoint(checkpoint.parent).problems


@pytest.mark.parametrize("file", ["rank-00000.bin", "part-00000.json", "manifest.json"])
def test_no_cut_or_grown_file_goes_unseen(checkpoint: Path, file: str) -> None:
    path = checkpoint / file
    original = path.read_bytes()
    for data in (original[:-1], original[: len(original) // 2], b"", original + b"\0", original + b" "):
        path.write_bytes(data)
        assert file in refused(checkpoint)
    path.unlink()
    assert file in refused(checkpoint)


def test_no_zeroed_block_goes_unseen(tmp_path: Path) -> None:
    source = {"model/x": torch.randn(4096)}
    store = CheckpointStore(tmp_path, 1)
    store.save(10, source, {})
    store.close()
    path = tmp_path / "step-00000010" / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[4096:8192] = bytes(4096)
    path.write_bytes(data)
    with pytest.raises(BadCheckpointError, match="model/x"):
        store.load(10, zeros_like(source))


def test_a_checkpoint_under_another_step_is_refused(checkpoint: Path) -> None:
    shutil.copytree(checkpoint, checkpoint.parent / "step-00000030")
    with pytest.raises(BadCheckpointError, match="another than its name says"):
        CheckpointStore(checkpoint.parent, 2).load(30, tensors(1))


def forge(checkpoint: Path, change: Callable[[dict[str, Any]], None], version: int) -> None:
    """Rewrite the manifest with a change and right hashes, as an attacker would.

    The change is made to the form of version 1. In version 2 each tensor's spread is then its whole shape.
    """
    body = as_version_1(checkpoint)
    body["version"] = version
    change(body)
    if version == 2 and all(isinstance(body[key], dict) for key in ("tensors", "files")):
        pieces = {name: entry.pop("pieces") for name, entry in body["tensors"].items()}
        text = json.dumps({"tensors": pieces, "files": body.pop("files")})
        (checkpoint / "part-00000.json").write_text(text)
        body["parts"] = [["part-00000.json", len(text), hashlib.sha256(text.encode()).hexdigest()]]
        body["spreads"] = []
        for entry in body["tensors"].values():
            shape = entry["shape"]
            entry["spread"] = len(body["spreads"])
            body["spreads"].append([[0, [0] * len(shape), shape]] if 0 not in shape else [])
    write_root(checkpoint, body)


def piece(body: dict[str, Any]) -> list[Any]:
    return body["tensors"]["model/a.weight"]["pieces"][0]


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body["files"] = {name: body["files"]["rank-00000.bin"]}
        for entry in body["tensors"].values():
            for row in entry["pieces"]:
                row[2] = name

    return change


def huge(body: dict[str, Any]) -> None:
    body["tensors"]["model/a.weight"]["shape"] = [1 << 40, 1 << 20]


def huge_piece(body: dict[str, Any]) -> None:
    body["tensors"]["model/a.weight"].update(shape=[1 << 40, 5])
    piece(body)[1] = [1 << 40, 5]
    piece(body)[4] = 20 << 40


def huge_file(body: dict[str, Any]) -> None:
    huge_piece(body)
    body["files"]["rank-00000.bin"] += (20 << 40) - 140


def overlap(body: dict[str, Any]) -> None:
    entry = body["tensors"]["model/a.weight"]
    row = piece(body)
    entry["pieces"] = [
        [[0, 0], [4, 5], *row[2:4], 80, row[5]],
        [[2, 0], [3, 5], row[2], row[3] + 80, 60, row[5]],
    ]


ATTACKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "parent": rename_file("../rank-00000.bin"),
    "absolute": rename_file("/etc/passwd"),
    "subdirectory": rename_file("a/rank-00000.bin"),
    "other name": rename_file("manifest.json"),
    "huge shape": huge,
    "huge piece": huge_piece,
    "huge file": huge_file,
    "overlap": overlap,
    "unknown dtype": lambda body: body["tensors"]["model/a.weight"].update(dtype="object"),
    "no dtype": lambda body: body["tensors"]["model/a.weight"].pop("dtype"),
    "negative": lambda body: piece(body).__setitem__(3, -1),
    "beyond the end": lambda body: piece(body).__setitem__(3, 1 << 50),
    "outside the shape": lambda body: piece(body).__setitem__(0, [1, 0]),
    "text for a number": lambda body: piece(body).__setitem__(4, "140"),
    "true for a number": lambda body: body.update(step=True),
    "many dims": lambda body: body["tensors"]["model/a.weight"].update(shape=[1] * 1000),
    "another version": lambda body: body.update(version=3),
    "list for tensors": lambda body: body.update(tensors=[]),
    "list for files": lambda body: body.update(files=[]),
    "piece too short": lambda body: piece(body).pop(),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forged_manifest_is_refused(checkpoint: Path, attack: str, version: int) -> None:
    forge(checkpoint, ATTACKS[attack], version)
    words = refused(checkpoint)
    assert any(file in words for file in ("manifest.json", "part-00000.json", "rank-00000.bin", "shape"))


def root_change(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def forged(checkpoint: Path) -> None:
        body = json.loads((checkpoint / "manifest.json").read_text())["body"]
        change(body)
        write_root(checkpoint, body)

    return forged


def first_spread(body: dict[str, Any]) -> list[Any]:
    return body["spreads"][body["tensors"]["model/a.weight"]["spread"]]


ROOT_ATTACKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "part elsewhere": lambda body: body["parts"][0].__setitem__(0, "../part-00000.json"),
    "part of another name": lambda body: body["parts"][0].__setitem__(0, "rank-00000.bin"),
    "part with another hash": lambda body: body["parts"][0].__setitem__(2, "0" * 64),
    "part of another size": lambda body: body["parts"][0].__setitem__(1, 1 << 50),
    "no parts": lambda body: body.update(parts=[]),
    "spread of no part": lambda body: first_spread(body)[0].__setitem__(0, 1),
    "spread of nothing": lambda body: first_spread(body).clear(),
    "spread outside the shape": lambda body: first_spread(body)[0].__setitem__(1, [1, 0]),
    "spread with other dims": lambda body: first_spread(body)[0].__setitem__(1, [0]),
    "no such spread": lambda body: body["tensors"]["model/a.weight"].update(spread=99),
}


@pytest.mark.parametrize("attack", ROOT_ATTACKS)
def test_a_forged_root_is_refused(checkpoint: Path, attack: str) -> None:
    root_change(ROOT_ATTACKS[attack])(checkpoint)
    assert "manifest.json" in refused(checkpoint) or "part-00000.json" in refused(checkpoint)


def test_a_part_of_another_checkpoint_is_refused(checkpoint: Path) -> None:
    store = CheckpointStore(checkpoint.parent, 2)
    store.save(20, tensors(20), {})
    store.close()
    other = (checkpoint.parent / "step-00000020" / "part-00000.json").read_bytes()
    (checkpoint / "part-00000.json").write_bytes(other)
    assert "part-00000.json" in refused(checkpoint)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "[" * 100_000, '{"body": 1}', "9" * 10_000, "\0", '{"a":NaN}']
)
def test_a_manifest_that_is_none_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / "manifest.json").write_text(text)
    assert "manifest.json" in refused(checkpoint)


@pytest.mark.parametrize("file", ["rank-00000.bin", "part-00000.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_links_pipes_and_directories_are_not_opened(checkpoint: Path, file: str, kind: str) -> None:
    path = checkpoint / file
    elsewhere = checkpoint.parent / "elsewhere"
    path.rename(elsewhere)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert file in refused(checkpoint)


def test_a_linked_checkpoint_directory_is_not_followed(checkpoint: Path) -> None:
    elsewhere = checkpoint.parent / "elsewhere"
    checkpoint.rename(elsewhere)
    checkpoint.symlink_to(elsewhere)
    assert "not a directory" in refused(checkpoint)


def test_a_latest_that_points_elsewhere_is_not_followed(checkpoint: Path) -> None:
    store = CheckpointStore(checkpoint.parent, 2)
    for text in ("../../etc", "/etc", "step-00000010/../x", "step-10", "\udcff" * 3):
        (checkpoint.parent / "LATEST").write_bytes(text.encode("utf-8", "surrogatepass"))
        assert store.latest() == 10
    (checkpoint.parent / "LATEST").unlink()
    (checkpoint.parent / "LATEST").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="LATEST"):
        store.latest()


@pytest.mark.parametrize("step", [3, "x", None, [10]])
def test_a_state_of_another_step_is_refused(checkpoint: Path, step: Any) -> None:
    root_change(lambda body: body["state"].update(step=step))(checkpoint)
    assert "its state is of step" in refused(checkpoint)


@pytest.mark.parametrize("file", ["part-00000.json", "manifest.json"])
def test_a_manifest_beyond_its_bound_is_not_read(checkpoint: Path, file: str) -> None:
    """As objects, a text of `[],[],` takes 30 times its size."""
    size = (65 << 20) + 1
    os.truncate(checkpoint / file, size)
    if file != "manifest.json":
        root_change(lambda body: body["parts"][0].__setitem__(1, size))(checkpoint)
    assert f"{file} has {size} bytes, too many for a manifest" in refused(checkpoint)


def test_a_file_of_holes_is_not_read_to_its_end(checkpoint: Path) -> None:
    """A tensor of 1 TiB costs whoever forges it nothing, and hashing it would take an hour."""
    size = 1 << 40
    with (checkpoint / "rank-00000.bin").open("r+b") as file:
        start = file.seek(0, os.SEEK_END)
        file.truncate(start + size)

    def add(body: dict[str, Any]) -> None:
        row = [[0], [size], "rank-00000.bin", start, size, "0" * 64]
        body["tensors"]["model/extra"] = {"dtype": "uint8", "shape": [size], "pieces": [row]}
        body["files"]["rank-00000.bin"] = start + size

    forge(checkpoint, add, 2)
    began = time.monotonic()
    assert "holes" in str(verify_checkpoint(checkpoint.parent, 10).problems)
    assert time.monotonic() - began < 5


def test_no_flipped_bit_of_latest_names_another_step_in_silence(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 9)
    for step in (10, 11, 12, 14, 18, 26, 42, 74, 90, 10):  # the run went back to step 10
        store.save(step, tensors(step), {"step": step})
    store.close()
    path, told = tmp_path / "LATEST", 0
    original = path.read_bytes()
    for bit in range(8 * len(original)):
        data = bytearray(original)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        reader = CheckpointStore(tmp_path, 9)
        step = reader.latest()
        if step != 10:
            told += 1
            assert any("LATEST is damaged" in each and f"step {step}" in each for each in reader.warnings)
        if bit % 32 == 0:
            assert reader.load(None, zeros_like(tensors(10))) == {"step": step}
    assert told > 8 * len("step-00000010")
    for form in ("step-00000010\n", "step-00000010"):  # as earlier versions wrote it
        path.write_text(form)
        reader = CheckpointStore(tmp_path, 9)
        assert (reader.latest(), reader.warnings) == (10, [])
