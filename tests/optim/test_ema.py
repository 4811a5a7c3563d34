"""Runs with a moving average of the weights: checkpoints, resumes, validation, and what is made of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from covering import some
from meshwright import api
from meshwright.checkpoint.store import CheckpointStore
from meshwright.comm.mesh import Mesh
from meshwright.model.decoder import Decoder
from meshwright.optim.ema import Ema
from meshwright.spec import RunSpec, UserError
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from meshwright.weights.load import load_run
from ranks import Ranks
from small import sums_of_infinite_gradients
from training_runs import EXPERTS, HALF, STEPS, spec_of, start

EMA: dict[str, object] = {"train__ema": 0.8}
LAYOUTS: list[dict[str, object]] = [
    {"layout__dp": 2, "layout__zero": 3, "precision__compute": "bf16"},
    {"layout__dp": 2, "layout__zero": 1, "precision__compute": "bf16", "precision__master": "bf16"},
    {"layout__pp": 2, "layout__dp": 2, "layout__zero": 2},
    {"layout__dp": 2, "layout__ep": 2, **EXPERTS},
]


def saved(spec: RunSpec, out: Path, kind: str = "ema") -> dict[str, torch.Tensor]:
    """The tensors of this kind in the newest checkpoint."""
    with torch.device("cpu"):
        decoder = Decoder(spec.model)
    names = dict(decoder.named_parameters())
    dtype = torch.bfloat16 if kind == "model" and spec.precision.master == "bf16" else torch.float32
    tensors = {f"{kind}/{name}": torch.full_like(each, math.nan, dtype=dtype) for name, each in names.items()}
    CheckpointStore(spec.checkpoint.folder(out), keep=1).load(None, tensors)
    return {key.partition("/")[2]: tensor for key, tensor in tensors.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(each, other[name]) for name, each in one.items())


@pytest.mark.parametrize("flags", some(LAYOUTS, LAYOUTS[2:3]))
def test_a_resume_goes_on_with_the_average_to_the_bit(
    ranks: Ranks, corpus: Path, tmp_path: Path, flags: dict[str, object]
) -> None:
    flags = flags | EMA
    spec = spec_of(corpus, **flags)
    whole, _ = start(ranks, spec, tmp_path / "whole")
    half, _ = start(ranks, spec_of(corpus, **flags, train__stop_at=HALF), tmp_path / "halves")
    both, _ = start(ranks, spec, tmp_path / "halves", "auto")
    assert both["steps"] == STEPS and both["parameters_sha256"] == whole["parameters_sha256"]
    assert both["val_loss_ema"] == whole["val_loss_ema"] != whole["val_loss"] != half["val_loss_ema"]
    assert equal(saved(spec, tmp_path / "whole"), saved(spec, tmp_path / "halves"))


def loaded_average(mesh: Mesh, spec: RunSpec, out: Path) -> dict[str, Any]:
    """The whole averages after a load of the newest checkpoint on this layout."""
    from meshwright.train import state

    trainer = Trainer(spec, mesh)
    store = CheckpointStore(spec.checkpoint.folder(out), 1, mesh.background, wire=mesh.wire)
    kept = store.load(None, state.tensors(trainer))
    state.restore(trainer, kept)
    return {
        name.removeprefix("ema/"): tensor.full_tensor().clone()
        for name, tensor in trainer.part(Ema).tensors()
    }


def test_the_average_is_resharded(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    before = spec_of(corpus, layout__dp=4, layout__zero=3, train__stop_at=HALF, **EMA)
    start(ranks, before, tmp_path)
    wanted = saved(before, tmp_path)
    assert not equal(wanted, saved(before, tmp_path, "model"))
    after = spec_of(corpus, layout__dp=2, layout__zero=1, layout__tp=2, **EMA)
    found = ranks.run(after.layout, loaded_average, after, tmp_path)[0]
    assert equal(found, wanted)


def test_a_run_without_an_average_takes_one_up_at_its_weights(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    start(ranks, spec_of(corpus, train__stop_at=HALF), tmp_path)
    weights = saved(spec_of(corpus), tmp_path, "model")
    with pytest.raises(UserError, match=r"--weights: 'ema' needs a moving average .* of step 5 .* lacks"):
        load_with_record(spec_of(corpus), tmp_path)
    for flags in ({"train__stop_at": HALF}, {"layout__dp": 2, "layout__zero": 2, "train__stop_at": HALF}):
        spec = spec_of(corpus, **flags, **EMA)
        assert equal(ranks.run(spec.layout, taken_up, spec, tmp_path)[0], weights)


def taken_up(mesh: Mesh, spec: RunSpec, out: Path) -> dict[str, Any]:
    """The averages of a run that resumes, and has no step left."""
    run = open_run(spec, mesh, out, Observers([]))
    run.execute("auto")
    return {
        name.removeprefix("ema/"): tensor.full_tensor().clone()
        for name, tensor in run.trainer.part(Ema).tensors()
    }


def load_with_record(spec: RunSpec, out: Path) -> Decoder:
    """The decoder of the average, of a run whose record the command would have written."""
    with patch("meshwright.weights.load.load", lambda _: spec):
        return load_run(out, average=True)


def test_the_average_can_be_exported(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    for name, flags in (("fp32", {}), ("bf16", {"precision__compute": "bf16", "precision__master": "bf16"})):
        spec = spec_of(corpus, **flags, **EMA, train__stop_at=2)
        start(ranks, spec, tmp_path / name)
        decoder = load_with_record(spec, tmp_path / name)
        assert equal(dict(decoder.named_parameters()), saved(spec, tmp_path / name))
        (tmp_path / name / "run.json").write_text(json.dumps({"spec": spec.to_json()}), encoding="utf-8")
        api.export(tmp_path / name, tmp_path / f"{name}-hf", weights="ema")
        tokens = torch.arange(8).unsqueeze(0)
        assert torch.equal(api.load_hf(tmp_path / f"{name}-hf")(tokens), decoder(tokens))
        with pytest.raises(UserError, match=r"--weights: .* is an HF folder, which has one set of weights"):
            api.generate(tmp_path / f"{name}-hf", "a", weights="ema")


def skipped(mesh: Mesh, spec: RunSpec) -> bool:
    """True if a step whose gradient is not finite leaves the average and the weights alone."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    for flat in trainer.part(Ema).flats:
        flat.add_(1.0)
    before = [flat.clone() for flat in trainer.part(Ema).flats]
    done = trainer.apply(sums_of_infinite_gradients(trainer), 1)
    return not done.applied and all(map(torch.equal, before, trainer.part(Ema).flats))


