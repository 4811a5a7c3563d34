"""One process: what is saved comes back bit for bit, and damage or mistakes are told in a sentence."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from faults import FailingWrites, HeldDisk, as_version_1, leftovers, same, steps, tensors, zeros_like
from meshwright.checkpoint import BadCheckpointError, CheckpointError, CheckpointStore, errors
from meshwright.checkpoint.directory import published
from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.inspect import list_checkpoints, verify_checkpoint
from meshwright.spec import UserError
from meshwright.spec.errors import StorageError


def saved(directory: Path, *steps: int, keep: int = 5) -> None:
    store = CheckpointStore(directory, keep)
    for step in steps:
        store.save(step, tensors(step), {"step": step, "layout": "dp1"})
    store.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    state = {"step": 20, "loss": 2.5, "nested": {"list": [1, None, "x"]}, "nan": float("inf")}
    source = tensors(1)
    store = CheckpointStore(tmp_path / "deep" / "checkpoints", keep=2)
    store.save(20, source, state, asynchronous)
    store.wait()
    target = zeros_like(source)
    assert store.load(20, target) == state
    assert same(source, target)
    assert (steps(store), store.latest()) == ([20], 20)
    store.close()


def test_tensors_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    source, disk = tensors(3), HeldDisk()
    store = CheckpointStore(tmp_path, 2, disk=disk)
    store.claim()
    disk.go.clear()
    store.save(1, source, {}, asynchronous=True)
    for tensor in source.values():
        tensor.zero_()
    disk.go.set()
    store.wait()
    target = zeros_like(source)
    store.load(1, target)
    assert same(target, tensors(3))
    store.close()


def test_training_waits_for_the_copy_only_and_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    disk = HeldDisk()
    store = CheckpointStore(tmp_path, 2, disk=disk)
    store.claim()
    disk.go.clear()
    store.save(1, tensors(1), {}, asynchronous=True)  # returns although the disk does not move
    store.poll()
    assert not published(tmp_path)
    threading.Timer(0.2, disk.go.set).start()
    store.save(2, tensors(2), {}, asynchronous=True)
    assert 1 in published(tmp_path)
    store.close()
    assert not verify_checkpoint(tmp_path, 1).problems
    assert not verify_checkpoint(tmp_path, 2).problems


def test_keep_holds_the_newest_and_never_removes_what_was_just_written(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30, 40, keep=2)
    assert list(published(tmp_path)) == [30, 40]
    saved(tmp_path, 15, keep=2)  # somebody went back: the run's present is now step 15
    store = CheckpointStore(tmp_path, 2)
    assert 15 in steps(store)
    assert store.latest() == 15
    target = zeros_like(tensors(15))
    store.load(None, target)
    assert same(target, tensors(15))
    assert not leftovers(tmp_path)


def test_every_nth_step_is_kept_for_ever_besides_the_newest(tmp_path: Path) -> None:
    state = {"spec": {"checkpoint": {"keep_every": 40}}}
    store = CheckpointStore(tmp_path, 2, keep_every=40)
    for step in range(0, 130, 10):
        store.save(step, tensors(step), state)
    store.close()
    assert steps(store) == [40, 80, 110, 120]
    rows = list_checkpoints(tmp_path)
    assert [(row.step, row.permanent, row.latest) for row in rows] == [
        (40, True, False), (80, True, False), (110, False, False), (120, True, True),
    ]  # fmt: skip
    store = CheckpointStore(tmp_path, 2)
    for odd in ([], {"spec": 3}, {"spec": {"checkpoint": {"keep_every": "x"}}}):
        store.save(130, tensors(1), {"state": odd} if odd == [] else odd)  # type: ignore[arg-type]
        assert not list_checkpoints(tmp_path)[-1].permanent
    store.close()
    assert steps(store) == [120, 130]


def test_a_step_saved_again_replaces_the_first_attempt(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    store = CheckpointStore(tmp_path, 3)
    store.save(10, tensors(99), {"again": True})
    target = zeros_like(tensors(99))
    assert store.load(10, target) == {"again": True}
    assert same(target, tensors(99))
    assert steps(store) == [10]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    store.close()


def test_a_model_that_does_not_fit_is_refused_by_name_and_stays_as_it_was(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    store = CheckpointStore(tmp_path, 3)
    for name, other, words in [
        ("model/a.weights", torch.zeros(7, 5), "did you mean 'model/a.weight'"),
        ("model/a.weight", torch.zeros(5, 7), "shape"),
        ("model/a.weight", torch.zeros(7, 5, dtype=torch.float64), "float32"),
    ]:
        target = {"optim/mask": torch.zeros(9, dtype=torch.bool), name: other}
        with pytest.raises(UserError, match=words) as refusal:
            store.load(None, target)
        assert name in str(refusal.value)
        assert not isinstance(refusal.value, BadCheckpointError)
        assert not target["optim/mask"].any()


def test_a_state_that_the_caller_refuses_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    seen = []

    def refuse(state: dict[str, object]) -> None:
        seen.append(state["step"])
        raise UserError("data.corpus differs")

    target = tensors(5)
    with pytest.raises(UserError, match="corpus differs"):
        CheckpointStore(tmp_path, 3).load(None, target, refuse)
    assert same(target, tensors(5))
    assert seen == [20]  # a refusal is no damage: the checkpoint before is not tried


def test_the_latest_that_is_bad_falls_back_with_a_warning_and_a_numbered_one_is_refused(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 10, 20)
    path = tmp_path / "step-00000020" / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    store = CheckpointStore(tmp_path, 3)
    target = zeros_like(tensors(10))
    assert store.load(None, target)["step"] == 10
    assert same(target, tensors(10))
    assert len(store.warnings) == 1
    assert str(path) in store.warnings[0]
    assert "optim/exp_avg/a.weight" in store.warnings[0]
    with pytest.raises(BadCheckpointError, match="SHA-256"):
        store.load(20, target)
    report = verify_checkpoint(tmp_path, 20)
    assert report.problems
    assert "optim/exp_avg/a.weight" in report.problems[0]


class UnreadableDisk(Disk):
    """Reads of one file fail `times` times."""

    def __init__(self, file: str, code: int, times: int) -> None:
        self.file, self.code, self.times = file, code, times

    def read(self, descriptor: int, target: memoryview, start: int) -> int:
        if self.times and os.readlink(f"/proc/self/fd/{descriptor}").endswith(self.file):
            self.times -= 1
            raise OSError(self.code, os.strerror(self.code))
        return super().read(descriptor, target, start)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("file", ["manifest.json", "part-00000.json", "rank-00000.bin"])
def test_a_disk_that_does_not_answer_is_no_damage(
    tmp_path: Path, file: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10, 20)
    monkeypatch.setattr(errors, "PAUSES_S", (0.0, 0.0))
    file = f"step-00000020/{file}"
    passing = CheckpointStore(tmp_path, 2, disk=UnreadableDisk(file, code, 2))
    assert passing.load(None, zeros_like(tensors(20)))["step"] == 20
    assert passing.warnings == []
    target = tensors(5)
    store = CheckpointStore(tmp_path, 2, disk=UnreadableDisk(file, code, 10**9))
    with pytest.raises(StorageError, match=f"{file} cannot be read: {os.strerror(code)}") as caught:
        store.load(None, target)
    assert caught.value.code == 76
    assert not isinstance(caught.value, BadCheckpointError)
    assert same(target, tensors(5)) and store.warnings == []
    store.save(30, tensors(30), {"step": 30})
    assert steps(store) == [20, 30]  # it counts for `keep` as any other
    store.close()


def test_a_damaged_checkpoint_takes_no_place_of_a_good_one(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    os.truncate(tmp_path / "step-00000030" / "rank-00000.bin", 40)
    store = CheckpointStore(tmp_path, 2)
    store.load(None, zeros_like(tensors(10)))
    store.save(40, tensors(40), {"step": 40})
    assert steps(store) == [20, 30, 40]
    store.save(50, tensors(50), {"step": 50})
    assert steps(store) == [30, 40, 50]
    store.close()


def test_when_all_are_bad_the_run_stops(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    for step in (10, 20):
        os.truncate(tmp_path / f"step-{step:08d}" / "manifest.json", 40)
    target = tensors(5)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
        CheckpointStore(tmp_path, 3).load(None, target)
    assert same(target, tensors(5))


def test_a_missing_latest_is_not_a_fresh_start(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    store = CheckpointStore(tmp_path, 3)
    (tmp_path / "LATEST").unlink()
    assert store.latest() == 20
    (tmp_path / "LATEST").write_text("nonsense")
    assert store.latest() == 20
    (tmp_path / "LATEST").write_text("step-00000030\n")  # named, but gone
    assert store.latest() == 30
    target = zeros_like(tensors(20))
    assert store.load(None, target)["step"] == 20
    damaged, missing = store.warnings
    assert "LATEST is damaged; the highest step, step 20, is used instead" in damaged
    assert "step-00000030" in missing
    empty = tmp_path / "empty"
    empty.mkdir()
    assert CheckpointStore(empty, 1).latest() is None
    (empty / "LATEST").write_text("nonsense")
    with pytest.raises(CheckpointError, match="holds none"):
        CheckpointStore(empty, 1).latest()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        CheckpointStore(tmp_path / "nowhere", 1).load(None, target)
    with pytest.raises(CheckpointError, match="it has 10, 20"):
        store.load(15, target)


def test_a_failure_behind_training_is_told_by_poll_once_and_training_can_go_on(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    disk = FailingWrites()
    store = CheckpointStore(tmp_path, 3, disk=disk)
    store.claim()
    disk.broken = True
    store.save(20, tensors(20), {}, asynchronous=True)
    with pytest.raises(CheckpointError, match="step 20"):
        for _ in range(500):
            store.poll()
            time.sleep(0.01)
    store.poll()
    assert steps(store) == [10]
    assert not leftovers(tmp_path)
    disk.broken = False
    store.save(30, tensors(30), {}, asynchronous=True)
    store.wait()
    assert store.latest() == 30
    store.close()


def test_a_failure_that_nobody_polled_is_told_by_the_next_save(tmp_path: Path) -> None:
    disk = FailingWrites()
    store = CheckpointStore(tmp_path, 3, disk=disk)
    store.claim()
    disk.broken = True
    store.save(20, tensors(20), {}, asynchronous=True)
    with pytest.raises(CheckpointError, match="step 20"):
        store.save(30, tensors(30), {}, asynchronous=True)
    disk.broken = False
    store.close()


def test_a_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 3)
    with pytest.raises(TypeError):
        store.save(10, tensors(1), {"tensor": torch.zeros(1)})
    assert steps(store) == []
    store.close()


def test_inspection_lists_what_is_there(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    (tmp_path / "step-00000010" / "rank-00000.bin").unlink()
    bad, good = list_checkpoints(tmp_path)
    assert (bad.step, good.step, bad.latest, good.latest) == (10, 20, False, True)
    assert bad.problem is not None
    assert "rank-00000.bin" in bad.problem
    assert good.problem is None
    assert good.bytes == (tmp_path / "step-00000020" / "rank-00000.bin").stat().st_size
    assert good.tensors == len(tensors(20))
    assert good.layout == "dp1"
    report = verify_checkpoint(tmp_path)
    assert not report.problems
    assert (report.step, report.bytes) == (20, good.bytes)
    assert verify_checkpoint(tmp_path, 10).problems


def test_a_checkpoint_of_version_1_still_loads(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    body = as_version_1(tmp_path / "step-00000010")
    assert body["version"] == 1
    target = zeros_like(tensors(10))
    assert CheckpointStore(tmp_path, 3).load(None, target)["step"] == 10
    assert same(target, tensors(10))
    (row,) = list_checkpoints(tmp_path)
    report = verify_checkpoint(tmp_path)
    assert row.problem is None
    assert not report.problems
    assert (report.tensors, report.bytes) == (row.tensors, row.bytes) == (len(tensors(10)), sum_of_bytes(10))
    path = tmp_path / "step-00000010" / "rank-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert verify_checkpoint(tmp_path).problems


def sum_of_bytes(step: int) -> int:
    return sum(tensor.nbytes for tensor in tensors(step).values())


def test_nothing_on_the_disk_is_a_pickle(tmp_path: Path) -> None:
    source = {"model/x": torch.arange(40, dtype=torch.int32).reshape(5, 8)}
    store = CheckpointStore(tmp_path, 1)
    store.save(1, source, {})
    store.close()
    raw = (tmp_path / "step-00000001" / "rank-00000.bin").read_bytes()
    assert raw == source["model/x"].numpy().tobytes()
    body = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())["body"]
    assert body["tensors"]["model/x"]["shape"] == [5, 8]
