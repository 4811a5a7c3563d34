"""Temporary folders of launchers: each has its own, and those of killed ones are removed."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.launch import supervisor
from meshwright.rank.failure import Outcome
from meshwright.rank.scratch import scratch_folder
from meshwright.spec import load


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder of temporary ones, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_that_is_in_use_stays_and_one_that_was_left_goes(temporary: Path) -> None:
    (temporary / "meshwright-scratch-left").mkdir()
    (temporary / "another").mkdir()
    with scratch_folder() as first, scratch_folder() as second:
        assert {path.name for path in temporary.iterdir()} == {"another", first.name, second.name}
    assert [path.name for path in temporary.iterdir()] == ["another"]


def test_launchers_that_start_at_the_same_time_do_not_take_each_others_folders(temporary: Path) -> None:
    def use(number: int) -> None:
        with scratch_folder() as folder:
            (folder / "file").write_text(str(number))
            assert (folder / "file").read_text() == str(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(400)))
    assert not list(temporary.iterdir())


def test_another_launcher_leaves_the_folder_of_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(argv: Sequence[str], *_: Any, **__: Any) -> Outcome:
        with scratch_folder():
            Path(argv[1]).write_bytes(pickle.dumps({"there": Path(argv[0]).is_file()}))
        return Outcome()

    monkeypatch.setattr(supervisor, "run_ranks", launched)
    assert api.verify(load(None, [("layout.dp", "2")])) == {"there": True}
