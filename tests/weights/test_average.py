"""Means of a run's checkpoints: equal to numpy's in float64, of any layouts, and usable as a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import small
from meshwright import api
from meshwright.checkpoint import CheckpointStore
from meshwright.cli.main import main
from meshwright.comm.mesh import Mesh
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.exchange.hf import tensor_shapes
from meshwright.spec import RunSpec, UserError, load
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from ranks import Ranks

EXPERTS: dict[str, object] = {
    "model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 12, "model__moe__router": "sigmoid",
    "model__moe__bias": "true", "model__moe__bias_rate": 0.01,
}  # fmt: skip


def spec_of(folder: Path, **flags: object) -> RunSpec:
    base = {
        "model.vocab_size": 300, "data.corpus": folder / "text.txt", "data.tokenizer": "byte",
        "data.seq_len": 16, "data.cache": folder / "cache", "data.val_fraction": 0, "train.batch_tokens": 128,
        "train.steps": 6, "train.lr": 1e-2, "train.ema": 0.7, "checkpoint.every": 2, "checkpoint.keep": 9,
    }  # fmt: skip
    return small.spec_of(base, **EXPERTS, **flags)


def train(mesh: Mesh, spec: RunSpec, out: Path, resume: str | None) -> None:
    open_run(spec, mesh, out, Observers([])).execute(resume)


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2, 4 and 6: the first of ZeRO-3, the others of tensor and expert ranks."""
    folder = tmp_path_factory.mktemp("average")
    (folder / "text.txt").write_text("\n".join(f"word{i * i % 97}" for i in range(4000)))
    first = spec_of(folder, layout__dp=2, layout__zero=3, train__stop_at=2)
    ranks.run(first.layout, train, first, folder / "run", None)
    second = spec_of(folder, layout__tp=2, layout__ep=2, layout__dp=2)
    ranks.run(second.layout, train, second, folder / "run", "auto")
    record = {"spec": second.to_json()}
    (folder / "run" / "run.json").write_text(json.dumps(record))
    byte_tokenizer().save(folder / "run")
    return folder / "run"


def stored(run: Path, step: int, kind: str = "model") -> dict[str, Tensor]:
    """All weights of a checkpoint, by the store's own reader."""
    shapes = tensor_shapes(load(run).model)
    keys = {name: f"{'model' if name.endswith('router.bias') else kind}/{name}" for name in shapes}
    tensors = {keys[name]: torch.empty(shape) for name, shape in shapes.items()}
    CheckpointStore(run / "checkpoints", keep=1).load(step, tensors)
    return {name: tensors[key] for name, key in keys.items()}


@pytest.mark.parametrize(
    ("how", "steps", "kind"),
    [
        ({"last": 2}, [4, 6], "model"),
        ({"steps": [6, 2, 4]}, [2, 4, 6], "model"),
        ({"last": 3}, [2, 4, 6], "ema"),
    ],
)
def test_an_average_is_numpys_in_float64(
    run: Path, tmp_path: Path, how: dict[str, Any], steps: list[int], kind: str
) -> None:
    out = tmp_path / "out"
    assert api.average(run, out, **how, weights="ema" if kind == "ema" else "trained") == steps
    given = [stored(run, step, kind) for step in steps]
    found = stored(out, 0)
    for name, value in found.items():
        exact = np.stack([each[name].numpy() for each in given]).astype(np.float64).sum(0) / len(steps)
        assert np.array_equal(value.numpy(), exact.astype(np.float32)), name
        assert not torch.equal(value, given[-1][name]) or name.endswith("norm.weight")
    assert any(name.endswith("router.bias") and value.abs().sum() > 0 for name, value in found.items())
    assert json.loads((out / "run.json").read_text())["average"]["steps"] == steps


def test_checkpoints_that_a_later_start_undid_are_not_the_newest(run: Path, tmp_path: Path) -> None:
    kinds = [("checkpoint", 2), ("checkpoint", 4), ("resumed", 2), ("checkpoint", 6)]
    events = [{"kind": kind, "step": step} for kind, step in (*kinds, ("warning", None))]
    file = run / "events.jsonl"
    try:
        file.write_text("".join(json.dumps(row) + "\n" for row in events))
        assert api.average(run, tmp_path / "two", last=2) == [2, 6]
        assert api.average(run, tmp_path / "given", steps=[4, 6]) == [4, 6]
        with pytest.raises(UserError, match=r"3 is more than the 2 checkpoints of .* \(steps 2, 6\)"):
            api.average(run, tmp_path / "three", last=3)
        file.write_text(file.read_text() + json.dumps({"kind": "checkpoint", "step": 4}) + "\n")
        assert api.average(run, tmp_path / "again", last=2) == [4, 6]  # saved again
    finally:
        file.unlink()


def test_an_average_is_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["average", str(run), "--steps", "2,4", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}: steps 2, 4\n"
    assert api.checkpoint_verify(out)["problems"] == []
    assert api.generate(out, "word", max_new_tokens=3) is not None
    assert {path.name for path in out.iterdir()} >= {"run.json", "tokenizer.json", "tokenizer_config.json"}


def test_the_average_of_one_checkpoint_is_its_weights(run: Path, tmp_path: Path) -> None:
    api.average(run, tmp_path / "out", last=1)
    newest = stored(run, 6)
    assert all(torch.equal(value, newest[name]) for name, value in stored(tmp_path / "out", 0).items())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"steps": [2, 3]}, r"no checkpoint of step 3; it has 2, 4, 6"),
        ({"steps": [2, 2]}, r"--steps: 2 is given twice"),
        ({"steps": []}, r"--steps: names no step"),
        ({"last": 4}, r"--last: 4 is more than the 3 checkpoints of .* \(steps 2, 4, 6\); give at most 3"),
        ({"last": 0}, r"--last: 0 averages nothing"),
        ({}, r"--last: .* give one of them"),
        ({"last": 1, "steps": [2]}, r"give one of them"),
        ({"last": 1, "weights": "all"}, r"'all' is not one of trained, ema"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    run: Path, tmp_path: Path, how: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as told:
        api.average(run, tmp_path / "out", **how)
    assert "\n" not in str(told.value) and not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--out: .* already holds a run; give another --out"):
        api.average(run, run, last=1)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(UserError, match=r"--out: .* is not an empty folder"):
        api.average(run, tmp_path, last=1)
    assert (tmp_path / "notes").read_text() == "mine"


def test_damage_is_found_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "run"))
    (file,) = (damaged / "checkpoints" / "step-00000004").glob("rank-00000.bin")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged|SHA-256"):
        api.average(damaged, tmp_path / "out", last=3)
    assert not (tmp_path / "out").exists()
