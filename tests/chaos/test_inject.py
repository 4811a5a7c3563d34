"""Faults of a plan: each hits once, at its place, and does what it says."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from injected import STEP, ActedError, Rank, arm, raising
from meshwright.chaos import inject
from meshwright.chaos.chaos import damage
from meshwright.chaos.faults import Fault, FaultPlan
from meshwright.chaos.inject import Injection
from meshwright.rank.env import Supervision


@pytest.fixture
def plan_of() -> Iterator[Callable[..., FaultPlan]]:
    plans: list[FaultPlan] = []

    def made(*faults: Fault) -> FaultPlan:
        plans.append(FaultPlan(faults))
        return plans[-1]

    yield made
    for plan in plans:
        plan.close()


# Places -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", sorted({*STEP, "end"}))
def test_a_fault_hits_once_at_its_step_and_phase_of_its_rank(
    plan_of: Callable[..., FaultPlan], phase: str
) -> None:
    fault = Fault("slow", 1, phase, step=2 if phase != "end" else 4, seconds=0.0)
    plan = plan_of(fault)
    bystander, seen = Rank(plan, 0), []
    arm(plan)
    bystander.steps(4)
    assert not plan.hits[0].starts
    rank = Rank(plan, 1)

    def act(injection: Injection, number: int, fault: Fault, done: int) -> None:
        injection.acted(number)
        seen.append((done, phase))

    with patch.dict(inject._ACTS, slow=act):
        rank.steps(4)
        rank.steps(4)
    assert seen == [(fault.step, phase)]
    assert (plan.hits[0].step, plan.hits[0].starts) == (fault.step, 1)


def test_nothing_hits_that_is_not_armed_and_nothing_before_the_fault_ahead_of_it(
    plan_of: Callable[..., FaultPlan],
) -> None:
    plan = plan_of(Fault("slow", 0, "reduce"), Fault("slow", 0, "data"))
    rank = Rank(plan)
    rank.step()
    plan.hits.write(1, armed=1)
    rank.step()
    assert not plan.hits[0].starts and not plan.hits[1].starts
    plan.hits.write(0, armed=1)
    rank.steps(2)
    assert [plan.hits[number].step for number in (0, 1)] == [2, 3]


def test_a_fault_that_has_hit_does_not_hit_the_next_generation(plan_of: Callable[..., FaultPlan]) -> None:
    plan = plan_of(Fault("kill", 0, "forward", step=1))
    arm(plan)
    with patch.dict(inject._ACTS, kill=raising):
        with pytest.raises(ActedError):
            Rank(plan).steps(3)
        Rank(plan, generation=1).steps(3)
    assert plan.hits[0].starts == 1


def test_without_faults_a_rank_is_given_no_injection(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.api.train_rank import _injection

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert _injection(None) is None
    assert _injection(Supervision(0, 0.0, 3)) is None


def test_progress_after_a_fault_is_noted(plan_of: Callable[..., FaultPlan]) -> None:
    """A rank dies in the fourth step, the ranks go on from step 1, and are back once the fourth is done."""
    plan = plan_of(Fault("kill", 0, "backward", step=3))
    arm(plan)
    with patch.dict(inject._ACTS, kill=raising), pytest.raises(ActedError):
        Rank(plan).steps(5)
    again = Rank(plan, generation=1, done=1)
    assert not plan.hits[0].resumed
    again.step()
    assert plan.hits[0].resumed_step == 1 and plan.hits[0].resumed > plan.hits[0].acted
    again.step()
    again.step()
    assert not plan.hits[0].back
    again.step()
    assert plan.hits[0].back > plan.hits[0].resumed


def test_ranks_that_start_again_after_the_last_step_are_back(plan_of: Callable[..., FaultPlan]) -> None:
    plan = plan_of(Fault("kill", 0, "data", step=1))
    arm(plan)
    with patch.dict(inject._ACTS, kill=raising), pytest.raises(ActedError):
        Rank(plan).steps(2)
    Rank(plan, generation=1, done=5).heartbeat.phase("evaluate")  # the heartbeat has no step yet
    assert plan.hits[0].resumed_step == 5 and plan.hits[0].back


def test_ranks_are_back_at_the_end_though_no_step_is_left(plan_of: Callable[..., FaultPlan]) -> None:
    plan = plan_of(Fault("kill", 0, "data", step=1))
    arm(plan)
    with patch.dict(inject._ACTS, kill=raising), pytest.raises(ActedError):
        Rank(plan).steps(2)
    plan.hits.write(0, acted_step=5)  # another rank was further
    Rank(plan, generation=1, done=5).heartbeat.phase("end", 5)
    assert plan.hits[0].back


def test_a_slow_rank_is_over_when_its_steps_are(plan_of: Callable[..., FaultPlan]) -> None:
    plan = plan_of(Fault("slow", 0, "data", step=1, seconds=0.01, steps=2))
    arm(plan)
    rank, slept = Rank(plan), []
    with patch.object(inject.time, "sleep", slept.append):
        for _ in range(3):
            rank.step()
            assert not plan.hits[0].back
        rank.steps(2)
    assert slept == [0.01] * (2 * len(STEP) - 1)  # not in the phase that it hit, which had begun
    assert plan.hits[0].back


def test_saves_are_measured(plan_of: Callable[..., FaultPlan]) -> None:
    plan = plan_of(Fault("kill", 0))
    rank = Rank(plan)
    for _ in range(2):
        rank.step()
        rank.heartbeat.phase("save", rank.done)
        time.sleep(0.02)
    rank.step()
    rank.heartbeat.phase("save", rank.done)  # the last save, after which nobody waits
    rank.heartbeat.phase("end", rank.done)
    number, stopped = plan.hits.saves
    assert number == 2 and 0.04e9 <= stopped < 2e9


# Acts -------------------------------------------------------------------------------------------------


def ending(plan: FaultPlan) -> int:
    """Wait status of a process that runs as rank 0 under a plan, and is killed if that does not end it."""
    pid = os.fork()
    if pid == 0:
        try:
            Rank(plan).steps(4)
            time.sleep(2.0)
        finally:
            os._exit(7)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return status


def test_kinds_that_end_or_stop_a_process(plan_of: Callable[..., FaultPlan]) -> None:
    for kind, seconds in (("kill", 0.0), ("kill-anytime", 0.05), ("flip-checkpoint", 0.0)):
        plan = plan_of(Fault(kind, 0, "reduce", step=2, seconds=seconds))
        arm(plan)
        assert os.WTERMSIG(ending(plan)) == signal.SIGKILL, kind
        assert plan.hits[0].acted and plan.hits[0].step == 2
    plan = plan_of(Fault("stop", 0, "data", step=1))
    arm(plan)
    status = ending(plan)
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP


def test_a_stuck_rank_goes_no_further(plan_of: Callable[..., FaultPlan]) -> None:
    plan = plan_of(Fault("stuck", 0, "data", step=1))
    arm(plan)
    rank = Rank(plan)
    thread = threading.Thread(target=rank.steps, args=(3,), daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and rank.done == 1


@pytest.mark.parametrize(("kind", "error"), [("error", RuntimeError), ("out-of-memory", MemoryError)])
def test_an_error_is_raised_once(
    plan_of: Callable[..., FaultPlan], kind: str, error: type[Exception]
) -> None:
    plan = plan_of(Fault(kind, 0, "forward", step=1))
    arm(plan)
    rank = Rank(plan)
    with pytest.raises(error):
        rank.steps(3)
    assert rank.done == 1
    rank.steps(3)


def test_the_clock_jumps(plan_of: Callable[..., FaultPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", time.time)  # undone after the test
    plan = plan_of(Fault("clock-jump", 0, "data", step=1, seconds=-3600.0))
    arm(plan)
    before = time.time()
    Rank(plan).steps(3)
    assert -3600 <= time.time() - before < -3590


@pytest.mark.parametrize(("kind", "code"), [("io-error", errno.EIO), ("disk-full", errno.ENOSPC)])
def test_the_next_write_of_a_save_fails_once(
    plan_of: Callable[..., FaultPlan], tmp_path: Path, kind: str, code: int
) -> None:
    plan = plan_of(Fault(kind, 0, "backward", step=1))
    arm(plan)
    rank = Rank(plan)
    disk = rank.injection.disk
    disk.write_file(tmp_path / "before", [memoryview(b"whole")])
    rank.steps(2)
    assert plan.hits[0].starts and not plan.hits[0].acted
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        disk.write_file(tmp_path / "failing", [memoryview(b"never")])
    assert caught.value.errno == code and plan.hits[0].acted_step == 2
    disk.write_file(tmp_path / "after", [memoryview(b"whole")])
    assert (tmp_path / "after").read_bytes() == b"whole"
    rank.steps(2)
    assert plan.hits[0].back


def test_an_activation_becomes_nan_once(plan_of: Callable[..., FaultPlan]) -> None:
    plan = plan_of(Fault("nan", 0, "forward", step=1, number=10))  # the third output, its element 10 % 3
    arm(plan)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    rank = Rank(plan)
    rank.steps(1)
    assert model(torch.ones(3)).isfinite().all()
    rank.steps(1)
    with torch.no_grad():
        assert model(torch.ones(3)).isfinite().all()  # an evaluation is spared
    assert not model(torch.ones(3)).isfinite().all()
    assert plan.hits[0].acted
    assert model(torch.ones(3)).isfinite().all()


def test_one_bit_of_one_parameter_flips(plan_of: Callable[..., FaultPlan]) -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(2, 3)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    held = [
        (name, SimpleNamespace(to_local=lambda tensor=tensor: tensor)) for name, tensor in tensors.items()
    ]
    plan = plan_of(Fault("flip", 0, "data", step=1, number=1234567))
    arm(plan)
    rank: Any = Rank(plan)
    unit = SimpleNamespace(quantised=None, parameters_stored=lambda: held)
    rank.trainer = SimpleNamespace(states=SimpleNamespace(units=[unit]))
    rank.steps(3)
    bits = [
        (left.view(-1).view(torch.int32) ^ right.view(-1).view(torch.int32)).tolist()
        for left, right in zip(before.values(), tensors.values(), strict=True)
    ]
    assert sum(value.bit_count() for row in bits for value in (x & 0xFFFFFFFF for x in row)) == 1


@pytest.mark.parametrize("kind", ["flip-checkpoint", "cut-checkpoint", "cut-latest"])
def test_the_newest_checkpoint_is_damaged_if_another_is_good(tmp_path: Path, kind: str) -> None:
    def save(step: int) -> None:
        path = tmp_path / f"step-{step:08d}"
        path.mkdir()
        (path / "rank-00000.bin").write_bytes(bytes(64))
        (path / "manifest.json").write_bytes(bytes(32))
        (tmp_path / "LATEST").write_text(path.name + "\n")

    def content() -> dict[str, bytes]:
        return {
            str(path.relative_to(tmp_path)): path.read_bytes()
            for path in tmp_path.rglob("*")
            if path.is_file()
        }

    fault = Fault(kind, 0, number=9001)
    assert damage(fault, tmp_path, set()) is None
    save(10)
    assert damage(fault, tmp_path, set()) is None
    save(20)
    whole = content()
    target = damage(fault, tmp_path, set())
    changed = [name for name, data in content().items() if data != whole[name]]
    assert len(changed) == 1
    if kind == "cut-latest":
        assert (target, changed) == ("LATEST", ["LATEST"])
        return
    assert target == "step-00000020" and changed[0].startswith(target)
    now, before = content()[changed[0]], whole[changed[0]]
    if kind == "cut-checkpoint":
        assert now == before[: len(before) // 2]
    else:
        differing = sum((left ^ right).bit_count() for left, right in zip(now, before, strict=True))
        assert differing == 1
    assert damage(fault, tmp_path, {target}) is None  # the good one must stay
    save(30)
    assert damage(fault, tmp_path, {target}) == "step-00000030"


def test_after_damage_a_rank_drops_its_snapshots_once(
    plan_of: Callable[..., FaultPlan], tmp_path: Path
) -> None:
    plan = plan_of(Fault("flip-checkpoint", 0, "data", step=1))
    arm(plan)
    file = (tmp_path / "slot").open("w+b", buffering=0)
    for generation, size in ((0, 5), (1, 0), (2, 5)):
        os.truncate(file.name, 5)
        with patch.dict(inject._ACTS, {"flip-checkpoint": raising}):
            rank = Rank(plan, generation=generation, snapshots=(file.fileno(),))
            assert os.path.getsize(file.name) == size
            if generation == 0:
                with pytest.raises(ActedError):
                    rank.steps(2)
    file.close()
