"""When failed ranks are started again, and how a run ends that is not; its ranks train nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch import restarts as policy
from meshwright.launch import start as generation
from meshwright.launch.start import End, Job
from meshwright.launch.supervisor import Restarts, Supervisor
from meshwright.rank.failure import Outcome
from meshwright.spec.errors import CRASH_LOOP
from meshwright.spec.sections import RecoverySpec
from supervised import alive, parent

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find their program; no long pauses."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(policy, "BACK_OFF_S", (0.0, 0.2, 0.4))
    monkeypatch.setattr(generation, "ECHO_S", 0.1)


class Told:
    """A supervised run of five steps, and the events that it told; `meanwhile` runs in a thread."""

    def __init__(
        self,
        folder: Path,
        plan: dict[str, str],
        meanwhile: Callable[[Told], None] | None = None,
        preload: tuple[str, ...] = (),
        **recovery: Any,
    ) -> None:
        self.folder, self.events = folder, list[tuple[str, dict[str, Any]]]()
        argv = [str(folder), "5", json.dumps(plan)]
        restarts = Restarts(argv, lambda kind, fields: self.events.append((kind, fields)))
        job = Job(argv, 2, "deeds", preload, RecoverySpec(**{"max_restarts": 3, **recovery}))
        thread = threading.Thread(target=meanwhile, args=(self,))
        thread.start()
        self.outcome = Supervisor(job, restarts).run()
        thread.join()

    @property
    def starts(self) -> list[tuple[int, int, int, float]]:
        """Generation, rank, pid and time of each start of a rank."""
        file = self.folder / "starts"
        rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(row[0]), int(row[1]), int(row[2]), float(row[3])) for row in rows]

    @property
    def generations(self) -> int:
        return len({start[0] for start in self.starts})


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_without_failures_is_started_once(tmp_path: Path) -> None:
    told = Told(tmp_path, {})
    assert (told.outcome, told.generations, told.events) == (Outcome(), 1, [])


def test_a_rank_that_is_killed_is_started_again_also_at_the_start_and_after_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="; the ranks are started again$") as warned:
        told = Told(tmp_path, {"0/1/0": "kill", "1/0/3": "kill", "2/1/5": "exit"})
    assert len(warned) == 3
    assert (told.outcome, told.generations) == (Outcome(), 4)
    assert [(kind, fields["generation"], fields["step"]) for kind, fields in told.events] == [
        ("failure", 0, 0), ("failure", 1, 2), ("failure", 2, 4),
    ]  # fmt: skip
    assert "rank 1 of 2 was ended by SIGKILL" in told.events[0][1]["message"]


def test_an_error_that_comes_again_is_a_crash_loop(tmp_path: Path) -> None:
    told = Told(tmp_path, {"*/1/4": "raise"})
    sentence = "rank 1 of 2 failed with ValueError: an error at step 4"
    assert told.outcome.code == CRASH_LOOP
    assert told.outcome.sentence == (
        f"{sentence}; the ranks were started again once and do not get beyond step 3"
    )
    assert "Traceback" in told.outcome.details
    assert [fields["message"] for _, fields in told.events] == [sentence] * 2


def test_restarts_without_progress_are_bounded_and_pause_for_longer_each_time(tmp_path: Path) -> None:
    told = Told(tmp_path, {"*/0/4": "kill"})
    assert (told.outcome.code, told.generations) == (CRASH_LOOP, 4)
    assert "rank 0 of 2 was ended by SIGKILL" in told.outcome.sentence
    assert told.outcome.sentence.endswith("the ranks were started again 3 times and do not get beyond step 3")
    times = [min(start[3] for start in told.starts if start[0] == each) for each in range(4)]
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[1] >= 0.2 and pauses[2] >= 0.4


def test_progress_starts_the_count_anew(tmp_path: Path) -> None:
    plan = {f"{each}/0/{each // 2 + 1}": "kill" for each in range(8)}
    told = Told(tmp_path, plan, max_restarts=2)
    assert (told.outcome, told.generations) == (Outcome(), 9)


def test_an_error_before_the_first_step_is_not_repeated(tmp_path: Path) -> None:
    told = Told(tmp_path, {"*/0/0": "raise"})
    assert told.outcome.code == 1 and told.generations == 1
    assert told.outcome.sentence == "rank 0 of 2 failed with ValueError: an error at step 0"


def test_an_error_at_the_start_of_a_run_that_got_further_before_is_repeated(tmp_path: Path) -> None:
    told = Told(tmp_path, {"0/0/3": "kill", "1/1/0": "raise"})
    assert (told.outcome, told.generations) == (Outcome(), 3)


@pytest.mark.parametrize(("deed", "code"), [("mistake", 2), ("storage", 76), ("data", 77), ("numbers", 78)])
def test_an_error_that_explains_itself_is_recorded_and_not_repeated(
    tmp_path: Path, deed: str, code: int
) -> None:
    told = Told(tmp_path, {"*/1/3": deed})
    assert (told.outcome, told.generations) == (Outcome(code, f"the {deed} of step 3"), 1)
    ((kind, fields),) = told.events
    assert (kind, fields["step"], fields["message"]) == ("failure", 2, f"the {deed} of step 3")


def test_a_mistake_before_the_first_step_is_no_event_of_the_run_that_the_folder_holds() -> None:
    events: list[str] = []
    supervisor = Supervisor(Job([], 1), Restarts([], lambda kind, _: events.append(kind)))
    mistake = Outcome(2, "--out: it already holds a run")
    assert supervisor._final(End(mistake, 0, 0.0), []) == mistake
    assert events == []


def test_restarts_can_be_turned_off(tmp_path: Path) -> None:
    told = Told(tmp_path, {"*/0/4": "kill"}, max_restarts=0)
    assert (told.outcome.code, told.generations) == (137, 1)
    assert [kind for kind, _ in told.events] == ["failure"]


def test_a_zygote_that_is_killed_is_replaced_and_steps_count(tmp_path: Path) -> None:
    plan = {f"{each}/0/{each + 1}": "kill the zygote" for each in range(3)}
    told = Told(tmp_path, plan, max_restarts=1)
    assert (told.outcome, told.generations) == (Outcome(), 4)
    assert [fields["step"] for _, fields in told.events] == [0, 1, 2]
    assert told.events[0][1]["message"] == "the process that forks ranks ended with SIGKILL"
    assert not any(alive(start[2]) for start in told.starts)


@pytest.mark.parametrize(
    ("then", "kinds", "generations"),
    [({}, ["zygote_stopped"], 1), ({"0/1/3": "kill"}, ["zygote_stopped", "failure"], 2)],
)
def test_a_zygote_that_is_stopped_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: dict[str, str], kinds: list[str], generations: int
) -> None:
    monkeypatch.setattr(generation, "ZYGOTE_STOPPED_S", 0.3)
    with pytest.warns(UserWarning, match="the process that forks ranks was stopped for 0"):
        told = Told(tmp_path, {"0/0/2": "stop the zygote", **then})
    assert (told.outcome, told.generations) == (Outcome(), generations)
    assert [kind for kind, _ in told.events] == kinds
    assert not any(alive(start[2]) for start in told.starts)


def test_a_zygote_that_tells_no_more_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, and its ranks are killed."""
    monkeypatch.setattr(generation, "KILLED_S", 0.5)

    def stop_the_zygote_and_ask_for_the_end(told: Told) -> None:
        wait_until(lambda: len(told.starts) == 2)
        os.kill(parent(told.starts[0][2]), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)

    told = Told(tmp_path, {"0/0/3": "sleep"}, stop_the_zygote_and_ask_for_the_end, grace_seconds=0.2)
    assert told.outcome.stopped and told.outcome.code == 143
    assert not any(alive(start[2]) for start in told.starts)


