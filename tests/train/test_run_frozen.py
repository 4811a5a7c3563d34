"""Whole runs with parameters that are not trained: what checkpoints hold, resume, and what reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from covering import some
from meshwright.checkpoint.inspect import list_checkpoints, verify_checkpoint
from meshwright.checkpoint.manifest import Manifest
from meshwright.comm.mesh import Mesh
from meshwright.planner.memory.states import checkpoint_bytes
from meshwright.spec import RunSpec
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.weights.load import load_run
from meshwright.weights.saved_weights import SavedWeights
from ranks import Ranks
from training_runs import EXPERTS, HALF, STEPS, run_it, spec_of, start

FROZEN = {"train__frozen": "embed.*,blocks.0.*", "train__ema": 0.9, "precision__compute": "bf16"}
LAYOUTS: list[dict[str, object]] = [
    {"layout__dp": 2, "layout__zero": 3},
    {"layout__dp": 2, "layout__zero": 1, "train__optimiser": "adamw8bit", "precision__master": "bf16"},
    {"layout__pp": 2, "train__optimiser": "muon"},
    {"layout__dp": 2, "layout__ep": 2, "layout__zero": 2, "train__frozen": "*.experts.*", **EXPERTS},
    {"layout__dp": 2, "layout__replicate": 2, "outer__every": 2, "train__ema": "none"},
    {"layout__dp": 2, "layout__replicate": 2, "layout__zero": 1, "outer__staleness": 1},
]


@pytest.mark.parametrize("layout", some(LAYOUTS, LAYOUTS[1:4]))
def test_stop_and_resume_are_bitwise_equal(
    ranks: Ranks, corpus: Path, tmp_path: Path, layout: dict[str, object]
) -> None:
    flags = FROZEN | layout
    whole, _ = start(ranks, spec_of(corpus, **flags), tmp_path / "whole")
    half, _ = start(ranks, spec_of(corpus, **flags, train__stop_at=HALF), tmp_path / "halves")
    both, _ = start(ranks, spec_of(corpus, **flags), tmp_path / "halves", "auto")
    assert half["steps"] == HALF and both["steps"] == STEPS
    assert both["parameters_sha256"] == whole["parameters_sha256"] != half["parameters_sha256"]
    assert both["final_loss"] == whole["final_loss"]
    assert both.get("val_loss_ema") == whole.get("val_loss_ema")


def own_bytes(folder: Path) -> int:
    """Bytes of the tensors in a directory of a checkpoint."""
    return sum(file.stat().st_size for file in folder.glob("*.bin"))


def test_what_is_not_trained_is_saved_once(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    flags = FROZEN | {"layout__dp": 2, "layout__zero": 3, "checkpoint__every": 2, "checkpoint__keep": 9}
    spec = spec_of(corpus, **flags)
    _, tensors = start(ranks, spec, tmp_path)
    folder = tmp_path / "checkpoints"
    (apart,) = folder.glob("frozen-*")
    frozen = [name for name in tensors if name.startswith(("embed.", "blocks.0."))]
    assert own_bytes(apart) == 2 * sum(tensors[name].numel() for name in frozen)
    steps = sorted(folder.glob("step-*"))
    assert len(steps) == STEPS // 2
    assert {own_bytes(step) for step in steps} == {checkpoint_bytes(spec)}
    manifest = Manifest.parse((steps[-1] / "manifest.json").read_text())
    assert not [
        name for name in manifest.tensors if name.startswith("optim") and name.endswith(tuple(frozen))
    ]
    assert all(info.problem is None for info in list_checkpoints(folder))
    assert verify_checkpoint(folder).problems == ()
    (file,) = list(apart.glob("rank-00000.bin"))
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)
    (problem,) = verify_checkpoint(folder).problems
    assert str(file.parent.name) in problem and "is damaged" in problem


def test_readers_take_what_is_not_trained_from_where_it_is(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = spec_of(corpus, **FROZEN, layout__dp=2, layout__zero=3)
    _, tensors = start(ranks, spec, tmp_path)
    _record(tmp_path, spec)
    for average in (False, True):
        read = dict(load_run(tmp_path, average=average).named_parameters())
        saved = SavedWeights(tmp_path, average=average)
        for name, tensor in tensors.items():
            frozen = name.startswith(("embed.", "blocks.0."))
            assert read[name].dtype == torch.float32
            assert torch.equal(read[name], tensor.float()) == (frozen or not average)
            assert torch.equal(saved.read(name).float(), read[name])


def _record(out: Path, spec: RunSpec) -> None:
    import json

    (out / "run.json").write_text(json.dumps({"spec": spec.to_json()}))


def resumed(mesh: Mesh, spec: RunSpec, out: Path) -> str | None:
    """The directory of what is not trained, before and after a resume on another layout."""
    run = open_run(spec, mesh, out, Observers([]))
    run.execute("auto")
    return run.store.frozen.name


def test_another_layout_refers_to_the_same_directory(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    before = spec_of(corpus, **FROZEN, layout__dp=2, layout__zero=3, train__stop_at=HALF)
    _, first = ranks.run(before.layout, run_it, before, tmp_path, None)[0]
    (apart,) = (tmp_path / "checkpoints").glob("frozen-*")
    after = spec_of(corpus, **FROZEN, layout__pp=2)
    assert ranks.run(after.layout, resumed, after, tmp_path) == [apart.name] * 2
    assert list((tmp_path / "checkpoints").glob("frozen-*")) == [apart]
    saved = {name: tensor for name, tensor in first.items() if name.startswith("embed.")}
    _record(tmp_path, after)
    read = dict(load_run(tmp_path).named_parameters())
    assert all(torch.equal(read[name], tensor.float()) for name, tensor in saved.items())
