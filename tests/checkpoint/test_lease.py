"""One live writer per directory; the dead, the hung and the stopped are replaced, and fenced on waking."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from faults import Gate, bury, leftovers, same, steps, tensors, zeros_like
from meshwright.checkpoint import CheckpointError, CheckpointStore, Lease
from meshwright.checkpoint import lease as lease_module
from meshwright.checkpoint.errors import LostLeaseError
from meshwright.spec.errors import StorageError


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
    path, new = directory / "lease.json", directory / "edited"
    new.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    new.rename(path)


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
    first, second = (
        CheckpointStore(tmp_path, 2, lease=Lease(tmp_path, "first run")),
        CheckpointStore(tmp_path, 2),
    )
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


def beating_elsewhere(directory: Path, behind: float = 0.0) -> threading.Event:
    """Make the lease one of another host whose clock is `behind`, and beat it until the event is set."""
    ended, path = threading.Event(), directory / "lease.json"
    edit(directory, place="elsewhere", host="far-away")

    def beat() -> None:
        while not ended.wait(0.05):
            then = time.time() - behind
            os.utime(path, (then, then))

    threading.Thread(target=beat, daemon=True).start()
    return ended


def dead_elsewhere(directory: Path) -> None:
    """A lease of a process on another host that was killed."""

    def hold_and_die() -> int:
        Lease(directory, "far").acquire()
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert exit_code(in_child(hold_and_die)) == -signal.SIGKILL
    edit(directory, place="elsewhere", host="far-away")


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_live_process_of_this_host_is_refused_at_once_whatever_the_clock_says(
    tmp_path: Path, seconds: float
) -> None:
    mine = Lease(tmp_path, "mine")
    mine.acquire()
    age(tmp_path, seconds)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match="in use by mine"):
        Lease(tmp_path, "other", stale_s=0.2, wait=True).acquire()
    assert time.monotonic() - begin < 1
    mine.check()
    mine.release()


@pytest.mark.parametrize("seconds", [0.0, 3600.0, -3600.0])
def test_a_heartbeat_of_another_host_that_stands_still_is_waited_out(tmp_path: Path, seconds: float) -> None:
    dead_elsewhere(tmp_path)
    age(tmp_path, seconds)
    heir = Lease(tmp_path, "heir", stale_s=0.5)
    begin = time.monotonic()
    with pytest.warns(UserWarning, match=r"far-away.*; waiting 0\.5 s to see whether its heartbeat"):
        heir.acquire()
    assert 0.5 <= time.monotonic() - begin < 3
    assert heir.generation == 2
    beside = heir.beside(tmp_path / "other", Gate())
    beside.directory.mkdir()
    (beside.directory / "lease.json").write_text(first_holder(tmp_path, heir))
    begin = time.monotonic()
    beside.acquire()  # the dead process held both: it is not waited for again
    assert time.monotonic() - begin < 0.4
    beside.release()
    heir.release()


def first_holder(directory: Path, heir: Lease) -> str:
    assert heir.predecessor is not None
    return json.dumps({**json.loads((directory / "lease.json").read_text()), **asdict(heir.predecessor)})


@pytest.mark.parametrize("behind", [0.0, 3600.0, -3600.0])
def test_a_heartbeat_of_another_host_that_moves_is_of_a_live_run(tmp_path: Path, behind: float) -> None:
    dead_elsewhere(tmp_path)
    ended = beating_elsewhere(tmp_path, behind)
    for wait, least in ((False, 0.0), (True, 2 * 0.5)):
        begin = time.monotonic()
        with (
            pytest.warns(UserWarning, match="waiting"),
            pytest.raises(CheckpointError, match="in use by far"),
        ):
            Lease(tmp_path, "heir", stale_s=0.5, wait=wait).acquire()
        assert least <= time.monotonic() - begin < least + 1
    ended.set()


def test_an_automatic_restart_waits_for_a_run_that_ends(tmp_path: Path) -> None:
    dead_elsewhere(tmp_path)
    ended = beating_elsewhere(tmp_path)
    threading.Timer(0.3, lambda: (ended.set(), edit(tmp_path, released=True))).start()
    heir = Lease(tmp_path, "heir", stale_s=0.5, wait=True)
    with pytest.warns(UserWarning, match="waiting"):
        heir.acquire()
    heir.release()


def test_a_lease_that_is_taken_twice_is_given_back_once(tmp_path: Path) -> None:
    lease = Lease(tmp_path, "run")
    with lease:
        again = lease.beside(tmp_path, Gate())
        again.acquire()
        again.release()
        lease.check()
    with pytest.raises(CheckpointError, match="given back"):
        lease.check()


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
        store = CheckpointStore(directory, 3, disk=disk, lease=Lease(directory, "zombie", disk=disk))
        store.save(10, tensors(10), {})
        disk.armed = True
        try:
            store.save(20, tensors(66), {})
        except CheckpointError as error:
            print(error, flush=True)
            return 5
        return 0

    child = in_child(work)
    os.waitpid(child, os.WUNTRACED)
    return child


def heir_of(directory: Path) -> CheckpointStore:
    """A store of another process, which takes over the lease of a stopped process on another host."""
    edit(directory, place="elsewhere")
    return CheckpointStore(directory, 3, lease=Lease(directory, "heir", stale_s=0.3))


@pytest.mark.filterwarnings("ignore:.*waiting 0.3 s")
@pytest.mark.parametrize("call", ["write", "fsync", "fsync directory"])
def test_a_zombie_writer_is_fenced(tmp_path: Path, call: str, capfd: pytest.CaptureFixture[str]) -> None:
    zombie = stopped_writer(tmp_path, call)
    with pytest.raises(CheckpointError, match=r"zombie.* is stopped; end that process"):
        CheckpointStore(tmp_path, 3).claim()  # it lives on this host
    heir = heir_of(tmp_path)
    heir.save(20, tensors(20), {"by": "heir"})
    os.kill(zombie, signal.SIGCONT)
    assert exit_code(zombie) == 5
    said = capfd.readouterr().out
    assert "lost the lease" in said and "heir" in said and "No such file" not in said
    target = zeros_like(tensors(20))
    assert heir.load(None, target) == {"by": "heir"}
    assert same(target, tensors(20))
    assert steps(heir) == [10, 20]
    assert not leftovers(tmp_path)
    heir.close()


@pytest.mark.filterwarnings("ignore:.*waiting 0.3 s")
def test_a_writer_that_stops_while_it_publishes_keeps_the_directory_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie = stopped_writer(tmp_path, "rename")
    monkeypatch.setattr(lease_module, "LOCK_WAIT_S", 0.2)
    with pytest.raises(CheckpointError, match=r"is held by a process that is stopped .*end that process"):
        heir_of(tmp_path).claim()
    os.kill(zombie, signal.SIGKILL)
    os.waitpid(zombie, 0)
    heir = heir_of(tmp_path)
    heir.save(20, tensors(20), {"by": "heir"})
    assert heir.load(None, zeros_like(tensors(20))) == {"by": "heir"}
    heir.close()


@pytest.mark.filterwarnings("ignore:.*waiting 0.3 s")
def test_a_run_that_lost_its_lease_is_told_before_its_next_save(tmp_path: Path) -> None:
    lost = CheckpointStore(tmp_path, 3, lease=Lease(tmp_path, "lost", stale_s=0.3))
    lost.save(10, tensors(10), {})
    edit(tmp_path, token="another's")
    with pytest.raises(CheckpointError, match="lost the lease"):
        for _ in range(100):
            lost.poll()
            time.sleep(0.01)
    lost.close()


def away(folder: Path, seconds: float) -> threading.Timer:
    """Move a folder away now, and back after so many seconds."""
    folder.rename(folder.with_name("elsewhere"))
    back = threading.Timer(seconds, lambda: folder.with_name("elsewhere").rename(folder))
    back.start()
    return back


def test_a_folder_that_is_away_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Lease(folder, "run") as lease:
        back = away(folder, 0.5)
        lease.check()
        back.join()
        back = away(folder, 0.5)
        with lease.fenced():
            back.join()
            (folder / "published").touch()


def test_a_folder_that_stays_away_is_a_failure_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "AWAY_S", 0.2)
    folder = tmp_path / "run"
    folder.mkdir()
    store = CheckpointStore(folder, 3, lease=Lease(folder, "run", stale_s=0.3))
    store.save(10, tensors(10), {})
    back = away(folder, 3.0)
    words = r"run/lease\.json has been gone for 0\.2 s.*put the folder back, and go on with --resume auto"
    with pytest.raises(StorageError, match=words) as raised:
        for _ in range(200):
            store.poll()
            time.sleep(0.01)
    assert raised.value.code == 76 and not isinstance(raised.value, LostLeaseError)
    with pytest.raises(StorageError, match="has been gone"):
        store.save(20, tensors(20), {})
    back.join()
    store.save(20, tensors(20), {})
    assert steps(store) == [10, 20]
    store.close()
