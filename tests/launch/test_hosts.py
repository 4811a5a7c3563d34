"""Two launchers that run one training, of which one is killed, comes again, or is cut off.

Hosts are network namespaces joined by a link, where tests may make those (as root); else two launchers on the
loopback interface, which differ from hosts in nothing that the run sees.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unhealthy
from meshwright.checkpoint.inspect import list_checkpoints, verify_checkpoint
from meshwright.runs.record import read_run
from meshwright.spec.errors import UnhealthyHostError

WORDS = [
    *("--model.preset", "tiny", "--model.layers", "1", "--model.hidden", "64", "--model.ffn", "64"),
    *("--model.vocab_size", "300", "--data.tokenizer", "byte", "--data.corpus", "synthetic"),
    *("--data.seq_len", "64", "--train.eval_tokens", "512"),
    *("--train.log_every", "1", "--recovery.snapshot_every", "1"),
]
SOON_S = 20.0
"""Longest time in which a run goes on after the loss of a host, or with one more."""
PATIENCE_S = 120.0


def tree(pid: int) -> list[int]:
    """The process, and all that it has started."""
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


UNHEALTHY = f"""
import runpy, sys
sys.path.append({str(Path(unhealthy.__file__).parent)!r})
from meshwright.launch import health_probe
health_probe.CHECKS = "unhealthy"
runpy.run_module("meshwright", run_name="__main__")
"""
"""The program of a host whose health probe finds a fault."""


class Launcher:
    """A host's `meshwright train --nodes 1:2`, in a network namespace if one is named.

    A `fault` is one that its health probe finds (`tests/unhealthy.py`).
    """

    started = 0

    def __init__(self, out: Path, address: str, namespace: str | None, *words: str, fault: str = "") -> None:
        enter = ["ip", "netns", "exec", namespace] if namespace else []
        program = ["-c", UNHEALTHY] if fault else ["-m", "meshwright"]
        command = [*enter, sys.executable, *program, "train", "--out", str(out), *WORDS, *words]
        self.log = out.with_name(f"{address}-{time.monotonic_ns()}.log")
        cores = sorted(os.sched_getaffinity(0))
        core = cores[Launcher.started % len(cores)]  # as if the host had no other: ranks take all that it has
        Launcher.started += 1
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "--nodes", "1:2", "--nproc", "1", "--address", address, "--json"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | ({unhealthy.ENVIRONMENT: fault} if fault else {}),
                preexec_fn=partial(os.sched_setaffinity, 0, {core}),
            )

    def kill(self) -> None:
        """Kill the launcher and all that it has started, as a host that loses power."""
        for pid in tree(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def launchers() -> Iterator[list[Launcher]]:
    made: list[Launcher] = []
    yield made
    for launcher in made:
        launcher.kill()


@pytest.fixture
def namespaces() -> Iterator[list[tuple[str, str]]]:
    """(namespace, address) of two hosts with a link between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces are made by root, with the command ip")
    names = [f"meshwright-{os.getpid()}-{end}" for end in "ab"]
    links = [f"mw{os.getpid() % 10**6}{end}" for end in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True), start=1):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
        yield [(name, f"10.77.0.{number}") for number, name in enumerate(names, start=1)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def steps(out: Path) -> list[int]:
    """Steps in the metrics, but for a line that is being written."""
    if not (out / "metrics.jsonl").exists():
        return []
    lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
    return [row["step"] for row in map(json.loads, lines) if "loss" in row]


def wait(until: Callable[[], object], limit: float, launchers: list[Launcher]) -> float:
    """Return the seconds until something is so; fail with the launchers' output after `limit`."""
    begun = time.monotonic()
    while not until():
        if time.monotonic() > begun + limit:
            pytest.fail("\n".join(launcher.log.read_text()[-2000:] for launcher in launchers))
        time.sleep(0.02)
    return time.monotonic() - begun


def next_step(out: Path, limit: float, launchers: list[Launcher]) -> float:
    """Return the seconds until the run has done a step more."""
    before = len(steps(out))
    return wait(lambda: len(steps(out)) > before, limit, launchers)


def result_of(launcher: Launcher) -> dict[str, Any]:
    assert launcher.process.wait(PATIENCE_S) == 0, launcher.log.read_text()
    return dict(json.loads(launcher.log.read_text().splitlines()[-1]))


def kinds(out: Path) -> list[str]:
    return [event["kind"] for event in read_run(out).events]


def assert_as_alone(result: dict[str, Any], out: Path, *words: str) -> None:
    """The run has seen the samples, and come to the loss, of one host that nothing happens to."""
    command = [sys.executable, "-m", "meshwright", "train", "--out", str(out), *WORDS, *words, "--quiet"]
    subprocess.run(command, check=True)
    expected = json.loads((out / "result.json").read_text())
    assert result["samples_sha256"] == expected["samples_sha256"]
    assert result["final_loss"] == pytest.approx(expected["final_loss"], rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("store", "lost"), [(False, 1), (True, 1), (True, 0)], ids=["folder", "store", "holder"]
)
def test_a_launcher_that_is_killed_is_done_without_and_another_joins(
    tmp_path: Path, launchers: list[Launcher], store: bool, lost: int
) -> None:
    out, last = tmp_path / "run", ("--train.steps", "200", "--train.batch_tokens", "512")
    if store:
        with socket.create_server(("127.0.0.1", 0)) as free:
            last += ("--rendezvous", f"127.0.0.1:{free.getsockname()[1]}")
    launchers.append(Launcher(out, "127.0.0.1", None, *last))
    wait(lambda: not store or (out / "hosts" / "store-0.json").exists(), PATIENCE_S, launchers)
    launchers.append(Launcher(out, "127.0.0.1", None, *last))
    wait(lambda: len(steps(out)) >= 5, PATIENCE_S, launchers)
    wait(lambda: read_run(out).info["world_size"] == 2, PATIENCE_S, launchers)
    launchers[lost].kill()
    gone_on = next_step(out, PATIENCE_S, launchers)
    wait(lambda: "host_lost" in kinds(out), PATIENCE_S, launchers)
    assert "failure" not in kinds(out)  # connections that broke with the host are no failure of their own
    assert gone_on < SOON_S
    launchers.append(Launcher(out, "127.0.0.1", None, *last))
    wait(lambda: "host_joined" in kinds(out), PATIENCE_S, launchers)
    result = result_of(launchers[1 - lost])
    assert result_of(launchers[2]) == result
    assert steps(out) == list(range(1, 201))
    assert_as_alone(result, tmp_path / "alone", *last[:4])
    assert list((out / "hosts").glob("host-*")) == []
    assert [*(out / "hosts").glob("generation-*")] == [] or not store
    assert (out / "hosts" / "store-1.json").exists() == (store and lost == 0)


@pytest.mark.full
def test_a_launcher_that_slept_while_it_held_the_store_joins_in_the_next_one(
    tmp_path: Path, launchers: list[Launcher]
) -> None:
    out, last = tmp_path / "run", ("--train.steps", "300", "--train.batch_tokens", "512")
    with socket.create_server(("127.0.0.1", 0)) as free:
        last += ("--rendezvous", f"127.0.0.1:{free.getsockname()[1]}")
    launchers.append(Launcher(out, "127.0.0.1", None, *last))
    wait(lambda: (out / "hosts" / "store-0.json").exists(), PATIENCE_S, launchers)
    launchers.append(Launcher(out, "127.0.0.1", None, *last))
    wait(lambda: len(steps(out)) >= 5, PATIENCE_S, launchers)
    wait(lambda: read_run(out).info["world_size"] == 2, PATIENCE_S, launchers)
    asleep, *ranks = tree(launchers[0].process.pid)
    os.kill(asleep, signal.SIGSTOP)
    for rank in ranks:  # which would hold the folder, as they are on the same host as all
        os.kill(rank, signal.SIGKILL)
    wait(lambda: "host_lost" in kinds(out), PATIENCE_S, launchers)
    next_step(out, PATIENCE_S, launchers)
    os.kill(asleep, signal.SIGCONT)
    wait(lambda: "host_joined" in kinds(out), PATIENCE_S, launchers)
    assert result_of(launchers[0]) == result_of(launchers[1])
    assert steps(out) == list(range(1, 301))
    assert (out / "hosts" / "store-1.json").exists() and not (out / "hosts" / "store-2.json").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("lost", "store"), [(0, False), (1, False), (0, True)], ids=["first", "second", "holder"]
)
def test_a_host_that_is_lost_costs_seconds_and_may_join_again(
    tmp_path: Path, namespaces: list[tuple[str, str]], launchers: list[Launcher], lost: int, store: bool
) -> None:
    out, last = tmp_path / "run", ("--train.steps", "400", "--train.batch_tokens", "4096")
    last += ("--rendezvous", f"{namespaces[0][1]}:29400") if store else ()
    launchers += [Launcher(out, address, name, *last) for name, address in namespaces]
    wait(lambda: len(steps(out)) >= 20, PATIENCE_S, launchers)
    launchers[lost].kill()
    gone_on = next_step(out, PATIENCE_S, launchers)
    name, address = namespaces[lost]
    launchers.append(Launcher(out, address, name, *last))
    joined = wait(lambda: "host_joined" in kinds(out), PATIENCE_S, launchers)
    joined += next_step(out, PATIENCE_S, launchers)
    result = result_of(launchers[1 - lost])
    assert steps(out) == list(range(1, 401))
    assert result["layout"].startswith("dp=2")
    assert gone_on < SOON_S
    assert joined < SOON_S


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1], ids=["first", "second"])
def test_a_host_that_alone_held_a_part_of_the_state_takes_no_step_along(
    tmp_path: Path, namespaces: list[tuple[str, str]], launchers: list[Launcher], lost: int
) -> None:
    """Without any checkpoint on disk; the optimiser's moments are cut over the hosts."""
    last = ("--train.steps", "60", "--train.batch_tokens", "4096", "--layout.zero", "1")
    out = tmp_path / "run"
    launchers += [Launcher(out, address, name, *last) for name, address in namespaces]
    wait(lambda: len(steps(out)) >= 20, PATIENCE_S, launchers)
    launchers[lost].kill()
    done = len(steps(out))
    result = result_of(launchers[1 - lost])
    (resumed,) = (event for event in read_run(out).events if event["kind"] == "resumed")
    assert resumed["step"] >= done - 1  # the last one may have been in its copy
    assert steps(out) == list(range(1, 61))
    assert_as_alone(result, tmp_path / "alone", *last)


