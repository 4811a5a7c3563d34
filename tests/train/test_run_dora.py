"""Whole runs with magnitudes (DoRA): what checkpoints hold, resume on other layouts, and what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.infer.sharded import ShardedDecoder, spec_to_generate
from meshwright.planner.memory.states import checkpoint_bytes
from meshwright.spec import RunSpec, load
from meshwright.spec.lora import MAGNITUDE, is_adapter
from meshwright.spec.parameter_groups import adapters_beside
from meshwright.weights.load import load_run
from meshwright.weights.saved_weights import SavedWeights
from ranks import Ranks
from training_runs import HALF, STEPS, recorded, spec_of, start

DORA: dict[str, object] = {"lora__rank": 4, "lora__alpha": 16.0, "lora__dora": "true"}
EXACT = DORA | {"precision__compute": "fp64"}


def test_stop_and_resume_are_bitwise_equal(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    flags = DORA | {"layout__tp": 2, "lora__dropout": 0.2, "train__ema": 0.9, "precision__compute": "bf16"}
    whole, _ = start(ranks, spec_of(corpus, **flags), tmp_path / "whole")
    half, _ = start(ranks, spec_of(corpus, **flags, train__stop_at=HALF), tmp_path / "halves")
    both, _ = start(ranks, spec_of(corpus, **flags), tmp_path / "halves", "auto")
    assert half["steps"] == HALF and both["steps"] == STEPS
    assert both["parameters_sha256"] == whole["parameters_sha256"] != half["parameters_sha256"]


def test_a_resume_on_another_layout_goes_on_from_the_same_magnitudes(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    before = spec_of(corpus, **EXACT, layout__dp=2, layout__zero=3, train__stop_at=HALF)
    start(ranks, before, tmp_path)
    _, found = start(ranks, spec_of(corpus, **EXACT, layout__tp=2), tmp_path, "auto")
    _, wanted = start(ranks, spec_of(corpus, **EXACT), tmp_path / "alone")
    magnitudes = [name for name in wanted if name.endswith(MAGNITUDE)]
    assert magnitudes
    for name in filter(is_adapter, wanted):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-13)
    for name in magnitudes:  # they were trained
        weight = wanted[name.removesuffix(MAGNITUDE) + ".weight"]
        assert not torch.allclose(wanted[name], weight.norm(dim=1), rtol=1e-4)


def test_checkpoints_hold_a_b_and_magnitudes(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, **DORA, layout__dp=2, layout__zero=3)
    _, tensors = start(ranks, spec, tmp_path)
    (step,) = (tmp_path / "checkpoints").glob("step-*")
    size = sum(file.stat().st_size for file in step.glob("*.bin"))
    adapters = sum(tensor.numel() for name, tensor in tensors.items() if is_adapter(name))
    assert size == checkpoint_bytes(spec) == 3 * 4 * adapters


def on_layout(mesh: Mesh, run: Path) -> dict[str, Tensor]:
    """The weights of a run on two tensor ranks, which hold parts of the rows of some, whole again."""
    trained = load(run)
    spec = spec_to_generate(trained.model, trained.precision, [("layout.tp", "2")])
    decoder = ShardedDecoder(spec, mesh)
    decoder.load(run, trained)
    return {name: each.full_tensor().clone() for name, each in decoder._states.parameters()}


def merged_by_hand(spec: RunSpec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for name, beside in adapters_beside(spec).items():
        a, b, magnitude = (tensors[each.name] for each in beside)
        change = tensors[name] + 4 * b @ a
        found[name] = magnitude[:, None] * change / change.pow(2).sum(1, keepdim=True).sqrt()
    return found


@pytest.mark.parametrize("first", [{"layout__dp": 2, "layout__zero": 3}, {"layout__tp": 2}], ids=str)
def test_readers_merge_magnitudes(ranks: Ranks, corpus: Path, tmp_path: Path, first: dict[str, Any]) -> None:
    spec = spec_of(corpus, **EXACT, **first)
    _, tensors = start(ranks, spec, tmp_path)
    recorded(tmp_path, spec)
    read, saved = dict(load_run(tmp_path).named_parameters()), SavedWeights(tmp_path)
    sharded = ranks.run(spec_of(corpus, layout__tp=2).layout, on_layout, tmp_path)[0]
    wanted = merged_by_hand(spec, tensors)
    assert len(wanted) > 6
    for name in read:
        expected = wanted.get(name, tensors[name])
        for found in (read[name].detach(), saved.read(name), sharded[name]):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    down = "blocks.0.mlp.down.weight"
    rows, columns = read[down].shape
    part = ((2, 3), (rows - 2, columns - 5))
    found = torch.zeros(part[1], dtype=torch.float64)
    for piece in saved.parts({down: [part]}):
        assert piece.rectangle == part
        found = piece.value
    torch.testing.assert_close(found, saved.read(down)[2:, 3 : columns - 2], rtol=1e-13, atol=1e-15)
    assert saved.reading({down: [part]}).bytes >= saved.reading({down: [((2, 0), (rows - 2, columns))]}).bytes
