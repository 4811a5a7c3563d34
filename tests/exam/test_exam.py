"""The exam's rules, that each mutation still applies, and the exam itself: a small part without `full`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exam import Ended, Mutation, judged, load_exam, source_of, sums

EXAM = load_exam()
QUICK = "16"
"""Id of the mutation that `make test` plants."""


@pytest.mark.parametrize("mutation", EXAM.mutations, ids=lambda mutation: mutation.id)
def test_every_mutation_applies_once_and_changes_a_module_that_compiles(mutation: Mutation) -> None:
    text = source_of(mutation)
    changed = text.replace(mutation.old, mutation.new)
    assert changed != text
    if mutation.file.endswith(".py"):  # the others are compiled when the command runs
        compile(changed, mutation.file, "exec")
    re.compile(mutation.named)


def test_there_is_a_mutation_for_each_public_bug_and_each_has_a_command() -> None:
    ids = [mutation.id for mutation in EXAM.mutations]
    assert len(ids) == len(set(ids))
    public = [mutation for mutation in EXAM.mutations if mutation.public is not None]
    assert {mutation.public for mutation in public} == set(range(1, 29))
    assert all(mutation.threads for mutation in public)
    assert {mutation.run for mutation in EXAM.mutations} == EXAM.runs.keys()


def sit_exam(folder: Path, *flags: str, seconds: float) -> dict[str, Any]:
    """Result that `exam.py` wrote, which runs in a process that has not imported the package."""
    file = folder / "marks.json"
    program = Path(__file__).with_name("exam.py")
    command = [sys.executable, str(program), "--json", str(file), *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert file.exists(), ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert not found["false_alarms"], ran.stdout
    return found


def test_a_mutation_of_a_sum_is_caught_and_named(tmp_path: Path) -> None:
    (mark,) = sit_exam(tmp_path, "--only", QUICK, seconds=200)["marks"]
    assert mark["id"] == QUICK and mark["caught"] and mark["named"], mark


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_every_mutation_is_caught_unless_it_says_why_not(tmp_path: Path) -> None:
    found = sit_exam(tmp_path, seconds=2900)
    caught = {mark["id"]: mark["caught"] for mark in found["marks"]}
    assert caught == {mutation.id: not mutation.missed for mutation in EXAM.mutations}
    assert all(found[key] == least for key, least in EXAM.floor.items() if "caught" in key)


# The rules -------------------------------------------------------------------------------------------


BUG = Mutation("3b", "", "", "grad norm|tensor all_reduce", "", "", "")
UNEQUAL = {"equal": False, "worst_name": "step 2 parameter: embed.weight"}


def test_an_unequal_verdict_is_caught_and_named_by_its_first_difference() -> None:
    mark = judged(BUG, Ended(1, 1.0, UNEQUAL, ""))
    assert (mark.caught, mark.named) == (True, False)
    first = {"first": {"step": 1, "kind": "grad norm", "name": "grad norm"}}
    mark = judged(BUG, Ended(1, 1.0, UNEQUAL | first, ""))
    assert (mark.caught, mark.named, mark.found) == (True, True, "step 1 grad norm: grad norm")


@pytest.mark.parametrize(
    "ended",
    [
        Ended(0, 1.0, {"equal": True, "worst_name": "step 1 grad norm: grad norm"}, ""),
        Ended(None, 90.0, None, "no end in 90 s"),
        Ended(1, 1.0, None, "meshwright: error: rank 1 ended by SIGABRT"),
        Ended(134, 1.0, None, ""),
    ],
    ids=["equal", "hang", "abort", "silent abort"],
)
def test_a_pass_a_hang_and_an_abort_without_an_explanation_miss(ended: Ended) -> None:
    mark = judged(BUG, ended)
    assert (mark.caught, mark.named) == (False, False)


def test_an_error_that_names_the_cause_is_caught() -> None:
    mark = judged(BUG, Ended(3, 1.0, None, "meshwright: error: rank 1 did not join tensor all_reduce"))
    assert (mark.caught, mark.named) == (True, True)


def test_a_public_bug_is_caught_when_all_of_its_mutations_are() -> None:
    found = {mutation.id: judged(BUG, Ended(1, 1.0, UNEQUAL, "")) for mutation in EXAM.mutations}
    marks = [replace(mark, id=id) for id, mark in found.items()]
    assert sums(EXAM, marks)["public_caught"] == 28
    missed = [replace(mark, caught=mark.id != "28b") for mark in marks]
    counted = sums(EXAM, missed)
    assert (counted["public"], counted["public_caught"]) == (28, 27)
    assert counted["further_caught"] == counted["further"]