@pytest.mark.full
@pytest.mark.parametrize("ill", [0, 1], ids=["first", "second"])
def test_a_host_that_fails_its_probe_is_done_without(
    tmp_path: Path, namespaces: list[tuple[str, str]], launchers: list[Launcher], ill: int
) -> None:
    """The rank of the other host is killed: each host is probed."""
    out, last = tmp_path / "run", ("--train.steps", "200", "--train.batch_tokens", "512")
    for number, (name, address) in enumerate(namespaces):
        fault = "product/0" if number == ill else ""
        launchers.append(Launcher(out, address, name, *last, fault=fault))
    wait(lambda: len(steps(out)) >= 20, PATIENCE_S, launchers)
    os.kill(tree(launchers[1 - ill].process.pid)[-1], signal.SIGKILL)
    result = result_of(launchers[1 - ill])
    assert launchers[ill].process.wait(PATIENCE_S) == UnhealthyHostError.code
    assert result["layout"].startswith("dp=1") and steps(out) == list(range(1, 201))
    events = read_run(out).events
    (found,) = (event for event in events if event["kind"] == "unhealthy")
    assert found["host"].startswith(namespaces[ill][1])
    assert f"host {found['host']} has failed its health probe: 1 of 1,048,576 numbers" in found["message"]
    assert found["message"] in launchers[ill].log.read_text()
    assert "host_lost" not in [event["kind"] for event in events]
    assert (out / "status").read_text().split() == ["done"]
    assert_as_alone(result, tmp_path / "alone", *last)


