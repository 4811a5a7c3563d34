"""The tests of tests/gpu, a process for each file, several at a time.

What a file's process leaves behind when it hangs or crashes are the outcomes of the tests before
(`test_outcomes`). Where the device is faked tests are collected only: fake tensors have no values.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gpu_day.commands import ROOT, environment, last_lines, python, run_limited
from gpu_day.results import Row, Work

FOLDER = ROOT / "tests" / "gpu"
ALONE = ("test_cuda_profile.py", "test_cuda_two_ranks.py")
"""Files that measure the device's speed, or wait for processes that do not share it: they come last."""
AT_ONCE = 4
TEST_SECONDS = 60
"""A test that takes longer ends its file's process."""
LEAST = 15.0
"""Seconds that a file needs to begin."""


def run(work: Work) -> None:
    """A row for each file of tests with its outcomes."""
    if importlib.util.find_spec("pytest") is None:
        work.add({"file": "tests/gpu", "error": "pytest is not installed"})
        return
    files = sorted(FOLDER.glob("test_*.py"))
    if work.faked:
        for row in outcomes(work, files, "tests"):
            work.add(row)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = [file for file in files if file.name not in ALONE]
        begun = [pool.submit(outcomes, work, [file], file.stem) for file in together]
        for done in as_completed(begun):
            for row in done.result():
                work.add(row)
    for file in (file for file in files if file.name in ALONE):
        for row in outcomes(work, [file], file.stem):
            work.add(row)


def outcomes(work: Work, files: Sequence[Path], name: str) -> list[Row]:
    """The outcomes of files, which one process runs, a row each."""
    if work.left < LEAST:
        return [{"file": file.name, "error": "no time was left"} for file in files]
    told, log = work.folder / f"{name}.jsonl", work.folder / f"{name}.log"
    told.unlink(missing_ok=True)
    words = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "gpu_day.test_outcomes", "-q", "-m", "gpu"]
    if importlib.util.find_spec("hypothesis") is None:  # which the fixtures of all tests import
        words += ["--confcutdir", str(FOLDER)]
    if work.faked:
        words += ["--collect-only"]
    env = environment(GPU_DAY_OUTCOMES=str(told), GPU_DAY_TEST_SECONDS=str(TEST_SECONDS))
    began = time.monotonic()
    code = run_limited(python(*words, *map(str, files)), work.left - 5, log, env)
    seconds = round(time.monotonic() - began, 1)
    lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    entries = [json.loads(line) for line in lines]
    return [_row(file, entries, code, seconds, log, work.faked) for file in files]


def _row(file: Path, entries: Sequence[Any], code: int | None, seconds: float, log: Path, faked: bool) -> Row:
    own = [each for each in entries if Path(each["test"].partition("::")[0]).name == file.name]
    collected = {each["test"] for each in own if each["outcome"] == "collected"}
    ended = [each for each in own if each["outcome"] != "collected"]
    counts = Counter(each["outcome"] for each in ended)
    row: Row = {
        "file": file.name,
        "collected": len(collected),
        **{name: counts[name] for name in ("passed", "failed", "skipped")},
        "not_run": 0 if faked else len(collected - {each["test"] for each in ended}),
        "seconds": seconds,
        "failures": [
            {"test": each["test"].partition("::")[2], "why": each["why"]}
            for each in ended
            if each["outcome"] == "failed"
        ],
        "reasons": dict(Counter(each["why"] for each in ended if each["outcome"] == "skipped")),
    }
    if not collected or (row["not_run"] and not counts["failed"]):
        row["error"] = f"exit code {code}: {last_lines(log, 3)}" if code is not None else "no time was left"
    return row
