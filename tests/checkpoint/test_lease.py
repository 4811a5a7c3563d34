"""One live writer per directory; the dead, the hung and the stopped are replaced, and fenced on waking."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import Gate, bury, leftovers, same, steps, tensors, zeros_like

from meshwright.checkpoint import CheckpointError, CheckpointStore, Lease
from meshwright.checkpoint import lease as lease_module


def in_child(work: Callable[[], int]) -> int:
    """Fork a process that exits with what ``work`` returns, or with 9 when it raises; return its pid."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            code = work()
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def edit(directory: Path, **fields: object) -> None:
    path = directory / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def age(directory: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(directory / "lease.json", (then, then))


def test_a_second_run_is_refused_by_name(tmp_path: Path) -> None:
    first, second = Lease(tmp_path, "first run"), Lease(tmp_path, "second run")
    first.acquire()
    with pytest.raises(CheckpointError) as refusal:
        second.acquire()
    for word in ("first run", str(os.getpid()), str(tmp_path), "since"):
        assert word in str(refusal.value)

    def other_process() -> int:
        try:
            Lease(tmp_path, "third run").acquire()
        except CheckpointError as error:
            return 3 if "first run" in str(error) else 4
        return 0

    assert exit_code(in_child(other_process)) == 3
    first.check()
    first.release()
    second.acquire()
    assert second.generation == first.generation + 1
    second.release()


def test_a_second_run_cannot_save_into_the_directory(tmp_path: Path) -> None:
    first, second = CheckpointStore(tmp_path, 2, holder="first run"), CheckpointStore(tmp_path, 2)
    first.save(10, tensors(10), {})
    with pytest.raises(CheckpointError, match="first run"):
        second.save(20, tensors(20), {})
    target = zeros_like(tensors(10))
    second.load(None, target)  # a reader needs no lease
    assert same(target, tensors(10))
    first.close()
    second.save(20, tensors(20), {})
    assert steps(first) == [10, 20]
    second.close()


def test_the_lease_of_a_killed_process_is_recovered_at_once(tmp_path: Path) -> None:
    def hold_and_die() -> int:
        Lease(tmp_path, "victim").acquire()
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert exit_code(in_child(hold_and_die)) == -signal.SIGKILL
    mine = Lease(tmp_path, "heir")
    begin = time.monotonic()
    mine.acquire()
    assert time.monotonic() - begin < 5
    assert mine.generation == 2
    mine.release()


def test_a_new_process_with_the_pid_of_the_dead_one_does_not_hold_its_lease(tmp_path: Path) -> None:
    dead = Lease(tmp_path, "dead")
    dead.acquire()
    bury(tmp_path)  # the pid is alive, its start time is another
    heir = Lease(tmp_path, "heir")
    heir.acquire()
    with pytest.raises(CheckpointError, match="heir"):
        dead.check()
    dead.release()  # takes nothing from the heir
    heir.check()
    heir.release()


def test_on_another_host_the_heartbeat_decides(tmp_path: Path) -> None:
    far = Lease(tmp_path, "far")
    far.acquire()
    edit(tmp_path, place="elsewhere", host="far-away", pid=1)
    near = Lease(tmp_path, "near")
    with pytest.raises(CheckpointError, match="far-away"):
        near.acquire()
    age(tmp_path, lease_module.STALE_S + 5)
    near.acquire()
    near.release()
    far.release()


def test_heartbeats_keep_a_lease_and_their_absence_loses_it(tmp_path: Path) -> None:
    far = Lease(tmp_path, "far", stale_s=1.5)
    far.acquire()
    edit(tmp_path, place="elsewhere")
    near = Lease(tmp_path, "near", stale_s=1.5)
    for _ in range(3):
        time.sleep(0.7)
        with pytest.raises(CheckpointError, match="in use by far"):
            near.acquire()
    (tmp_path / "lease.json").rename(tmp_path / "kept")  # its heart has nothing to beat on and stops
    time.sleep(0.6)
    (tmp_path / "kept").rename(tmp_path / "lease.json")
    age(tmp_path, 5)
    near.acquire()
    assert near.generation == 2
    near.release()
    far.release()


def test_of_many_that_race_for_a_stale_lease_one_wins(tmp_path: Path) -> None:
    Lease(tmp_path, "dead").acquire()
    bury(tmp_path)
    start = time.monotonic() + 0.3

    def race() -> int:
        time.sleep(max(0.0, start - time.monotonic()))
        try:
            Lease(tmp_path, "racer").acquire()
        except CheckpointError:
            (tmp_path / f"lost-{os.getpid()}").touch()
            return 1
        while len(list(tmp_path.glob("lost-*"))) < 5 and time.monotonic() < start + 60:
            time.sleep(0.02)  # it holds on until the others have tried
        return 0

    children = [in_child(race) for _ in range(6)]
    assert sorted(exit_code(child) for child in children) == [0, 1, 1, 1, 1, 1]


def test_a_lease_file_that_makes_no_sense_is_told(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"holder": "x"}'):
        (tmp_path / "lease.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"lease\.json cannot be understood"):
            Lease(tmp_path, "run").acquire()


class StoppingDisk(Gate):
    """The process stops (SIGSTOP) before the first call of a kind in a step's directory."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call, self.armed = call, False

    def before(self, index: int, call: str) -> None:
        if self.armed and call == self.call:
            self.armed = False
            os.kill(os.getpid(), signal.SIGSTOP)


def stopped_writer(directory: Path, call: str) -> int:
    """A process that stops in its save of step 20; it exits with 5 when it is fenced."""

    def work() -> int:
        disk = StoppingDisk(call)
        store = CheckpointStore(directory, 3, disk=disk, holder="zombie")
        store.save(10, tensors(10), {})
        disk.armed = True
        try:
            store.save(20, tensors(66), {})
        except CheckpointError:
            return 5
        return 0

    child = in_child(work)
    os.waitpid(child, os.WUNTRACED)
    return child


def test_a_zombie_writer_is_fenced(tmp_path: Path) -> None:
    zombie = stopped_writer(tmp_path, "fsync")
    heir = CheckpointStore(tmp_path, 3)
    with pytest.raises(CheckpointError, match="zombie"):
        heir.claim()  # its heartbeat is fresh: it may be alive
    age(tmp_path, lease_module.STALE_S + 5)
    heir.save(20, tensors(20), {"by": "heir"})
    os.kill(zombie, signal.SIGCONT)
    assert exit_code(zombie) == 5
    target = zeros_like(tensors(20))
    assert heir.load(None, target) == {"by": "heir"}
    assert same(target, tensors(20))
    assert steps(heir) == [10, 20]
    assert not leftovers(tmp_path)
    heir.close()


def test_a_writer_that_stops_while_it_publishes_keeps_the_directory_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie = stopped_writer(tmp_path, "rename")
    monkeypatch.setattr(lease_module, "LOCK_WAIT_S", 0.2)
    age(tmp_path, lease_module.STALE_S + 5)
    heir = CheckpointStore(tmp_path, 3)
    with pytest.raises(CheckpointError, match="end that process"):
        heir.claim()
    os.kill(zombie, signal.SIGKILL)
    os.waitpid(zombie, 0)
    heir.save(20, tensors(20), {"by": "heir"})
    assert heir.load(None, zeros_like(tensors(20))) == {"by": "heir"}
    heir.close()
