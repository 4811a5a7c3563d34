from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sample_texts import texts

from meshwright.data import processes as module
from meshwright.data import text_processes, words
from meshwright.data.processes import Processes, WorkError
from meshwright.data.tokenize import tokenize
from meshwright.host import cores
from meshwright.spec import UserError

SOURCE = str(Path(module.__file__).parents[2])


class Adder:
    """A worker that adds to what it has, or fails."""

    def __init__(self) -> None:
        self.sum = 0

    def add(self, number: int) -> tuple[int, int]:
        self.sum += number
        return number, os.getpid()

    def total(self) -> int:
        return self.sum

    def refuse(self, number: int) -> None:
        if number == 20:
            raise Exception(f"number {number}")  # as the library does

    def fail(self, number: int) -> None:
        if number == 20:
            raise ValueError(f"number {number}")

    def end(self, number: int) -> None:
        if number == 20:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 2)


@pytest.mark.parametrize("number", [3, 200])
def test_results_come_in_order_from_one_process_or_two(number: int) -> None:
    with Processes(Adder()) as processes:
        found = [result for _, result in processes.each((None, ("add", i)) for i in range(number))]
        assert [i for i, _ in found] == list(range(number))
        pids = {pid for _, pid in found}
        assert len(pids) == processes.number == (1 if number == 3 else 2)
        assert (os.getpid() in pids) == (number == 3)
        assert sum(processes.everyone(("total",))) == sum(range(number))
    for pid in pids - {os.getpid()}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("number", [8, 200])
def test_what_the_library_refuses_is_told_in_its_words(number: int) -> None:
    with Processes(Adder()) as processes, pytest.raises(WorkError, match=r"^number 20$"):
        list(processes.each((None, ("refuse", i)) for i in range(20, 20 + number)))


@pytest.mark.parametrize(("number", "error"), [(8, ValueError), (200, RuntimeError)])
def test_a_mistake_of_the_program_is_not_told_as_the_texts(number: int, error: type[Exception]) -> None:
    """It comes with its traceback where another process made it."""
    with Processes(Adder()) as processes, pytest.raises(error, match="number 20") as caught:
        list(processes.each((None, ("fail", i)) for i in range(20, 20 + number)))
    assert not isinstance(caught.value, WorkError)
    assert number == 8 or "ValueError" in str(caught.value)


def test_a_process_that_is_killed_is_one_sentence() -> None:
    with (
        Processes(Adder()) as processes,
        pytest.raises(UserError, match=r"^data\.corpus: one of the processes .* ended by SIGKILL .*memory"),
    ):
        list(processes.each((None, ("end", i)) for i in range(100)))


def test_many_requests_are_never_under_way() -> None:
    sent = 0

    def requests() -> object:
        nonlocal sent
        for i in range(100):
            sent += 1
            yield None, ("add", i)

    with Processes(Adder()) as processes:
        for done, _ in enumerate(processes.each(requests())):  # type: ignore[arg-type]
            assert sent <= max(module.ALONE + 1, done + 1 + 3 * 2)


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    root.mkdir()
    (proc / "self" / "cgroup").write_text("0::/\n")
    limit = root / "cpu.max"
    assert cores(proc, root) == 16
    for text, number in (("max 100000", 16), ("400000 100000", 4), ("50000 100000", 1), ("x", 16)):
        limit.write_text(text)
        assert cores(proc, root) == number


@pytest.mark.parametrize("tokenizer", ["bpe", "given"])
def test_shards_of_two_processes_are_those_of_one(
    folder: Path, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "long.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(300, 4)))
    setting = tokenizer
    if tokenizer == "given":
        tokenize(str(folder), "bpe", tmp_path / "first", vocab_size=290)
        setting = str(tmp_path / "first" / "tokenizer.json")
    alone = tokenize(str(folder), setting, tmp_path / "alone", vocab_size=300, val_fraction=0.1)
    monkeypatch.setattr(text_processes, "BATCH", 2000)
    monkeypatch.setattr(text_processes.batches, "__defaults__", (2000,))
    monkeypatch.setattr(words, "MOST_KNOWN", 50)
    seen: list[int] = []
    monkeypatch.setattr(Processes, "_start", lambda own, n: (seen.append(n), START(own, n))[1])
    spread = tokenize(str(folder), setting, tmp_path / "spread", vocab_size=300, val_fraction=0.1)
    assert seen == [2] and spread == alone


START = Processes._start


def test_an_interrupt_ends_all_processes_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(60):
        (tmp_path / "in" / f"{number}.py").write_text("\n".join(texts(60, seed=number)) * 30)
    program = (
        "import sys; from meshwright.data import processes; processes.cores = lambda: 2;"
        "from meshwright.cli.main import run; sys.exit(run())"
    )
    command = [sys.executable, "-c", program, "tokenize", "--data.corpus", str(tmp_path / "in")]
    asked = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stderr=subprocess.PIPE,
        text=True,
    )
    children: list[str] = []
    listed = Path(f"/proc/{asked.pid}/task/{asked.pid}/children")
    while len(children) < 2 and asked.poll() is None:
        children = listed.read_text().split()
        time.sleep(0.01)
    assert len(children) == 2
    asked.send_signal(signal.SIGINT)
    _, said = asked.communicate(timeout=60)
    assert asked.returncode not in (0, 1) and "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    deadline = time.monotonic() + 10
    while any(Path("/proc", child).exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path("/proc", child).exists() for child in children)