def test_ranks_that_do_not_end_after_a_signal_are_killed_after_the_grace_time(tmp_path: Path) -> None:
    asked = 0.0

    def ask_for_the_end(told: Told) -> None:
        nonlocal asked
        wait_until(lambda: len(told.starts) == 2)
        time.sleep(0.2)
        asked = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)

    told = Told(tmp_path, {"0/*/0": "ignore SIGTERM", "0/*/3": "sleep"}, ask_for_the_end, grace_seconds=0.5)
    assert (told.outcome.code, told.outcome.stopped) == (143, True)
    assert str(told.outcome.sentence).startswith("stopped by SIGTERM, and nothing was saved for it; start it")
    assert 0.5 <= time.monotonic() - asked < 20
    assert told.generations == 1 and not any(alive(start[2]) for start in told.starts)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_pause_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    monkeypatch.setattr(policy, "BACK_OFF_S", (60.0,))

    def ask_for_the_end(told: Told) -> None:
        wait_until(lambda: told.events)
        os.kill(os.getpid(), number)

    begun = time.monotonic()
    told = Told(tmp_path, {"*/0/3": "kill"}, ask_for_the_end)
    assert told.outcome.stopped and told.outcome.code == code and told.generations == 1
    assert time.monotonic() - begun < 30


SLOW_IMPORT = """
import os, time
open(__file__ + ".pid", "w").write(str(os.getpid()))
time.sleep(60)
"""


