"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ranks import Ranks
from small import count_synthetic_bytes_once, measure_peak_quickly

os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on each run, so that a change is judged by what it did;
# `--hypothesis-profile=explore` draws others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker of pytest-xdist have all tests on the session's ranks, which are one pool for a run."""
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if "ranks" in getattr(item, "fixturenames", ()) and "ranks" not in given:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The session's gloo ranks."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def quick_runs() -> None:
    """Runs in this process do not dwell on the matmul rate, nor on synthetic corpora that they have made."""
    measure_peak_quickly()
    count_synthetic_bytes_once()


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenized corpora of the tests go to a folder of their own."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return folder
