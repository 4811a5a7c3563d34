"""The comparison with other programs: what a turn measures, the figures of a row, and the page."""

from __future__ import annotations

import importlib.util
import json
import sys
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


def test_a_turn_has_the_tokens_that_we_train_on_and_what_is_held(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(PEER)
    case = run.Case("small", "fp32", "one")
    tokens = tmp_path / "tokens.npy"
    run.tokens_of(case, 3, tokens)
    monkeypatch.setattr(run, "python_of", lambda side: Path(sys.executable))
    side = run.Side("here", str(tmp_path / "program.py"), "none", "", ("one",))
    turn = run.their_turn(side, case, 3, tokens)
    assert turn.error is None and turn.note == "a note"
    batches = torch.from_numpy(run.numpy.load(tokens))
    assert turn.losses == [float(batch[0, 0]) for batch in batches] and len(turn.seconds) == 3
    (held,) = turn.held
    assert held["parameters"] == {"elements": 512 * 4 + 4, "bytes": 4 * (512 * 4 + 4), "types": ["float32"]}
    assert held["states"]["elements"] == 2 * (512 * 4 + 4)
    assert turn.peak > 50e6 and 0 < turn.first < 60


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
    monkeypatch.setattr(run, "LIMIT", 1.0 if "sleep" in program else 60.0)
    turn = run.Turn()
    list(run.finished([sys.executable, "-c", program], [0], 1, tmp_path, turn))
    assert turn.error == words
    row = run.row_of(run.Case("small", "bf16", "one"), "here", [turn], [turn], [1e9], 1.0)
    assert row["error"] == words and "does not run" in run.page([row])


def test_memory_is_not_read_while_steps_are_timed(run: ModuleType, tmp_path: Path) -> None:
    turn = run.Turn()
    turn.note_step(run.WARM, run.WARM + 3)
    program = "import time; time.sleep(1.2)"
    list(run.finished([sys.executable, "-c", program], [0], 1, tmp_path, turn))
    assert turn.timed and turn.peak == 0
    turn.note_step(run.WARM + 3, run.WARM + 3)
    list(run.finished([sys.executable, "-c", program], [0], 1, tmp_path, turn))
    assert not turn.timed and turn.peak > 0


def test_the_figures_of_a_row(run: ModuleType) -> None:
    warm = [9.0] * run.WARM
    ours = [
        run.Turn([*warm, 1.0, 1.0, 1.0], [2.0, 1.0], 100, 3.0),
        run.Turn([*warm, 2.0, 2.0, 2.0], [2.0, 1.0]),
    ]
    theirs = [
        run.Turn([*warm, 2.0, 2.0, 2.0], [2.0, 1.0], 300, 5.0),
        run.Turn([*warm, 3.0, 3.0, 3.0], [3.0, 1.5]),
    ]
    row = run.row_of(run.Case("small", "bf16", "one"), "them", theirs, ours, [4096.0, 4096.0], 0.5)
    assert row["ratios"] == [2.0, 1.5] and row["ratio"] == 1.75
    assert row["tokens_per_second"] == pytest.approx(4096 / 2.5)
    assert row["matmul_fraction"] == pytest.approx((0.25 + 1 / 6) / 2, abs=1e-3)
    assert row["losses"] == [3.0, 1.5]


def test_rows_of_a_case_on_a_processor_replace_those_before(run: ModuleType, tmp_path: Path) -> None:
    def row(case: str, value: int, processor: str = "A") -> dict[str, Any]:
        machine = f"{processor}, 2 cores; 2026-11-{value:02}"
        return {"model": "small", "precision": "bf16", "case": case, "machine": machine, "value": value}

    file = tmp_path / "rows.jsonl"
    for rows in ([row("one", 1)], [row("tp2", 2)], [row("one", 3, "B")], [row("one", 4), row("one", 5)]):
        run.record(file, rows)
    assert [json.loads(line)["value"] for line in file.read_text().splitlines()] == [2, 3, 4, 5]


def test_each_case_has_a_table_for_each_processor(run: ModuleType) -> None:
    turn = run.Turn([9.0] * run.WARM + [1.0] * 3, [2.0, 1.0], 100, 3.0)
    rows = [
        run.row_of(run.Case("small", "bf16", case), "here", [turn], [turn], [rate], 1.0)
        | {"machine": f"{processor}, 2 cores"}
        for case, processor, rate in (("tp2", "B", 1e9), ("one", "A", 2e9), ("tp2", "A", 3e9))
    ]
    lines = run.page(rows).splitlines()
    told = [line for line in lines if line.startswith(("## small", "A, ", "B, "))]
    rates = ["A, 2 cores; matrix products at 3 GFLOP/s.", "B, 2 cores; matrix products at 1 GFLOP/s."]
    assert told[1:3] == rates and told[4] == "A, 2 cores; matrix products at 2 GFLOP/s."
    assert told[0] == "## small, bf16: two processes, tensor parallel"
    assert told[3] == "## small, bf16: one process on all cores" and len(told) == 5


def test_each_program_and_its_requirements_are_there(run: ModuleType) -> None:
    for side in run.SIDES:
        assert (PEERS / side.program).is_file(), side.name
        listed = (PEERS / "requirements" / f"{side.venv}.txt").read_text()
        assert "torch==2.13.0" in listed


def test_the_page_is_made_of_the_rows(run: ModuleType) -> None:
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (ROOT / "bench" / "results" / "peers.jsonl").open(encoding="utf-8")
    ]
    assert run.page(rows) == (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
