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
ON_RANKS = " on ranks"
"""End of the name of a scope, the part of a file that one worker takes."""

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
    """Schedule tests by file with pytest-xdist: one worker begins with those on ranks, and has the pool.

    The other workers begin with the other tests. Files whose tests may take longest begin first. A worker
    that has no more of its own takes those that are left, so that no core is idle at the end: it makes a pool
    of its own at its first test on ranks.
    """
    from xdist.scheduler import LoadScopeScheduling

    class PoolFirst(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file, _, rest = nodeid.partition("::")
            on_ranks = rest.partition("[")[0] in tests_on_ranks(config.rootpath / file)
            return file + ON_RANKS if on_ranks else file

        def _assign_work_unit(self, node: Any) -> None:
            has_pool = node is self.nodes[0]
            if own := [scope for scope in self.workqueue if scope.endswith(ON_RANKS) == has_pool]:
                root = config.rootpath
                first = max(own, key=lambda scope: limit_of_tests(root / scope.removesuffix(ON_RANKS)))
                self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return PoolFirst(config, log)


@cache
def limit_of_tests(file: Path) -> int:
    """Seconds that each test of a file may take, or 0 where the file has no limit of its own."""
    found = re.search(r"^pytestmark = pytest\.mark\.timeout\((\d+)\)", file.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


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