@pytest.fixture
def slow_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets the pid of the zygote as soon as it imports the module `slow_import`."""
    (tmp_path / "slow_import.py").write_text(SLOW_IMPORT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    return tmp_path / "slow_import.py.pid"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_zygotes_imports_ends_the_run_at_once(
    tmp_path: Path, slow_import: Path, number: int, code: int
) -> None:
    def ask_for_the_end(_told: Told) -> None:
        wait_until(lambda: slow_import.exists() and slow_import.read_text())
        os.kill(os.getpid(), number)

    begun = time.monotonic()
    told = Told(tmp_path, {}, ask_for_the_end, preload=("slow_import",))
    assert told.outcome.stopped and told.outcome.code == code and told.generations == 0
    assert time.monotonic() - begun < 30
    assert not alive(int(slow_import.read_text()))


@pytest.mark.full
def test_a_launcher_that_is_killed_during_the_zygotes_imports_leaves_nothing(
    tmp_path: Path, slow_import: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = "from meshwright.launch.supervisor import run_ranks; raise SystemExit(run_ranks({}).code)"
    argv = [str(tmp_path), "5", "{}"]
    slow = run.format(f"{argv}, 2, module='deeds', preload=['slow_import']")
    process = subprocess.Popen([sys.executable, "-c", slow])
    wait_until(lambda: slow_import.exists() and slow_import.read_text())
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    begun = time.monotonic()
    wait_until(lambda: not alive(int(slow_import.read_text())))
    assert time.monotonic() - begun < 30
    assert not list(tmp_path.glob("meshwright-*"))


def threads(pid: int) -> set[str]:
    """The ids of a process's threads that are still there after a while.

    `Thread.join` returns before the kernel has ended the thread, so a single look may see one too many.
    """
    found = set(os.listdir(f"/proc/{pid}/task"))
    for _ in range(10):
        time.sleep(0.01)
        found &= set(os.listdir(f"/proc/{pid}/task"))
    return found


def held(pid: int) -> dict[str, int]:
    """Descriptors, threads and KiB of memory of a process, shared memory apart."""
    status = Path(f"/proc/{pid}/status").read_text().split()
    of = {name: int(status[status.index(f"{name}:") + 1]) for name in ("RssAnon", "RssShmem")}
    return {"descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())), "threads": len(threads(pid)), **of}


@pytest.mark.parametrize("restarts", [30, pytest.param(500, marks=pytest.mark.full)])
def test_restarts_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """The supervisor and the zygote hold as much after the last restart as after a tenth of them."""
    monkeypatch.setattr(policy, "BACK_OFF_S", (0.0,))
    monkeypatch.setattr(generation, "ECHO_S", 0.0)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    seen: list[tuple[dict[str, int], dict[str, int]]] = []

    class Measured(Supervisor):
        def _final(self, *arguments: Any) -> Outcome | None:
            assert self._zygote is not None
            seen.append((held(os.getpid()), held(self._zygote.pid)))
            return super()._final(*arguments)

    plan = {f"{each}/{each % 2}/{each % 4 + 2}": ("kill", "exit")[each % 3 == 0] for each in range(restarts)}
    monkeypatch.setattr(sys.modules[__name__], "Supervisor", Measured)
    told = Told(tmp_path, plan, max_restarts=restarts)
    assert (told.outcome, len(seen)) == (Outcome(), restarts + 1)
    for process in (0, 1):
        before, after = seen[restarts // 10][process], seen[-1][process]
        assert after["descriptors"] <= before["descriptors"] + 2  # a folder that is being listed
        assert after["threads"] <= before["threads"]
        assert after["RssShmem"] <= before["RssShmem"] + 64
        assert after["RssAnon"] <= before["RssAnon"] + 1024
    assert not list((tmp_path / "temporary").iterdir())
