"""Runs of islands: exact synchronous training where it should be, bytes, resumes, and what is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from covering import marked
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.spec.eight_bit import blocks_of
from meshwright.spec.parameters import parameters
from meshwright.train import state
from meshwright.train.step import Trainer
from ranks import Ranks
from small import first_batches
from training_runs import EXPERTS, HALF, STEPS, TrainedOnce, go_on, spec_of, start

ISLANDS = {"layout__replicate": 2, "outer__every": 3}
STREAMING = ISLANDS | {"outer__every": 4, "outer__fragments": 2, "outer__delay": 2}
SPARSE = {"outer__top_k": 0.1, "outer__format": "int4"}


def steps_of(mesh: Mesh, spec: RunSpec) -> list[tuple[dict[str, torch.Tensor], dict[str, float]]]:
    """The whole parameters of this rank's island after each step, and its bytes over replicate."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    found = []
    for number, batch in enumerate(first_batches(spec, mesh, STEPS), 1):
        trainer.expect(batch)
        mesh.wire.clear()
        trainer.step(batch, number)
        whole = {name: each.full_tensor().clone() for name, each in trainer.states.parameters()}
        sent = {what: size for (axis, what), size in mesh.wire.bytes.items() if axis == "replicate"}
        found.append((whole, sent))
    return found


@pytest.mark.parametrize(
    "layout", [pytest.param({"layout__dp": 1}, marks=pytest.mark.full), {"layout__dp": 2, "layout__zero": 2}]
)
def test_with_a_period_of_one_and_sgd_islands_are_synchronous(
    ranks: Ranks, corpus: Path, layout: dict[str, Any]
) -> None:
    """The mean of steps of SGD is the step of the mean gradient, with momentum, too."""
    exact = {"train__optimiser": "sgd", "train__clip": "none", "precision__compute": "fp64", **layout}
    outer = {"layout__replicate": 2, "outer__every": 1, "outer__lr": 1.0, "outer__momentum": 0.0}
    alone = spec_of(corpus, **exact | {"layout__dp": 2 * int(layout["layout__dp"])})
    islands = spec_of(corpus, **exact, **outer)
    wanted = ranks.run(alone.layout, steps_of, alone)[0]
    for found in ranks.run(islands.layout, steps_of, islands):
        for (ours, _), (theirs, _) in zip(found, wanted, strict=True):
            for name, tensor in ours.items():
                torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("flags", [ISLANDS, STREAMING, {**ISLANDS, "layout__dp": 2, "layout__zero": 3}])
def test_bytes_are_the_formulas_and_none_in_other_steps(
    ranks: Ranks, corpus: Path, flags: dict[str, Any]
) -> None:
    spec = spec_of(corpus, **flags)
    for found in ranks.run(spec.layout, steps_of, spec):
        whole = found[0][0]
        for number, (_, sent) in enumerate(found, 1):
            fragments = spec.outer.begins(number, STEPS)
            sizes = [
                tensor.numel() for name, tensor in whole.items()
                if spec.outer.fragment_of(name, spec.model.tied) in fragments
            ]  # fmt: skip
            if not fragments:
                assert sent == {}
                continue
            share = 2 * (2 - 1) / 2  # both ways, (R-1)/R of it for two islands
            assert sent["scalars"] == len(fragments) * share * 8
            assert sent["all_reduce"] == share * sum(sizes) * 4 / spec.layout.dp


@pytest.mark.parametrize(
    "flags",
    [
        {**ISLANDS, "outer__format": "bf16"},
        {**STREAMING, "outer__format": "int8", "layout__replicate": 4},
        {**ISLANDS, "outer__format": "int4", "layout__dp": 2, "layout__zero": 3},
        {**STREAMING, "outer__format": "fp4", "layout__tp": 2},
        {**ISLANDS, "outer__top_k": 0.1},
        {**STREAMING, **SPARSE, "layout__dp": 2, "layout__zero": 1},
    ],
)
def test_bytes_of_compressed_exchanges_are_the_formulas(
    ranks: Ranks, corpus: Path, flags: dict[str, Any]
) -> None:
    spec = spec_of(corpus, **flags)
    outer, blocks = spec.outer, blocks_of(spec)
    cut = {each.name for unit in parameters(spec.model).values() for each in unit if each.split}
    for found in ranks.run(spec.layout, steps_of, spec):
        for number, (whole, sent) in enumerate(found, 1):
            fragments, message = outer.begins(number, STEPS), 0.0
            for name, tensor in whole.items():
                if outer.fragment_of(name, spec.model.tied) not in fragments:
                    continue
                size = tensor.numel() / (spec.layout.tp if name in cut else 1) / spec.layout.dp
                block = blocks.get(name, 1) if outer.has_blocks else 1
                message += size / block * outer.block_bytes(block) if name in blocks else 4 * size
            assert sent.get("all_gather", 0) == pytest.approx((spec.layout.replicate - 1) * message)
            assert "all_reduce" not in sent


def test_each_parameter_is_exchanged_once_in_a_period(corpus: Path) -> None:
    spec = spec_of(corpus, **ISLANDS | {"outer__every": 5, "outer__fragments": 2})
    for first in range(1, 20):
        begun = [part for step in range(first, first + 5) for part in spec.outer.begins(step, last=1000)]
        assert sorted(begun) == [0, 1]


