"""A run tells of parameters that nothing trains: without a gradient, or with a norm of exactly 0."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from ranks import Ranks
from small import spec_of
from training_runs import Notes

BASE = {
    "model.vocab_size": 61,
    "data.corpus": "synthetic",
    "data.seq_len": 16,
    "train.batch_tokens": 8 * 16,
    "train.steps": 2,
    "train.eval_tokens": 64,
}
EXPERTS = {"model.moe.experts": 64, "model.moe.top_k": 1, "model.moe.ffn": 16, "layout.ep": 2}
LAYOUTS: list[dict[str, object]] = [
    {"layout.dp": 1},
    {"layout.dp": 2, "layout.zero": 3, "layout.micro_batch": 1},
    {"layout.pp": 2, "layout.dp": 2, "layout.zero": 1},
]


def told_by(mesh: Mesh, spec: RunSpec, out: Path, harm: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The warnings of this rank, and the events of that kind, of a run with a `harm`."""
    notes = Notes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = open_run(spec, mesh, out, Observers([notes]))
        if harm == "detach":
            for name, module in run.trainer.decoder.named_modules():
                if name == "blocks.1.mlp":
                    module.register_forward_hook(lambda _module, _inputs, output: output.detach())
        with patch.object(
            Trainer, "initialise", (lambda *_: None) if harm == "zeros" else Trainer.initialise
        ):
            run.execute(None)
    events = [fields for kind, fields in notes.events if kind == "warning"]
    return [str(each.message) for each in caught if each.category is UserWarning], events


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_without_gradients_are_named_once(
    ranks: Ranks, tmp_path: Path, layout: dict[str, object]
) -> None:
    spec = spec_of(BASE | layout)
    (told, events), *others = ranks.run(spec.layout, told_by, spec, tmp_path, "detach")
    parts = ("mlp.down", "mlp.gate", "mlp.up", "mlp_norm")
    names = ", ".join(f"blocks.1.{part}.weight" for part in parts)
    message = (
        f"no gradient reached {names} in step 1: the loss does not depend on 4 of the model's parameters, "
        f"and nothing trains them"
    )
    assert told == [message]
    assert events == [{"step": 1, "message": message}]
    assert all(other == ([], []) for other in others)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_norm_of_exactly_0_is_told_once(ranks: Ranks, tmp_path: Path, layout: dict[str, object]) -> None:
    """Weights that were never loaded are zeros, and so are their gradients."""
    spec = spec_of(BASE | layout)
    (told, events), *others = ranks.run(spec.layout, told_by, spec, tmp_path, "zeros")
    (message,) = told
    assert message.startswith("the norm of the gradient is exactly 0 in step 1: nothing trains the model")
    assert events == [{"step": 1, "message": message}]
    assert all(other == ([], []) for other in others)


@pytest.mark.parametrize("layout", [*LAYOUTS, EXPERTS | {"layout.dp": 2, "train.batch_tokens": 2 * 16}])
def test_a_run_that_trains_tells_nothing(ranks: Ranks, tmp_path: Path, layout: dict[str, object]) -> None:
    """Experts of which half get no token of a batch included: their gradients are zeros."""
    spec = spec_of(BASE | layout)
    assert ranks.run(spec.layout, told_by, spec, tmp_path, "none") == [([], [])] * spec.layout.world_size