@pytest.mark.full
def test_a_link_that_is_cut_for_10_seconds_costs_no_step(
    tmp_path: Path, namespaces: list[tuple[str, str]], launchers: list[Launcher]
) -> None:
    last = ("--train.steps", "600", "--train.batch_tokens", "512")
    results = []
    for cut in (False, True):
        out = tmp_path / f"cut-{cut}"
        pair = [Launcher(out, address, name, *last) for name, address in namespaces]
        launchers += pair
        wait(lambda out=out: len(steps(out)) >= 20, PATIENCE_S, pair)
        if cut:
            for state in ("down", "up"):
                for name, _ in namespaces:
                    link = f"mw{os.getpid() % 10**6}{name[-1]}"
                    subprocess.run(["ip", "-n", name, "link", "set", link, state], check=True)
                time.sleep(10)
        results.append(result_of(pair[0]))
        assert steps(out) == list(range(1, 601))
        assert "failure" not in kinds(out)
        assert "host_lost" not in kinds(out)
    for key in ("parameters_sha256", "samples_sha256", "final_loss"):
        assert results[0][key] == results[1][key]


CLIENT = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from meshwright.comm.store import AuthenticatedStore
host, port = sys.argv[1], int(sys.argv[2])
makers = [
    lambda: AuthenticatedStore(f"{host}:{port}", b"0" * 32, connect_s=5, answer_s=1),
    lambda: dist.TCPStore(host, port, None, False, timedelta(seconds=1), wait_for_workers=False),
]
for make in makers:
    try:
        store = make()
        for key in store.list_keys():
            store.set(key, "0")
        print("opened")
    except dist.DistError:  # torch's store finds no answer of its protocol in what the server says first
        print("refused")
