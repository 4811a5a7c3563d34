"""The comparison with other programs: what a turn measures, the figures of a row, and the page."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "bench" / "peers"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    """The program `run.py`, whose name others may have."""
    sys.path.insert(0, str(PEERS))
    spec = importlib.util.spec_from_file_location("peers_run", PEERS / "run.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["peers_run"] = found
    spec.loader.exec_module(found)
    sys.path.remove(str(PEERS))
    return found


PEER = """
from peer import adamw, held, job, run, settings
import torch
given = job()
settings(given)
model = torch.nn.Linear(given.hidden, 4)
optimiser = adamw(model.parameters())
def step(tokens):
    assert tokens.shape == (8, 513)
    model(torch.ones(given.hidden)).sum().backward()
    optimiser.step()
    return float(tokens[0, 0])
run(given, step, lambda: held(model, optimiser), "a note")
"""


def test_a_peer_has_the_tokens_that_we_train_on_and_what_is_held(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(PEER)
    case = run.Case("small", "fp32", "one")
    tokens = tmp_path / "tokens.npy"
    run.tokens_of(case, 3, tokens)
    monkeypatch.setattr(run, "python_of", lambda side: Path(sys.executable))
    side = run.Side("here", str(tmp_path / "program.py"), "none", "", ("one",))
    with run.their_program(side, case, 3, tokens, tmp_path) as program:
        program.end()
    report = program.report
    assert report.error is None and report.note == "a note"
    batches = torch.from_numpy(run.numpy.load(tokens))
    assert report.losses == [float(batch[0, 0]) for batch in batches] and len(report.seconds) == 3
    (held,) = report.held
    assert held["parameters"] == {"elements": 512 * 4 + 4, "bytes": 4 * (512 * 4 + 4), "types": ["float32"]}
    assert held["states"]["elements"] == 2 * (512 * 4 + 4)
    assert report.peak > 50e6 and 0 < report.first < 60


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise ValueError('no such layout')", "ValueError: no such layout"),
        ("import time; time.sleep(60)", "stopped after 1 s"),
    ],
)
def test_a_side_that_does_not_run_has_its_error(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    monkeypatch.setattr(sys.modules[run.Program.__module__], "LIMIT", 1.0 if "sleep" in program else 60.0)
    with started(run, program, tmp_path) as side:
        assert not side.until(1)
        side.end()
    assert side.report.error == words
    found = run.Round(side.report, [], [], 0.0)
    row = run.row_of(run.Case("small", "bf16", "one"), "here", [found], plan(run), 1.0)
    assert row["error"] == words and "does not run" in run.page([row])


STEPS = """
import subprocess, sys, time
rank = "import time\\nfor step in range(40): time.sleep(0.05); print(step, time.time(), flush=True)"
subprocess.run([sys.executable, "-c", rank], start_new_session=True)
"""


def started(run: ModuleType, program: str, folder: Path) -> Any:
    """A program whose lines are steps, with the time at which each ended."""

    def read(line: str, report: Any) -> None:
        report.steps += 1
        report.seconds.append(float(line.split()[1]))

    return run.Program([sys.executable, "-c", program], [0], os.environ, folder, read)


def test_a_program_that_is_stopped_takes_no_steps(run: ModuleType, tmp_path: Path) -> None:
    with started(run, STEPS, tmp_path) as side:
        assert side.until(3)
        stopped = time.time()
        time.sleep(1.0)
        assert side.until(10, timed=True)
        went_on = time.time()
        side.end()
    ends = side.report.seconds
    assert side.report.error is None and len(ends) == 40 and 0 < side.report.first < 60
    assert ends[2] < stopped and ends[4] > stopped + 1.0 and ends[9] < went_on
    assert max(ends[i + 1] - ends[i] for i in range(4, 9)) < 0.5


def test_lines_may_be_those_of_a_file(run: ModuleType, tmp_path: Path) -> None:
    """A line counts when it is whole, and the last ones when the program has ended."""
    program = """
import sys, time
print("nothing", flush=True)
time.sleep(0.2)
with open("lines", "w") as lines:
    for part in ("1 2", ".5\\n", "2 3.5\\n3 ", "4.5\\n"):
        lines.write(part)
        lines.flush()
        time.sleep(0.2)
"""
    found: list[str] = []
    with run.Program(
        [sys.executable, "-c", program], [0], os.environ, tmp_path,
        lambda line, report: found.append(line), tmp_path / "lines",
    ) as side:  # fmt: skip
        side.end()
    assert found == ["1 2.5\n", "2 3.5\n", "3 4.5\n"] and side.report.error is None


def test_a_program_that_ends_before_its_file_is_there_has_its_error(run: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise ValueError('no such layout')"]
    with run.Program(command, [0], os.environ, tmp_path, print, tmp_path / "lines") as side:
        assert not side.until(1)
        side.end()
    assert side.report.error == "ValueError: no such layout"


ROWS = """
import json, sys
with open(sys.argv[1], "w") as file:
    for loss in (3.0, 2.0):
        print(json.dumps({"loss": loss, "seconds": float(sys.argv[2])}), file=file)
