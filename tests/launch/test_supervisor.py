"""Real ranks under the supervisor: exit codes, each sentence once, and nobody left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.launch.supervisor import run_ranks
from meshwright.rank.failure import Outcome
from meshwright.rank.scratch import PREFIX
from meshwright.train.signals import ECHO_SECONDS

PROGRAM = """
import os, stat, subprocess, sys, time
from meshwright.spec import UserError

def listening():
    # Addresses that this rank listens on (proc(5): hexadecimal, state 0A), and its launcher's store.
    own = {os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.lexists(f.path)}
    store = os.stat(os.environ["MESHWRIGHT_STORE"])
    yield "private" if stat.S_ISSOCK(store.st_mode) and not store.st_mode & 0o077 else "public"
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            address, port = local.split(":")
            if state == "0A" and f"socket:[{inode}]" in own:
                yield address

rank = int(os.environ["RANK"])
mode, folder = sys.argv[1], sys.argv[2]
with open(f"{folder}/pid{rank}", "w") as file:
    file.write(str(os.getpid()))
if mode in ("wait", "exit", "kill"):
    started = subprocess.Popen(["sleep", "60"])  # as a compiler is
    with open(f"{folder}/pid{rank}-started", "w") as file:
        file.write(str(started.pid))
if mode == "print":
    print("said", rank, sys.argv[3:], flush=True)
if mode == "mistake":
    raise UserError("layout.dp: 3 does not fit")
if mode == "mistake-of-one" and rank == 1:
    raise UserError("only rank 1 knows")
if mode == "crash" and rank == 1:
    raise ValueError("a bug")
if mode == "exit" and rank == 1:
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)
if mode == "kill" and rank == 1:
    os.kill(os.getpid(), 9)
if mode == "collective":
    import torch
    import torch.distributed as dist
    from meshwright.rank.env import worker
    from meshwright.rank.process_group import process_group
    with process_group(worker()) as group:
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        with open(f"{folder}/listening{rank}", "w") as file:
            file.write("\\n".join(listening()))
        dist.barrier()
        if rank == 1:
            raise UserError(f"the sum is {value.item():g}")
        dist.barrier()
if mode == "executor":
    import torch.distributed
    from concurrent.futures import ThreadPoolExecutor
    sys.pool = ThreadPoolExecutor(1)
    sys.pool.submit(print, "worked").result()
if mode not in ("print", "mistake", "executor"):
    time.sleep(60)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "ranks_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield "ranks_program"
    for pid in pids(tmp_path):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
            pytest.fail(f"rank {pid} was left behind")


def launcher_of(arguments: list[str], module: str) -> str:
    """A program that runs two ranks, and ends as they do."""
    run = f"run_ranks({arguments}, 2, module={module!r})"
    return f"from meshwright.launch.supervisor import run_ranks; raise SystemExit({run}.code)"


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("pid*") if file.read_text()]


def alive(pid: int) -> bool:
    """True if the process runs: neither gone nor a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_rank_0_has_the_terminal_and_arguments_arrive_as_given(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(["print", str(tmp_path), "a$b", "${local_rank}", "-1"], 2, module=module) == Outcome()
    out, err = capfd.readouterr()
    assert out == "said 0 ['a$b', '${local_rank}', '-1']\n"
    assert err == ""


def test_a_mistake_of_every_rank_is_one_sentence(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(["mistake", str(tmp_path)], 2, module=module) == Outcome(2, "layout.dp: 3 does not fit")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("mode", "code", "sentence", "detail"),
    [
        ("mistake-of-one", 2, "only rank 1 knows", ""),
        ("crash", 1, "rank 1 of 2 failed with ValueError: a bug", "Traceback"),
        ("exit", 7, "rank 1 of 2 ended with exit code 7", "last words"),
        ("kill", 137, "rank 1 of 2 was ended by SIGKILL", ""),
    ],
)
def test_the_first_failure_is_told(
    mode: str, code: int, sentence: str, detail: str, module: str, tmp_path: Path
) -> None:
    found = run_ranks([mode, str(tmp_path)], 2, module=module)
    assert found.code == code
    assert sentence in found.sentence
    assert detail in found.details
    assert bool(found.details) == bool(detail)


def test_ranks_meet_on_loopback_and_a_mistake_beside_a_broken_collective_is_told_alone(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(["collective", str(tmp_path)], 2, module=module) == Outcome(2, "the sum is 3")
    assert "Traceback" not in capfd.readouterr().err
    for rank in (0, 1):
        assert set((tmp_path / f"listening{rank}").read_text().split()) == {
            "private",
            "0100007F",
        }  # 127.0.0.1


def test_an_executor_that_was_left_open_does_not_hold_a_rank(module: str, tmp_path: Path) -> None:
    """As torch.compile's, whose threads wait for work until the process ends."""
    ended = subprocess.run(
        [sys.executable, "-c", launcher_of(["executor", str(tmp_path)], module)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, "worked\n")


def test_signal_handlers_are_put_back(module: str, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_ranks(["print", str(tmp_path)], 1, module=module)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_ends_ranks_that_do_not_heed_signals(module: str, tmp_path: Path) -> None:
    """Within two seconds, not after the 30 s of grace."""
    program = launcher_of(["wait", str(tmp_path)], module)
    launcher = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(pids(tmp_path)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = pids(tmp_path)
    assert len(ranks) == 4
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    time.sleep(ECHO_SECONDS[signal.SIGINT] + 0.3)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert launcher.wait(60) == 130
    assert time.monotonic() - begun < 10
    assert not any(map(alive, ranks))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.full),
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_no_rank_outlives_its_launcher(
    number: signal.Signals, code: int, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what ranks have started, nor a temporary folder, also where it is killed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = launcher_of(["wait", str(tmp_path)], module)
    launcher = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(pids(tmp_path)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = pids(tmp_path)
    assert len(ranks) == 4
    assert all(map(alive, ranks))
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert "Traceback" not in err
    deadline = time.monotonic() + 10  # by themselves they end after a minute
    while (any(map(alive, ranks)) or list(tmp_path.glob(f"{PREFIX}*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, ranks))
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_a_second_signal_does_not_cut_short_the_removal_of_folders(tmp_path: Path) -> None:
    """A zygote may be signalled for each thread of a launcher that ends."""
    (tmp_path / f"{PREFIX}1" / "generation-0").mkdir(parents=True)
    program = """
import os, shutil, signal
from meshwright.launch import zygote
remove = shutil.rmtree
def remove_after_a_signal(*folder, **options):
    os.kill(os.getpid(), signal.SIGCONT)
    remove(*folder, **options)
shutil.rmtree = remove_after_a_signal
signal.signal(signal.SIGCONT, lambda *_: zygote._end_if_orphaned(0, []))
zygote._end_if_orphaned(0, [])
"""
    ended = subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ended.returncode == 1
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_launcher_whose_last_thread_still_holds_it_is_waited_for(tmp_path: Path) -> None:
    """A child of a process with threads may be told of its death before its locks are given up."""
    folder = tmp_path / f"{PREFIX}1234567-a"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    program = "from meshwright.launch import zygote; zygote._end_if_orphaned(1234567, [])"
    ending = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)})
    with pytest.raises(subprocess.TimeoutExpired):
        ending.wait(3)
    os.close(descriptor)
    assert ending.wait(30) == 1
    assert not folder.exists()
