"""Whole runs with experts: checkpoints under any layout, stop and resume, what rows tell of the balance."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from meshwright import api
from meshwright.spec import RunSpec
from ranks import Ranks
from training_runs import EXPERTS, digests, go_on, loaded, run_and_watch, spec_of, start, trained


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.full) for zero in (0, 1)), 3])
def test_a_checkpoint_of_expert_ranks_loads_anywhere(
    ranks: Ranks, corpus: Path, tmp_path: Path, zero: int
) -> None:
    def at(**layout: object) -> RunSpec:
        flags = {f"layout__{key}": value for key, value in layout.items()}
        return spec_of(corpus, **flags, **EXPERTS, train__steps=2, layout__micro_batch=1)

    spec = at(dp=4, ep=4, zero=zero)
    wanted = ranks.run(spec.layout, trained, spec, tmp_path)[0]
    biases = [name for name in wanted if name.endswith("router.bias")]
    assert len(biases) == 2 and all(wanted[name].abs().max() > 0 for name in biases)
    for spec in (
        at(dp=2, tp=2, ep=2, zero=zero),
        at(),
        at(dp=2, tp=2, ep=2, etp=2, zero=3),
        at(dp=2, zero=2),
    ):
        for found in ranks.run(spec.layout, loaded, spec, tmp_path):
            assert found == digests(wanted)


def test_a_run_with_experts_stops_resumes_and_moves(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    flags = EXPERTS | {"layout__dp": 2, "layout__ep": 2, "layout__zero": 2, "train__steps": 4}
    spec = spec_of(corpus, **flags, checkpoint__every=2)
    whole, _ = start(ranks, spec, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "moved", symlinks=True)
    again, _ = go_on(ranks, spec, tmp_path / "run", 2)
    assert again["parameters_sha256"] == whole["parameters_sha256"]
    flags |= {"layout__dp": 1, "layout__ep": 2, "layout__tp": 2, "layout__pp": 2, "layout__zero": 0}
    moved, _ = go_on(ranks, spec_of(corpus, **flags), tmp_path / "moved", 2)
    assert moved["final_loss"] == pytest.approx(whole["final_loss"], abs=1e-4)


def test_a_bound_without_expert_ranks_is_told(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """By a run, and by its dry run; with expert ranks neither has a word to say."""
    for count, told in ((1, 1), (2, 0)):
        flags = EXPERTS | {"layout__dp": 2, "layout__ep": count, "layout__expert_buffer_factor": 4.0}
        spec = spec_of(corpus, **flags, train__steps=1)
        _, events = ranks.run(spec.layout, run_and_watch, spec, tmp_path / str(count))[0]
        warned = [fields["message"] for kind, fields in events if kind == "warning"]
        assumed = api.dryrun(spec)["assumed"]
        for sentences in (warned, assumed):
            found = [each for each in sentences if "expert_buffer_factor" in each]
            assert len(found) == told and all("4 has no effect" in each for each in found), sentences


def test_rows_of_a_run_with_experts_tell_their_balance(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    flags = EXPERTS | {"layout__dp": 2, "layout__pp": 2, "layout__ep": 2, "train__steps": 2}
    flags |= {"model__moe__capacity_factor": 0.5, "model__moe__aux_loss": 0.01, "layout__micro_batch": 1}
    spec = spec_of(corpus, **flags)
    for row in ranks.run(spec.layout, run_and_watch, spec, tmp_path)[0][0]:
        assert list(row["expert_load"]) == ["1", "2"]
        for loads in row["expert_load"].values():
            assert sum(loads) == pytest.approx(8, abs=1e-3)
        assert row["load_max"] == pytest.approx(max(map(max, row["expert_load"].values())), abs=1e-3)
        assert 0.5 <= row["dropped"] < 1 and 0 < row["router_entropy"] <= math.log(8)
        assert row["aux_loss"] > 0 and "z_loss" not in row