"""


def test_steps_of_independent_runs_are_those_of_their_speeds_together(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PEERS))
    independent_runs = importlib.import_module("independent_runs")
    outs = [tmp_path / "slow", tmp_path / "fast"]
    runs = []
    for out, seconds in zip(outs, ("0.6", "0.3"), strict=True):
        out.mkdir()
        runs.append(subprocess.Popen([sys.executable, "-c", ROWS, str(out / "metrics.jsonl"), seconds]))
    # The second has ended before the first is followed: all lines have the latest step of both.
    assert [each.wait(60) for each in runs] == [0, 0]
    monkeypatch.setattr(independent_runs.threading.Thread, "start", independent_runs.threading.Thread.run)
    independent_runs.report(runs, outs)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["loss"] for line in lines] == [2.5, 2.0]
    assert [line["seconds"] for line in lines] == pytest.approx([0.4, 0.4])


@pytest.mark.full
def test_independent_runs_have_the_speed_of_all_together(run: ModuleType, tmp_path: Path) -> None:
    """Two runs of `tiny` share out a step; a row's seconds are no longer than the slower one's."""
    case = run.Case("tiny", "fp32", "replicate")
    (side,) = [each for each in run.SIDES if not each.venv]
    with run.their_program(side, case, 4, tmp_path / "tokens.npy", tmp_path) as program:
        program.end()
    report = program.report
    assert report.error is None and report.steps >= 4 and len(report.held) == 2
    files = [tmp_path / f"run-{number}" / "metrics.jsonl" for number in (0, 1)]
    of_runs = [map(json.loads, file.read_text().splitlines()) for file in files]
    steps = [[row for row in rows if "loss" in row] for rows in of_runs]
    assert [row["tokens"] for row in steps[0][:4]] == [2048, 4096, 6144, 8192]
    assert len(steps[0]) == len(steps[1]) and steps[0][3]["loss"] != steps[1][3]["loss"]
    slowest = max(row["seconds"] for rows in steps for row in rows)
    assert all(0 < seconds <= slowest for seconds in report.seconds)


def test_memory_is_not_read_while_steps_are_timed(run: ModuleType, tmp_path: Path) -> None:
    with started(run, STEPS, tmp_path) as side:
        side.until(40, timed=True)
        assert side.report.peak == 0
    with started(run, STEPS, tmp_path) as side:
        side.until(40)
        assert side.report.peak > 1e6


def test_nothing_of_a_program_is_left(run: ModuleType, tmp_path: Path) -> None:
    """Neither its process nor that of a session of its own, also where both were stopped."""
    with started(run, STEPS, tmp_path) as side:
        side.until(3)
        processes = list(sys.modules[run.Program.__module__].descendants(side._process.pid))
    assert len(processes) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def plan(run: ModuleType) -> Any:
    """Two rounds of two stretches of three steps."""
    return run.Plan(2, 2, 3)


def a_round(run: ModuleType, theirs: list[float], ours: list[float], rate: float = 1e9) -> Any:
    """A round in which the steps of each stretch take so long."""

    def side(seconds: list[float]) -> tuple[Any, list[Any]]:
        report = run.Report([100.0] * 3, [2.0, 1.0] * 10, peak=100, first=3.0)
        stretches = []
        for each in seconds:
            start = len(report.seconds) + 1
            report.seconds += [99.0, each, each, each]
            stretches.append(run.Stretch(report, range(start, start + 3)))
        return report, stretches

    report, stretches = side(theirs)
    return run.Round(report, stretches, side(ours)[1], rate)


def test_the_figures_of_a_row(run: ModuleType) -> None:
    rounds = [
        a_round(run, [2.0, 2.0], [1.0, 2.0], 4096.0),
        a_round(run, [3.0, 3.0], [2.0, 1.0], 4096.0),
    ]
    row = run.row_of(run.Case("small", "bf16", "one"), "them", rounds, plan(run), 0.5)
    assert row["ratios"] == [2.0, 1.0, 1.5, 3.0] and row["ratio"] == 1.75
    assert row["tokens_per_second"] == pytest.approx(4096 / 2.5)
    assert row["matmul_fraction"] == pytest.approx((0.25 + 1 / 6) / 2, abs=1e-3)
    assert row["losses"] == [2.0, 2.0] and row["peak_bytes"] == 100


def test_rows_replace_those_of_the_same_case_processor_and_side(run: ModuleType, tmp_path: Path) -> None:
    def row(case: str, value: int, processor: str = "A", side: str = "us") -> dict[str, Any]:
        machine = f"{processor}, 2 cores; 2026-11-{value:02}"
        found = {"model": "small", "precision": "bf16", "case": case, "machine": machine}
        return found | {"side": side, "value": value}

    file = tmp_path / "rows.jsonl"
    first = [row("one", 1), row("one", 2, side="them")]
    for rows in (first, [row("tp2", 3)], [row("one", 4, "B")], [row("one", 5), row("one", 6, side="others")]):
        run.record(file, rows)
    assert [json.loads(line)["value"] for line in file.read_text().splitlines()] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sides", "Megatron", "torchtitann"], "--sides: 'torchtitann' is in no name of a side"),
        (["--steps", "1"], "give at least 1, 1 and 2"),
    ],
)
def test_a_side_that_is_not_known_is_refused_and_rows_stay(
    run: ModuleType,
    tmp_path: Path,
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "rows.jsonl").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["run.py", *words, "--out", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit) as refused:
        run.main()
    assert refused.value.code == 2 and told in capsys.readouterr().err
    assert (tmp_path / "rows.jsonl").read_text() == "kept"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGHUP, marks=pytest.mark.full), signal.SIGTERM])
def test_a_signal_leaves_no_process(run: ModuleType, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, str(PEERS / "run.py"), "--cases", "one", "--precision", "fp32"]
    descendants = sys.modules[run.Program.__module__].descendants
    with subprocess.Popen([*command, "--out", str(tmp_path / "rows.jsonl")]) as process:
        deadline = time.monotonic() + 60
        while len(processes := list(descendants(process.pid))) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "rows.jsonl").exists()


def test_independent_runs_end_when_one_has_failed(run: ModuleType, tmp_path: Path) -> None:
    """The second run finds its folder taken."""
    case = run.Case("tiny", "fp32", "replicate")
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "run.json").write_text("{}")
    (side,) = [each for each in run.SIDES if not each.venv]
    start = time.monotonic()
    with run.their_program(side, case, 10**6, tmp_path / "tokens.npy", tmp_path) as program:
        program.end()
        children = list(sys.modules[run.Program.__module__].descendants(program._process.pid))
    assert program.report.error is not None and "status 2" in program.report.error
    assert time.monotonic() - start < 60 and len(children) == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("fma avx2 avx512f avx512_bf16 amx_bf16", "(AMX)"),
        ("fma avx2 avx512f avx512_bf16", "(AVX-512 with bf16)"),
        ("fma avx2 avx512f avx512_fp16", "(AVX-512)"),
        ("fma avx avx2", "(AVX2)"),
        ("avx512_vnni", ""),
        ("", ""),
    ],
)
def test_processors_of_one_name_differ_by_their_instructions(run: ModuleType, flags: str, told: str) -> None:
    assert run.instructions(flags) == told


def test_each_case_has_a_table_for_each_processor(run: ModuleType) -> None:
    rows = [
        run.row_of(
            run.Case("small", "bf16", case), "here", [a_round(run, [1.0], [1.0], rate)], plan(run), 1.0
        )
        | {"machine": f"{processor}, 2 cores"}
        for case, processor, rate in (("tp2", "B", 1e9), ("one", "A", 2e9), ("tp2", "A", 3e9))
    ]
    lines = run.page(rows).splitlines()
    told = [line for line in lines if line.startswith(("## small", "A, ", "B, "))]
    assert told == [
        "## small, bf16: one process on all cores",
        "A, 2 cores; matrix products at 2 GFLOP/s.",
        "## small, bf16: two processes, tensor parallel",
        "A, 2 cores; matrix products at 3 GFLOP/s.",
        "B, 2 cores; matrix products at 1 GFLOP/s.",
    ]


def test_a_row_of_another_day_has_its_date(run: ModuleType) -> None:
    def row(side: str, day: str) -> dict[str, Any]:
        found = run.row_of(
            run.Case("small", "bf16", "one"), side, [a_round(run, [1.0], [1.0])], plan(run), 1.0
        )
        return {**found, "machine": f"A, 2 cores; torch 2.13.0; {day}"}

    told = run.page([row("before", "2026-11-27"), row("now", "2026-11-28")])
    assert "| before (2026-11-27) |" in told and "| now |" in told
    assert "A, 2 cores; torch 2.13.0; 2026-11-28; matrix products" in told


def test_each_program_and_its_requirements_are_there(run: ModuleType) -> None:
    for side in run.SIDES:
        assert (PEERS / side.program).is_file(), side.name
        if not side.venv:
            continue
        listed = (PEERS / "requirements" / f"{side.venv}.txt").read_text()
        assert "torch==2.13.0" in listed


def test_the_page_is_made_of_the_rows(run: ModuleType) -> None:
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (ROOT / "bench" / "results" / "peers.jsonl").open(encoding="utf-8")
    ]
    assert run.page(rows) == (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
