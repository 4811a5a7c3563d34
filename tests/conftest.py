"""Fixtures of all tests."""

from __future__ import annotations

import ast
import gc
import os
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from ranks import Ranks
from small import measure_peak_quickly
from training_runs import TrainedOnce

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Started with `nohup` or by a script's `&`, pytest ignores these, and so would all that tests start.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# The same examples on each run, so that a change is judged by what it did;
# `--hypothesis-profile=explore` draws others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("same")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule with pytest-xdist all tests on ranks in one worker, which has the pool, and others by file."""
    from xdist.scheduler import LoadScopeScheduling

    class OnePool(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file, _, rest = nodeid.partition("::")
            return "ranks" if rest.partition("[")[0] in tests_on_ranks(config.rootpath / file) else file

    return OnePool(config, log)


@cache
def tests_on_ranks(file: Path) -> frozenset[str]:
    """Names of the tests of a file that take the session's ranks, or start others."""
    functions = [each for each in ast.parse(file.read_text()).body if isinstance(each, ast.FunctionDef)]
    return frozenset(each.name for each in functions if re.search("Ranks|TrainedOnce", ast.unparse(each)))


def pytest_collection_finish() -> None:
    """Leave modules and the collected tests, which live to the end, out of garbage collections."""
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The session's gloo ranks."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def trained_once(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> TrainedOnce:
    """Runs that several tests go on from."""
    return TrainedOnce(ranks, tmp_path_factory.mktemp("trained-once"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests compute on one core, also after a run in this process, which takes all."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def quick_runs() -> None:
    """Runs in this process do not dwell on the matmul rate."""
    measure_peak_quickly()


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenized corpora of the tests go to a folder of their own."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(30):
        words = " ".join(f"word{(number * 7 + i * i) % 97}" for i in range(120))
        (folder / f"{number:02d}.txt").write_text(f"document {number}: {words}\n", encoding="utf-8")
    return folder
