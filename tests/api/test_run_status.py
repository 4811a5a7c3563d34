"""The word on how a run has ended."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from meshwright import api
from meshwright.api.run_status import newest_checkpoint, status_at_end, word_of
from meshwright.checkpoint.errors import InUseError
from meshwright.checkpoint.lease import Lease
from meshwright.rank.failure import RanksFailed
from meshwright.runs.status import Word, read_status, write_status
from meshwright.spec import UserError
from meshwright.spec.errors import CorruptionError, NumericalError, Stopped
from meshwright.spec.load import from_tree
from small_run_file import run_file


@pytest.mark.parametrize(
    ("error", "progress", "word"),
    [
        (Stopped("stopped by SIGUSR1 after step 3, which is saved", 75), True, "requeue"),
        (Stopped("stopped by SIGTERM", 143), False, "requeue"),
        (Stopped("stopped by SIGINT after step 3", 130), True, "stopped"),
        (KeyboardInterrupt(), False, "stopped"),
        (UserError("train.lr: no"), True, "failed"),
        (NumericalError("not finite"), True, "failed"),
        (CorruptionError("ranks differ"), True, "requeue"),
        (RanksFailed("rank 1 failed again", 79), True, "failed"),
        (RuntimeError("a bug"), False, "failed"),
        (RuntimeError("a lost host"), True, "requeue"),
        (RuntimeError("[..] Connection reset by peer"), False, "requeue"),
    ],
)
def test_the_word_of_an_end(error: BaseException, progress: bool, word: str) -> None:
    assert word_of(error, progress) == word


def test_a_block_leaves_the_word_and_a_note(tmp_path: Path) -> None:
    with status_at_end(tmp_path, tmp_path / "checkpoints", resumes=False):
        write_status(tmp_path, "running")
    assert read_status(tmp_path) == ("done", "")
    with (
        pytest.raises(RuntimeError) as caught,
        status_at_end(tmp_path, tmp_path / "checkpoints", resumes=True),
    ):
        write_status(tmp_path, "running")  # it goes on
        (tmp_path / "checkpoints/step-00000007").mkdir(parents=True)
        raise RuntimeError("first line\nsecond")
    assert newest_checkpoint(tmp_path / "checkpoints") == 7
    assert read_status(tmp_path) == ("requeue", "first line")
    assert caught.value.__notes__ == ["status: requeue"]


def test_a_start_that_must_leave_a_run_alone_has_no_say_on_its_status(tmp_path: Path) -> None:
    write_status(tmp_path, "done")
    with pytest.raises(UserError), status_at_end(tmp_path, tmp_path, resumes=False):
        raise UserError("--out: already holds a run")
    assert read_status(tmp_path) == ("done", "")
    with pytest.raises(UserError), status_at_end(tmp_path, tmp_path, resumes=True):
        raise UserError("the checkpoint of step 44 is of another run")
    assert read_status(tmp_path) == ("done", "")
    write_status(tmp_path, "running")
    with pytest.raises(InUseError), status_at_end(tmp_path, tmp_path, resumes=True):
        raise InUseError(f"{tmp_path} is in use by another")
    assert read_status(tmp_path) == ("running", "")


@pytest.mark.parametrize(("before", "word"), [("stopped", "failed"), ("failed", "failed"), ("done", "done")])
def test_what_doctor_finds_is_the_end_of_a_run_that_is_not_done(
    before: Word, word: str, tmp_path: Path
) -> None:
    """Its sentence takes the place of that of an earlier start."""
    write_status(tmp_path, before, "of an earlier start")
    small_run = {
        "model.preset": "tiny", "model.layers": 1, "model.hidden": 64, "model.ffn": 64,
        "data.corpus": "synthetic",
        "model.vocab_size": 300, "data.tokenizer": "byte", "checkpoint.dir": "/proc/meshwright",
    }  # fmt: skip
    spec = from_tree({}, [(key, str(value)) for key, value in small_run.items()])
    with pytest.raises(UserError, match="the run would fail on these hosts: folder: "):
        api.train(spec, out=tmp_path, resume="auto", quiet=True, doctor=True)
    found, sentence = read_status(tmp_path) or ("", "")
    assert found == word
    assert sentence.startswith("doctor: " if word == "failed" else "of an earlier start")


def test_a_start_whose_ranks_find_the_folder_in_use_leaves_the_status_alone(tmp_path: Path) -> None:
    """The ranks are processes of their own, whose error comes as a code and a sentence."""
    spec = from_tree(tomllib.loads(run_file(3)))
    out = tmp_path / "run"
    api.train(spec, out=out, quiet=True)
    write_status(out, "running")
    with Lease(out, "another run"), pytest.raises(UserError, match="is in use by another run"):
        api.train(spec, out=out, resume="auto", quiet=True)
    assert read_status(out) == ("running", "")


def test_a_signal_while_the_end_is_written_loses_no_status(tmp_path: Path) -> None:
    """As where a launcher ends the ranks that are left just as they notice that one is lost."""
    signals = [Stopped("stopped by SIGTERM", 143)]

    def interrupted(*written: Any) -> bool:
        if signals:
            raise signals.pop()
        return write_status(*written)

    with (
        patch("meshwright.api.run_status.write_status", interrupted),
        pytest.raises(RuntimeError),
        status_at_end(tmp_path, tmp_path / "checkpoints", resumes=True),
    ):
        raise RuntimeError("[..] Connection closed by peer")
    assert not signals and (read_status(tmp_path) or ("",))[0] == "requeue"
