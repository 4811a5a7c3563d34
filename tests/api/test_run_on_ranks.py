"""A call on ranks: in this process, as a rank of a torchrun, or in processes of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from meshwright.api import ranks
from meshwright.api.ranks import run_on_ranks
from meshwright.launch import supervisor
from meshwright.rank.env import Worker, worker
from meshwright.spec import UserError, load


def test_several_ranks_return_what_the_first_returns() -> None:
    found = run_on_ranks(worker, 2)
    assert found == Worker(rank=0, world_size=2, local_rank=0, local_world_size=2, launched=True)


def test_one_rank_is_this_process() -> None:
    found: list[int] = []
    assert run_on_ranks(partial(found.append, 7), 1) is None
    assert found == [7]


def test_a_rank_of_a_torchrun_makes_the_call_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "run_ranks", None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = run_on_ranks(worker, 2)
    assert found is not None and (found.rank, found.launched) == (1, False)


def test_a_mistake_on_the_ranks_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.toml"):
        run_on_ranks(partial(load, tmp_path / "run.toml"), 2)


def test_ranks_import_what_their_run_needs() -> None:
    spec = load(None, [("train.compile", "true")])
    assert ranks.preload(("json",), spec) == ("json", *ranks.COMPILER)
    assert ranks.preload(("json",), None) == ("json",)
