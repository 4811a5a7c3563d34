"""Checkpoints that earlier programs wrote load, bit for bit: `data/version-N` is what they left on the disk.

They were made by `save_example` with the program of their time, and are never made anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from faults import same, write_root, zeros_like
from meshwright.checkpoint import BadCheckpointError, CheckpointStore
from meshwright.checkpoint.inspect import list_checkpoints, verify_checkpoint
from meshwright.checkpoint.manifest import VERSION

DATA = Path(__file__).parent / "data"
STATE = {"step": 10, "loss": 2.5, "layout": "dp1", "nested": {"list": [1, None, "x"]}}


def example() -> dict[str, torch.Tensor]:
    """Tensors of several dtypes whose values follow from their places alone."""
    return {
        "model/a.weight": torch.arange(35.0).reshape(7, 5) / 8,
        "model/b.weight": (torch.arange(24.0).reshape(6, 4) - 12).to(torch.bfloat16),
        "model/c.weight": torch.arange(24.0).reshape(3, 8).t() / 4,
        "model/empty": torch.empty(0, 4),
        "optim/step": torch.tensor(10.0),
        "optim/exp_avg/a.weight": torch.arange(35.0, dtype=torch.float64).reshape(7, 5) / 1024,
        "optim/mask": torch.arange(9) % 2 == 0,
    }


def save_example(directory: Path) -> None:
    store = CheckpointStore(directory, 1)
    store.save(10, example(), STATE)
    store.close()


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_checkpoints_of_earlier_programs_load(tmp_path: Path, version: int) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(DATA / f"version-{version}", directory)
    text = (directory / "step-00000010" / "manifest.json").read_text()
    assert json.loads(text)["body"]["version"] == version
    store, target = CheckpointStore(directory, 2), zeros_like(example())
    assert store.latest() == 10
    assert store.load(None, target) == STATE
    assert same(target, example())
    assert store.warnings == [] and not verify_checkpoint(directory).problems
    store.save(20, target, {**STATE, "step": 20})  # a run goes on from it
    store.close()
    assert [(row.step, row.problem) for row in list_checkpoints(directory)] == [(10, None), (20, None)]


def test_the_example_of_this_version_is_what_the_program_writes(tmp_path: Path) -> None:
    save_example(tmp_path)
    kept = DATA / f"version-{VERSION}"
    for name in ("LATEST", "step-00000010/rank-00000.bin", "step-00000010/part-00000.json"):
        assert (tmp_path / name).read_bytes() == (kept / name).read_bytes()
    now, then = (
        json.loads((folder / "step-00000010" / "manifest.json").read_text())["body"]
        for folder in (tmp_path, kept)
    )
    assert {**now, "saved_at": ""} == {**then, "saved_at": ""}


def test_a_later_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    shutil.copytree(DATA / f"version-{VERSION}", tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "step-00000010"
    body = json.loads((path / "manifest.json").read_text())["body"]
    write_root(path, {**body, "version": VERSION + 1})
    with pytest.raises(BadCheckpointError, match=f"reads versions up to {VERSION}"):
        CheckpointStore(tmp_path / "checkpoints", 1).load(10, zeros_like(example()))