def test_after_the_last_step_all_islands_hold_the_runs_model(ranks: Ranks, corpus: Path) -> None:
    spec = spec_of(corpus, **STREAMING)
    (one, two) = ranks.run(spec.layout, steps_of, spec)
    apart = [
        any(not torch.equal(a[name], b[name]) for name in a) for (a, _), (b, _) in zip(one, two, strict=True)
    ]
    assert apart == [True] * (STEPS - 1) + [False]


RESUMED: list[dict[str, Any]] = [
    ISLANDS,
    STREAMING,
    {**STREAMING, "layout__dp": 2, "layout__zero": 3, "train__optimiser": "muon"},
    {**STREAMING, "layout__pp": 2},
    {**ISLANDS, "layout__dp": 2, "layout__ep": 2, **EXPERTS},
    {**ISLANDS, "train__optimiser": "adamw8bit", "precision__compute": "bf16"},
    {**STREAMING, **SPARSE, "layout__dp": 2, "layout__zero": 3},
    {**STREAMING, "outer__format": "int8", "outer__error_decay": 1.0, "layout__tp": 2},
    {**ISLANDS, **SPARSE, "layout__dp": 2, "layout__ep": 2, **EXPERTS},
]


QUICK = [RESUMED[number] for number in (2, 3, 8)]
"""Each axis, period and format, with experts and without."""


@pytest.mark.parametrize("flags", marked(RESUMED, QUICK))
def test_a_resumed_run_of_islands_ends_bitwise_as_one_that_was_not_stopped(
    ranks: Ranks, corpus: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    spec = spec_of(corpus, **flags, train__eval_every=4, checkpoint__every=HALF)
    whole, _ = start(ranks, spec, tmp_path)
    again, _ = go_on(ranks, spec, tmp_path)
    assert again["steps"] == whole["steps"] == STEPS
    for what in ("parameters_sha256", "samples_sha256", "val_loss"):
        assert again[what] == whole[what], what


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(ISLANDS, {"layout__replicate": 4, "outer__every": 2}, marks=pytest.mark.full),
        (
            {**ISLANDS, "layout__replicate": 4},
            {"layout__replicate": 2, "outer__every": 3, "outer__fragments": 2},
        ),
        pytest.param(STREAMING, {**STREAMING, "outer__delay": 0}, marks=pytest.mark.full),
        pytest.param({"layout__dp": 2, "layout__zero": 1}, STREAMING, marks=pytest.mark.full),
        pytest.param(STREAMING, {"layout__dp": 4, "layout__zero": 3}, marks=pytest.mark.full),
        pytest.param(STREAMING, STREAMING | SPARSE, marks=pytest.mark.full),
        (STREAMING | SPARSE, {**STREAMING, **SPARSE, "layout__replicate": 4, "layout__tp": 2}),
        pytest.param(STREAMING | SPARSE, ISLANDS | {"outer__format": "bf16"}, marks=pytest.mark.full),
        (STREAMING | SPARSE, {"layout__dp": 4, "layout__zero": 3}),
    ],
)
def test_islands_come_and_go_at_any_checkpoint(
    ranks: Ranks,
    corpus: Path,
    tmp_path: Path,
    trained_once: TrainedOnce,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    """A run goes on from the model that its islands agreed on, with each island's moments or the first's."""
    whole, _ = trained_once(spec_of(corpus))  # whose samples are those of any layout
    first, _ = trained_once(spec_of(corpus, **before, train__stop_at=HALF), tmp_path / "moved")
    moved, _ = start(ranks, spec_of(corpus, **after), tmp_path / "moved", "auto")
    assert moved["samples_sha256"] == whole["samples_sha256"]
    assert moved["steps"] == STEPS
    assert moved["val_loss"] < first["val_loss"]


def test_a_loaded_checkpoint_has_each_islands_own_states(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, **ISLANDS | SPARSE | {"layout__replicate": 4}, train__stop_at=HALF)
    start(ranks, spec, tmp_path / "run")
    fewer = spec_of(corpus, **ISLANDS | SPARSE)
    saved = ranks.run(spec.layout, held, spec, tmp_path / "run")
    loaded = ranks.run(fewer.layout, held, fewer, tmp_path / "run")
    assert loaded == saved[:2]
    for kind in ("parameter", "exp_avg", "error"):
        assert len({own[kind] for own in saved}) == 4
    assert len({own["model"] for own in saved}) == 1


def held(mesh: Mesh, spec: RunSpec, out: Path) -> dict[str, float]:
    """Sums of what a rank has after it has loaded the newest checkpoint."""
    from meshwright.train.callbacks import Observers
    from meshwright.train.open_run import open_run

    run = open_run(spec, mesh, out, Observers([]))
    run._go_on_from(run.starting_points.resume("auto"))
    trainer = run.trainer
    run.loader.close()
    run.store.close()
    own = trainer.prefix
    sums = {"parameter": 0.0, "exp_avg": 0.0, "error": 0.0, "model": 0.0}
    for name, tensor in state.tensors(trainer).items():
        kind = {
            f"{own}model": "parameter",
            f"{own}optim": "exp_avg",
            f"{own}outer": "error",
            "model": "model",
        }
        key = next((value for prefix, value in kind.items() if name.startswith(f"{prefix}/")), None)
        if key and "exp_avg_sq" not in name:
            sums[key] += float(tensor.full_tensor().double().abs().sum())
    return sums
