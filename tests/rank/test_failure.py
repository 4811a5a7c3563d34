"""The rank that failed first is named, and not those that failed because of it."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.rank.failure import Outcome, RankEnd, RanksFailed, last_words, outcome, record
from meshwright.spec import UserError
from meshwright.spec.errors import Stopped

KILLED = -signal.SIGKILL - 100
"""Stands for SIGKILL by the launcher, where -9 is anybody else's."""
ECHO = RuntimeError("Connection closed by peer [127.0.0.1]:3")


def failed(
    folder: Path, rank: int, code: int, error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> RankEnd:
    file = folder / f"{rank}.json"
    if error is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        record(error)
    return RankEnd(code, time.time(), file, killed=code == KILLED)


CASES = [
    ("a user's mistake before earlier echoes", {0: (1, ECHO), 3: (2, UserError("bad key"))}, 2, "bad key"),
    ("one sentence for a mistake on all", {0: (2, UserError("bad")), 1: (2, UserError("bad"))}, 2, "bad"),
    (
        "a killed rank before the others' errors",
        {0: (1, ECHO), 1: (-9, None)},
        137,
        "rank 1 of 4 was ended by",
    ),
    (
        "an exit before the others' echoes",
        {0: (1, ECHO), 2: (7, None)},
        7,
        "rank 2 of 4 ended with exit code 7",
    ),
    (
        "an error before the launcher's SIGKILL",
        {0: (KILLED, None), 1: (1, ValueError("x"))},
        1,
        "ValueError: x",
    ),
    ("an exit before the launcher's SIGKILL", {0: (KILLED, None), 1: (5, None)}, 5, "exit code 5"),
    ("the earliest of two errors", {2: (1, ValueError("first")), 0: (1, ValueError("second"))}, 1, "first"),
]


@pytest.mark.parametrize(
    ("ends", "code", "part"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_cause(ends: dict, code: int, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {rank: failed(tmp_path, rank, *end, monkeypatch) for rank, end in ends.items()}
    found = outcome(failures, 4)
    assert found.code == code
    assert part in found.sentence


@pytest.mark.parametrize(
    ("known", "words"), [(True, "for want of memory"), (False, ""), (None, "may have run")]
)
def test_a_kill_is_told_from_one_for_want_of_memory(
    known: bool | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = failed(tmp_path, 1, -signal.SIGKILL, None, monkeypatch)
    sentence = outcome({1: end}, 2, known).sentence
    assert sentence.startswith("rank 1 of 2 was ended by SIGKILL")
    assert words in sentence
    assert ("memory" in sentence) == (known is not False)


def test_an_unrecorded_end_shows_the_last_lines_of_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "stderr.log"
    log.write_text("".join(f"line {i}\n" for i in range(50)))
    end = failed(tmp_path, 1, -signal.SIGSEGV, None, monkeypatch)
    found = outcome({1: replace(end, log=log)}, 2)
    assert found.code == 128 + signal.SIGSEGV
    assert "SIGSEGV" in found.sentence
    assert found.details.splitlines() == [f"line {i}" for i in range(30, 50)]


def test_the_first_error_of_a_process_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    record(ValueError("first"))
    record(ValueError("second"))
    record(KeyboardInterrupt())
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: first"
    assert "ValueError: first" in message["extraInfo"]["py_callstack"]
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_no_file_named_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    record(ValueError("x"))
    assert list(tmp_path.iterdir()) == []


def test_an_outcome_raises_what_a_single_process_would() -> None:
    Outcome().raise_for_failure()
    with pytest.raises(UserError, match="a key"):
        Outcome(2, "a key").raise_for_failure()
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT"):
        Outcome(130, "stopped by SIGINT", stopped=True).raise_for_failure()
    with pytest.raises(RanksFailed) as caught:
        Outcome(137, "rank 1 of 2 was ended by SIGKILL", "last words").raise_for_failure()
    assert (caught.value.code, caught.value.details) == (137, "last words")


def test_a_stopped_rank_s_words_are_found_among_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, error in enumerate([ValueError("echo"), Stopped("stopped after step 3", 143)]):
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        record(error)
    assert last_words([tmp_path / "0.json", tmp_path / "1.json"]) == (143, "stopped after step 3")
    assert last_words([tmp_path / "0.json", tmp_path / "none.json"]) is None


def test_a_mistake_has_no_traceback_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    record(UserError("layout.dp: 3"))
    assert "Traceback" not in file.read_text()


def test_a_rank_that_was_killed_before_it_made_its_log_is_told(tmp_path: Path) -> None:
    end = RankEnd(-signal.SIGKILL, time.time(), tmp_path / "error.json", tmp_path / "stderr.log")
    found = outcome({1: end}, 2)
    assert found.code == 137 and found.sentence.startswith("rank 1 of 2 was ended by SIGKILL")