def test_a_skipped_step_leaves_the_average_alone(ranks: Ranks, corpus: Path) -> None:
    spec = spec_of(corpus, **EMA)
    assert ranks.run(spec.layout, skipped, spec)[0]


def lent(mesh: Mesh, spec: RunSpec) -> bool:
    """True if weights are back after an error in a validation of the average."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    before = [unit.stored.clone() for unit in trainer.states.units]
    for flat in trainer.part(Ema).flats:
        flat.zero_()
    with pytest.raises(ZeroDivisionError), trainer.part(Ema).in_place_of_weights():
        assert all(not unit.stored.any() for unit in trainer.states.units)
        raise ZeroDivisionError
    return all(
        torch.equal(kept, unit.stored) for kept, unit in zip(before, trainer.states.units, strict=True)
    )


def test_weights_come_back_from_a_validation_that_fails(ranks: Ranks, corpus: Path) -> None:
    spec = spec_of(corpus, layout__dp=2, layout__zero=1, **EMA)
    assert all(ranks.run(spec.layout, lent, spec))


@pytest.mark.parametrize("decay", [0, 1, -0.5])
def test_a_decay_that_is_none_is_refused(corpus: Path, decay: float) -> None:
    with pytest.raises(UserError, match=r"train\.ema"):
        spec_of(corpus, train__ema=decay)