"""
"""Speaks to a run's store as torch's does, and as a rank does without the secret."""


@pytest.mark.full
def test_a_third_host_that_speaks_to_the_store_changes_nothing(
    tmp_path: Path, namespaces: list[tuple[str, str]], launchers: list[Launcher]
) -> None:
    """It has a link to the first host alone, and no file of the run."""
    out, last = tmp_path / "run", ("--train.steps", "200", "--train.batch_tokens", "512")
    (first, address), _ = namespaces
    third, links = f"{first}-third", [f"mwt{os.getpid() % 10**6}{end}" for end in "ab"]
    for words in (
        f"netns add {third}",
        f"link add {links[0]} netns {first} type veth peer name {links[1]} netns {third}",
        f"-n {first} addr add 10.78.0.1/24 dev {links[0]}",
        f"-n {first} link set {links[0]} up",
        f"-n {third} addr add 10.78.0.2/24 dev {links[1]}",
        f"-n {third} link set {links[1]} up",
        f"-n {third} route add 10.77.0.0/24 via 10.78.0.1",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    try:
        launchers += [
            Launcher(out, place, name, *last, "--checkpoint.every", "20") for name, place in namespaces
        ]
        wait(lambda: len(steps(out)) >= 5, PATIENCE_S, launchers)
        port = json.loads((out / "hosts" / "generation-0.json").read_text())["port"]
        command = [sys.executable, "-c", CLIENT, address, str(port)]
        spoken = subprocess.run(
            ["ip", "netns", "exec", third, *command], capture_output=True, text=True, check=True, timeout=120
        )
        assert spoken.stdout.split() == ["refused", "refused"], spoken.stdout
        result = result_of(launchers[0])
    finally:
        subprocess.run(["ip", "netns", "del", third], check=False)
    assert "10.78.0.2 connected to the store" in launchers[0].log.read_text()
    assert steps(out) == list(range(1, 201)) and "failure" not in kinds(out)
    for found in list_checkpoints(out / "checkpoints"):
        assert not found.problem and not verify_checkpoint(out / "checkpoints", found.step).problems
    assert (out / "hosts" / "secret").stat().st_mode & 0o777 == 0o600
    assert_as_alone(result, tmp_path / "alone", *last)
