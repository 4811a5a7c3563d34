"""Tensors that no step changes: one directory for all checkpoints, kept as long as one may refer to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import CheckpointStore
from meshwright.checkpoint.errors import BadCheckpointError, SaveError
from meshwright.checkpoint.inspect import verify_checkpoint
from meshwright.checkpoint.manifest import Manifest


def saved(folder: Path, value: float, step: int) -> str:
    """Save a checkpoint with frozen tensors of this value; returns the name of their directory."""
    store = CheckpointStore(folder, 3)
    store.save_frozen({"model/frozen": torch.full((4, 2), value)})
    store.save(step, {"model/trained": torch.ones(3)}, {"step": step})
    store.close()
    assert store.frozen.name is not None
    return store.frozen.name


def loaded(folder: Path, name: str) -> torch.Tensor:
    tensor = torch.zeros(4, 2)
    CheckpointStore(folder, 3).frozen.load(name, {"model/frozen": tensor})
    return tensor


def test_equal_tensors_are_one_directory_and_are_read_back(tmp_path: Path) -> None:
    name = saved(tmp_path, 1.5, 1)
    assert saved(tmp_path, 1.5, 2) == name
    assert [path.name for path in tmp_path.glob("frozen-*")] == [name]
    assert torch.equal(loaded(tmp_path, name), torch.full((4, 2), 1.5))


def test_a_directory_that_no_checkpoint_refers_to_goes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 3)
    store.save_frozen({"model/frozen": torch.zeros(4, 2)})
    store.close()
    name = saved(tmp_path, 1.0, 1)
    assert [path.name for path in tmp_path.glob("frozen-*")] == [name]


def test_all_directories_stay_where_a_checkpoint_is_damaged(tmp_path: Path) -> None:
    """It may refer to any of them."""
    names = {saved(tmp_path, 1.0, 1)}
    (tmp_path / "step-00000001" / "manifest.json").write_text("{")
    names.add(saved(tmp_path, 2.0, 2))
    assert {path.name for path in tmp_path.glob("frozen-*")} == names and len(names) == 2


def test_no_checkpoint_refers_to_a_directory_that_is_gone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 3)
    store.save_frozen({"model/frozen": torch.zeros(4, 2)})
    assert store.frozen.name is not None
    (tmp_path / store.frozen.name).rename(tmp_path / "moved")
    with pytest.raises(SaveError, match=rf"{store.frozen.name} is gone.*put it back"):
        store.save(1, {"model/trained": torch.ones(3)}, {"step": 1})
    assert not list(tmp_path.glob("step-*"))
    (tmp_path / "moved").rename(tmp_path / store.frozen.name)
    store.save(2, {"model/trained": torch.ones(3)}, {"step": 2})
    store.close()
    assert verify_checkpoint(tmp_path).problems == ()


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    name = saved(tmp_path, 1.0, 1)
    (file,) = (tmp_path / name).glob("*.bin")
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    with pytest.raises(BadCheckpointError):
        loaded(tmp_path, name)


def test_checkpoints_go_on_to_refer_to_a_directory_whose_manifest_is_damaged(tmp_path: Path) -> None:
    """Their own manifests name all that is in it; `checkpoint verify` finds the damage."""
    name = saved(tmp_path, 1.5, 1)
    whole = Manifest.parse((tmp_path / "step-00000001" / "manifest.json").read_text())
    frozen = Manifest.parse((tmp_path / name / "manifest.json").read_text())
    part = whole.frozen_part()
    assert part is not None
    assert (part.tensors, part.spreads, part.parts) == (frozen.tensors, frozen.spreads, frozen.parts)
    (tmp_path / name / "manifest.json").write_text("{")
    assert "manifest.json" in verify_checkpoint(tmp_path).problems[0]
    store, tensors = CheckpointStore(tmp_path, 3), {"model/trained": torch.zeros(3)}
    tensors["model/frozen"] = torch.zeros(4, 2)
    store.load(None, tensors)
    store.save(2, {"model/trained": torch.zeros(3)}, {"step": 2})
    store.close()
    assert torch.equal(tensors["model/frozen"], torch.full((4, 2), 1.5))
    later = Manifest.parse((tmp_path / "step-00000002" / "manifest.json").read_text())
    assert later.frozen == name and later.tensors["model/frozen"] == whole.tensors["model/frozen"]
