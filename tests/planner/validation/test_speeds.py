"""The seconds of a published run, by the FLOPs that its source counts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from changed_rows import case
from meshwright.planner.validation.cases import case_of
from meshwright.planner.validation.table import FRONTIER, PredictionError, read


def test_tflops_of_megatron_bridge_count_half_of_attention(tmp_path: Path) -> None:
    """The row states tokens per second, too, which tell how."""
    speeds = {"step_seconds": "", "tokens_per_sec_per_gpu": ""}
    with FRONTIER.open(newline="") as file:
        rows = list(csv.DictReader(file))
    number = next(
        place for place, row in enumerate(rows)
        if "Megatron-Bridge" in row["source"] and row["model"].startswith("LLAMA3_8B")
        and row["tflops_per_gpu"] and row["tokens_per_sec_per_gpu"]
    )  # fmt: skip
    stated = case(tmp_path, number=number)
    counted = case(tmp_path, number=number, **speeds, mfu_pct="")
    whole = case(tmp_path, number=number, **speeds, mfu_pct="", source="a blog", where="", program="NeMo")
    told = case(
        tmp_path, number=number, **speeds, mfu_pct="", source="a blog", where="TFLOP/s of half of attention"
    )
    assert stated.seconds and counted.seconds == pytest.approx(stated.seconds, rel=0.01)
    named = case(
        tmp_path, number=number, **speeds, mfu_pct="", source="a blog", where="", program="Megatron-Bridge"
    )
    assert told.seconds == counted.seconds == named.seconds
    assert whole.seconds is not None and whole.seconds > 1.02 * stated.seconds


def test_speeds_agree_in_either_count_of_attention(tmp_path: Path) -> None:
    """2,000 tokens/s of 8B at 131,072 tokens are 296 TFLOP/s with half of attention, and 502 with all."""
    cells = {
        "source": "a blog", "model": "llama3-8b", "gpu": "H100", "gpus": "8", "tp": "8", "pp": "1", "cp": "1",
        "dp": "1", "zero": "1", "seq_len": "131072", "global_batch_seqs": "4", "program": "Megatron-Core",
        "precision": "bf16", "tokens_per_sec_per_gpu": "2000",
    }  # fmt: skip
    heading = [*cells, "tflops_per_gpu"]
    for tflops, refused in (("296", False), ("502", False), ("900", True)):
        path = tmp_path / "long.csv"
        path.write_text(",".join(heading) + "\n" + ",".join([*cells.values(), tflops]) + "\n")
        (row,) = read(path)
        if refused:
            with pytest.raises(PredictionError, match="of different speeds"):
                case_of(row, [row])
        else:
            assert case_of(row, [row]).seconds == pytest.approx(4 * 131072 / 8 / 2000)
