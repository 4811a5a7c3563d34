"""Predictions beside published measurements: the errors that are claimed, and how rows are read."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.planner.cost.uncertainty import SIGMA_TIME
from meshwright.planner.explain.candidate import TIMED
from meshwright.planner.validation import left_out, metrics
from meshwright.planner.validation import page as validation_page
from meshwright.planner.validation.calibration import is_used
from meshwright.planner.validation.cases import case_of
from meshwright.planner.validation.metrics import ValidatedTable, cells, report, validate
from meshwright.planner.validation.ranking import Cell, figures, kendall
from meshwright.planner.validation.table import FRONTIER, PUBLISHED, PredictionError, read
from meshwright.spec import UserError

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def whole() -> ValidatedTable:
    return validate()


@pytest.fixture(scope="module")
def found(whole: ValidatedTable) -> dict:
    return report(whole)


@pytest.fixture(scope="module")
def frontier() -> ValidatedTable:
    return validate(FRONTIER)


@pytest.fixture(scope="module")
def unseen() -> list[left_out.LeftOut]:
    return left_out.read()


def source(found: dict, words: str) -> dict:
    (part,) = [part for name, part in found["by_source"].items() if words in name]
    return part


def test_every_row_is_counted(found: dict) -> None:
    assert found["rows"] == 303
    assert found["predicted"] + sum(found["skipped"].values()) == 303
    assert sum(part["rows"] for part in found["by_source"].values()) == 303
    assert set(found["skipped"]) == {reason for reason in found["skipped"] if "of its shape" in reason}


def test_step_time_over_all_rows(found: dict) -> None:
    assert found["time"]["mean_abs_pct"] <= 6.5
    assert found["time"]["median_abs_pct"] <= 5
    assert found["time"]["rows"] > 280


def test_step_time_of_the_frontier(frontier: ValidatedTable) -> None:
    assert len(frontier.predictions) == 151
    errors = {True: [], False: []}
    for each in frontier.predictions:
        errors[each.spec.model.moe is not None].append(abs(each.time_error_pct or 0.0))
    dense, experts = errors[False], errors[True]
    assert sum(dense) / len(dense) <= 8 and sum(experts) / len(experts) <= 15
    assert sum(not each.fits for each in frontier.predictions) <= 0.02 * 151  # all of them ran


def test_the_stacks_that_were_timed_are_those_of_the_published_runs(
    whole: ValidatedTable, frontier: ValidatedTable
) -> None:
    timed: dict[str, set[str]] = {}
    for each in [*whole.predictions, *frontier.predictions]:
        if each.time_error_pct is not None:
            timed.setdefault(each.case.cluster.device.name, set()).add(each.case.stack.name)
    assert {device: set(stacks) for device, stacks in TIMED.items()} == timed


def test_less_than_a_third_of_the_frontier_calibrates(frontier: ValidatedTable) -> None:
    used = [row for row in frontier.read if is_used(row, FRONTIER)]
    others = {row.words["model"].split("(")[0].strip() for row in frontier.read if row not in used}
    assert 0 < len(used) <= 151 / 3
    assert not others & {row.words["model"].split("(")[0].strip() for row in used}  # whole models


def test_sources_that_were_left_out_of_the_fit(unseen: list[left_out.LeftOut]) -> None:
    all_runs = left_out.report(unseen)
    assert all_runs["rows"] >= 440 and len(all_runs["by_source"]) >= 15
    assert all_runs["mean_abs_pct"] <= 8.5 and all_runs["median_abs_pct"] <= 6.1
    assert set(all_runs["by_regime"]) == set(SIGMA_TIME)
    for part in (all_runs, *all_runs["by_regime"].values()):
        assert 0.85 <= part["covered"] <= 0.95


def test_what_was_left_out_belongs_to_the_numbers_as_they_stand(
    unseen: list[left_out.LeftOut], whole: ValidatedTable, frontier: ValidatedTable
) -> None:
    """`python bench/calibrate.py --leave-out` writes the file again."""
    now = {
        (table.table.stem, each.case.row.number): each
        for table in (whole, frontier)
        for each in table.predictions
        if each.case.seconds is not None
    }
    assert {(run.table, run.row) for run in unseen} == set(now)
    for run in unseen:
        each = now[run.table, run.row]
        assert run.fitted == pytest.approx(each.seconds, rel=1e-3)
        assert run.measured == pytest.approx(each.case.seconds, rel=1e-3)
        assert (run.regime, run.inferred) == (each.regime, len(each.case.inferred))


@pytest.mark.parametrize(("words", "most"), [("SC21", 8), ("Korthikanti", 6), ("vTrain", 10), ("dgxc", 8)])
def test_step_time_by_source(found: dict, words: str, most: float) -> None:
    assert source(found, words)["time"]["mean_abs_pct"] <= most


@pytest.mark.parametrize(("words", "most"), [("torchtitan", 8), ("Zero Bubble", 8)])
def test_memory_by_source(found: dict, words: str, most: float) -> None:
    assert source(found, words)["memory"]["mean_abs_pct"] <= most


def test_memory_over_all_rows(found: dict) -> None:
    assert found["memory"]["mean_abs_pct"] <= 12


def test_what_did_not_fit_is_not_predicted_to(whole: ValidatedTable) -> None:
    assert sum(each.case.ran is False for each in whole.predictions) == 2
    for each in whole.predictions:
        if each.case.ran is False:
            assert not each.fits
        if each.case.ran:
            assert each.memory.device <= 1.02 * each.case.cluster.device.memory


def test_the_command_prints_the_published_rows_within_100_columns(
    whole: ValidatedTable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(metrics, "validate", lambda table: asked.append(table) or whole)
    assert main(["validate", "--rows"]) == 0
    assert asked == [PUBLISHED, FRONTIER]
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "each predicted without its source" in printed
    assert "the table is of 303 published runs; of" in printed  # the other table's figures are one line
    assert "torchtitan benchmarks/llama3_h100_202412_torchtitan.md" in printed  # whole names


def test_intervals_of_90_percent_hold_about_as_many(found: dict) -> None:
    assert 0.85 <= found["covered"] <= 0.97


def test_the_page_is_what_the_command_makes(
    found: dict, frontier: ValidatedTable, unseen: list[left_out.LeftOut]
) -> None:
    whole = found | {"frontier": report(frontier), "left_out": left_out.report(unseen)}
    assert (DOCS / "validation.md").read_text() == validation_page.page(whole)
    assert "303" not in validation_page.page(
        report(frontier)
    )  # the page of another table has its figures alone


def rows(tmp_path: Path, **changed: str) -> list:
    """The table with the first row changed."""
    with PUBLISHED.open(newline="") as file:
        reader = csv.DictReader(file)
        listed = list(reader)
        names = list(reader.fieldnames or [])
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerow({**listed[0], **changed})
    return read(path)


EMPTY = {"step_seconds": "", "tokens_per_sec_per_gpu": "", "tflops_per_gpu": "", "mfu_pct": ""}


def test_any_kind_of_speed_is_a_time(tmp_path: Path) -> None:
    (plain,) = rows(tmp_path)
    expected = case_of(plain, [plain]).seconds
    assert expected == 3.528
    tokens = 512 * 2048
    (rate,) = rows(tmp_path, **EMPTY | {"tokens_per_sec_per_gpu": str(tokens / 3.528 / 32)})
    assert case_of(rate, [rate]).seconds == pytest.approx(expected)
    (flops,) = rows(tmp_path, **EMPTY | {"tflops_per_gpu": "137"})
    assert case_of(flops, [flops]).seconds == pytest.approx(expected, rel=0.02)  # of the hardware
    (share,) = rows(tmp_path, **EMPTY | {"mfu_pct": str(100 * 137 / 312 * 3 / 4)})
    assert case_of(share, [share]).seconds == pytest.approx(expected, rel=0.05)  # of the model


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"gpu": "Abacus-1"}, "'Abacus-1' is not in the catalogue"),
        ({"gpus": ""}, "no gpus"),
        ({"seq_len": ""}, "no seq_len"),
        ({"tp": "3"}, "does not divide its 32 GPUs"),
        ({"hidden": ""}, "which model"),
        ({"global_batch_seqs": ""}, "batch is not known"),
        ({"global_batch_seqs": "33"}, "not shared evenly"),
        (EMPTY, "no measurement"),
        ({"layers": "many"}, "'layers' is 'many', which is not a number in the column's unit"),
        ({"gpus": "nan"}, "'gpus' is 'nan', which is not a whole number of at least 1"),
        ({"gpus": "-8"}, "'gpus' is '-8', which is not a whole number"),
        ({"gpus": "1.5"}, "'gpus' is '1.5', which is not a whole number"),
        ({"gpus": "inf"}, "'gpus' is 'inf', which is not a whole number"),
        ({"gpus": "1e8"}, "'gpus' is '1e8', which is implausible; give at most 10,000,000"),
        ({"layers": "1e9"}, "'layers' is '1e9', which is implausible; give at most 10,000"),
        ({"seq_len": "1e9"}, "give at most 100,000,000"),
        ({"tp": "-1"}, "'tp' is '-1', which is not a whole number of at least 0"),
        ({"step_seconds": "nan"}, "'step_seconds' is 'nan', which is not a measurement"),
        ({"step_seconds": "-3"}, "'step_seconds' is '-3', which is not a measurement"),
        ({"peak_mem_gib": "inf"}, "'peak_mem_gib' is 'inf', which is not a measurement"),
        ({"peak_mem_gib": "0"}, "'peak_mem_gib' is '0', which is not a measurement"),
        ({"layers": "", "params_b": "1e6"}, "which model"),
        (
            {"precision": "int4"},
            "the precision 'int4' is not one of nvfp4, mxfp4, mxfp8, fp8, bf16, fp16, fp32",
        ),
        ({"recompute": "sometimes"}, "the recompute 'sometimes' is not one of none, full, selective"),
        ({"sequence_parallel": "maybe"}, "'maybe' is not one of yes, no"),
        ({"micro_batch": "1000"}, "micro_batch = 1000 is more than the "),
        ({"experts": "8", "top_k": "9", "params_b": ""}, "top_k = 9 is more than its 8 experts"),
        ({"experts": "8", "ep": "3", "params_b": ""}, "ep = 3 does not divide its 8 experts"),
        ({"ep": "64"}, "ep = 64 does not divide the "),
        ({"pp": "4", "vp": "1000", "dp": ""}, "pp x vp = 4000 stages are more than its 24 layers"),
    ],
)
def test_rows_that_cannot_be_predicted_say_why(tmp_path: Path, changed: dict, why: str) -> None:
    (row,) = rows(tmp_path, **changed)
    with pytest.raises(PredictionError, match=why):
        case_of(row, [row])


def test_what_is_not_said_is_inferred_and_told(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, vocab="", layers="", micro_batch="", precision="", zero="")
    case = case_of(row, [row])
    assert {told.split(" = ")[0] for told in case.inferred} == {
        "vocab",
        "layers",
        "micro_batch",
        "precision",
        "zero",
    }
    assert abs(case.specs[0].model.layers - 24) <= 1  # its size is printed with two digits
    assert len(case.specs) > 1


def test_a_file_that_is_no_table_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has no column 'source'"):
        read(path)
    with pytest.raises(UserError, match=r"none.csv: there is no such file"):
        read(tmp_path / "none.csv")
    with pytest.raises(UserError, match=r"cannot be read as a table: Is a directory"):
        read(tmp_path)
    for text, said in (
        ("source;gpu;gpus;seq_len\na;h100;8;2048\n", "separated by ';'; they must be by ','"),
        ("source\tgpu\n", "separated by tabs; they must be by ','"),
        ("source,gpu,gpus,seq_len\n", "has no rows"),
        ("", "is empty"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said) as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_a_broken_row_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with PUBLISHED.open(newline="") as file:
        reader = csv.DictReader(file)
        first, names = next(reader), list(reader.fieldnames or [])
    changes: list[dict[str, str]] = [
        {"gpus": "inf"},
        {},
        {"precision": "int4"},
        {"hidden": "1", "heads": "9"},
    ]
    changes += [{"gpus": "64", "dp": "64", "global_batch_seqs": ""}]  # the batch of row 1, in proportion
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({**first, **changed} for changed in changes)
    found = validate(path)
    assert [each.case.row.number for each in found.predictions] == [1, 4]
    assert found.predictions[1].spec.batch_sequences == 2 * found.predictions[0].spec.batch_sequences
    skipped = found.skipped
    assert [each["row"] for each in skipped] == [0, 2, 3]
    assert all(each["source"] == first["source"] for each in skipped)
    assert all("\n" not in each["reason"] and "pydantic" not in each["reason"] for each in skipped)
    assert "gpus" in skipped[0]["reason"] and "'int4'" in skipped[1]["reason"]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 1), (2, 2), (3, 3)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        ([(1, 2), (2, 1), (3, 3)], 1 / 3),
        ([(1, 1), (1, 2)], None),
    ],
)
def test_kendall(pairs: list, expected: float | None) -> None:
    assert kendall(pairs) == (expected if expected is None else pytest.approx(expected))


def test_a_layout_that_was_measured_again_is_no_further_choice(whole: ValidatedTable) -> None:
    found = [each for each in whole.predictions if each.case.row.words["source"].startswith("Zero Bubble")]
    again = cells([each for each in found for _ in range(3)])
    for repeated, once in zip(again, cells(found), strict=True):
        assert [time for pair in repeated.times for time in pair] == pytest.approx(
            [t for pair in once.times for t in pair]
        )
    one = next(each for each in found if not each.case.block_only)
    assert cells([one] * 3) == []


def test_a_cell_tells_what_its_first_choice_costs() -> None:
    """The layout predicted fastest of five takes half as long again as the fastest, which is fourth."""
    cell = Cell("m", 8, "g", 1024, [(1.0, 3.0), (2.0, 4.0), (3.0, 5.0), (4.0, 2.0), (5.0, 6.0)])
    assert cell.regret_pct == pytest.approx(50.0) and not cell.is_fastest_shown
    near = Cell("m", 8, "g", 1024, [(1.0, 3.0), (2.0, 4.0), (3.0, 2.0), (4.0, 5.0)])
    both = figures([cell, near])
    assert near.is_fastest_shown and both["fastest_shown"] == 1 and both["groups"] == 2
    assert figures([])["regret_median_pct"] is None


def test_figures_by_another_column_add_up(whole: ValidatedTable) -> None:
    by_gpu = report(whole, "gpu")["by_gpu"]
    assert sum(part["rows"] for part in by_gpu.values()) == 303 and len(by_gpu) > 2
    assert sum(part["time"]["rows"] for part in by_gpu.values()) == report(whole)["time"]["rows"]
    with pytest.raises(UserError, match=r"by: 'gpus' is not a column .* source, model, gpu"):
        report(whole, "gpus")
