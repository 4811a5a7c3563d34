"""MFU in both conventions, against the measured rate and the datasheet: formulas, and where they are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshwright import api
from meshwright.hardware.find import cluster
from meshwright.planner.plan import estimate
from meshwright.report.progress import summary
from meshwright.report.run_page import write_report
from meshwright.runs.record import read_metrics
from meshwright.spec import load
from meshwright.train import metrics
from meshwright.train.mfu import datasheet_flops_per_second, shares_of_rates
from recorded_runs import RESULT, record_run

CUDA = torch.device("cuda", 0)
OF_DATASHEET = {"mfu_datasheet", "causal_mfu_datasheet"}
RUN = {
    "model.preset": "tiny", "data.corpus": "synthetic", "data.seq_len": "16", "train.steps": "2",
    "train.batch_tokens": "32", "layout.micro_batch": "1", "train.eval_tokens": "32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "format", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 80GB HBM3", "fp32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "fp8", 312.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("A GPU of no catalogue", "bf16", None),
    ],
)
def test_the_peak_is_that_of_the_datasheet(
    name: str, format: str, tera: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    found = datasheet_flops_per_second(CUDA, format)
    assert (found and found / 1e12) == tera
    assert datasheet_flops_per_second(torch.device("cpu"), format) is None


def test_shares_are_those_of_the_formulas_and_of_plans() -> None:
    spec = load(None, [("model.preset", "llama3-8b"), ("data.corpus", "synthetic"), ("data.seq_len", "8192"),
                       ("train.batch_tokens", "131072"), ("layout.dp", "8"), ("layout.micro_batch", "1"),
                       ("precision.compute", "bf16")])  # fmt: skip
    model, peak, speed = spec.model, 8 * 989.4e12, 76_000.0
    weights = model.parameters - model.vocab_size * model.hidden  # the lookup multiplies nothing
    norms = model.hidden * (2 * model.layers + 1)
    products = 6 * (weights - norms)
    attention = 12 * model.layers * model.heads * model.head_dim * 8192
    found = shares_of_rates(spec, (), speed, 1e15, peak)
    assert found["mfu"] == pytest.approx((products + attention) * speed / 1e15)
    assert found["mfu_datasheet"] == pytest.approx((products + attention) * speed / peak)
    causal = (products + attention * (8192 + 1) / 2 / 8192) * speed / peak
    assert found["causal_mfu_datasheet"] == pytest.approx(causal, rel=1e-4)
    assert shares_of_rates(spec, (), speed, 1e15, None).keys() == {"mfu"}
    plan = estimate(spec, cluster("h100", 8))
    same = shares_of_rates(spec, (), plan.tokens_per_second, 1e15, peak)
    assert same["mfu_datasheet"] == pytest.approx(plan.mfu)
    assert same["causal_mfu_datasheet"] == pytest.approx(plan.causal_mfu)


@pytest.mark.parametrize("peak", [None, 1e12])
def test_a_run_tells_it_where_the_peak_is_known(
    peak: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "datasheet_flops_per_second", lambda *_: peak)
    result = api.train(load(None, [*RUN.items()]), out=tmp_path / "run", quiet=True)
    rows = [row for row in read_metrics(tmp_path / "run") if "mfu" in row]
    told = OF_DATASHEET if peak else set()
    assert len(rows) == 2 and all(row.keys() & OF_DATASHEET == told for row in rows)
    assert result.keys() & OF_DATASHEET == told and result["datasheet_flops_per_second"] == peak
    if peak is not None:  # the measured rate may have grown since a row, where another process ended
        measured = result["mfu"] * result["matmul_flops_per_second"]
        assert result["mfu_datasheet"] * peak == pytest.approx(measured)
        for row in (*rows, result):
            flops_of_a_token = row["mfu_datasheet"] * peak / row["tokens_per_second"]
            assert flops_of_a_token == pytest.approx(measured / result["tokens_per_second"])
            assert 0.5 * row["mfu_datasheet"] < row["causal_mfu_datasheet"] < row["mfu_datasheet"]


def test_the_last_line_and_the_page_show_it_where_it_is_known(tmp_path: Path) -> None:
    known = RESULT | {"mfu_datasheet": 0.559, "causal_mfu_datasheet": 0.498}
    assert "mfu 30.0% (55.9% of the datasheet, 49.8% causal)  peak" in summary(known)
    assert "mfu 30.0%  peak" in summary(RESULT)
    page = write_report(record_run(tmp_path / "known", result=known)).read_text("utf-8")
    assert "MFU of the datasheet" in page and "55.9%" in page and "49.8% with causal attention" in page
    assert "of the datasheet" not in write_report(record_run(tmp_path / "unknown")).read_text("utf-8")
    assert json.loads((tmp_path / "known" / "result.json").read_text())["causal_mfu_datasheet"] == 0.498
