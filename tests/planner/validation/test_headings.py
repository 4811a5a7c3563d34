"""The headings of tables of runs: names from elsewhere, slips of the pen, and columns of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from changed_rows import case
from meshwright.planner.validation.table import read
from meshwright.spec import UserError


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("tensor_model_parallel_size", "tp"),
        ("pp_size", "pp"),
        ("expert_model_parallel_size", "ep"),
        ("data_parallel", "dp"),
        ("zero_stage", "zero"),
        ("activation_checkpointing", "recompute"),
        ("virtual", "vp"),
        ("tps", "tokens_per_sec_per_gpu"),
    ],
)
def test_usual_names_of_columns_elsewhere_are_refused_with_theirs(
    tmp_path: Path, written: str, name: str
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"source,gpu,gpus,seq_len,step_seconds,{written}\na,H100,8,2048,1,8\n".replace(
        "step_seconds", "mfu_pct" if name.startswith("tokens") else "step_seconds"))  # fmt: skip
    with pytest.raises(UserError, match=f"unknown column '{written}'; did you mean '{name}'"):
        read(path)


@pytest.mark.parametrize(
    ("heading", "says"),
    [
        ("source,gpu,gpus,seq_len,gpu", "has the column 'gpu' twice"),
        ("source,gpu,gpus,seq_len,step_second", "'step_second'; did you mean 'step_seconds'"),
    ],
)
def test_a_heading_that_is_a_slip_of_the_pen_is_refused(tmp_path: Path, heading: str, says: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{heading}\na,H100,8,2048,1\n")
    with pytest.raises(UserError, match=says):
        read(path)


def test_columns_of_ones_own_are_left_alone(tmp_path: Path) -> None:
    found = case(tmp_path, notes="my first run", layers_note="all alike", gpu_hours="12")
    assert found.row.words.get("broken") is None
