"""Strangers on the ports of a run: whatever they send, the run ends as it would have without them.

They know the protocols, too: of torch's store, and of the run's own, whose secret they lack.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.checkpoint.inspect import list_checkpoints, verify_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks for the ports in /proc")

LISTENS = "0A"
LINGER_0 = struct.pack("ii", 1, 0)  # close by a reset


def command(out: Path, steps: int, layout: str = "--layout.dp 2") -> list[str]:
    words = (
        "--model.preset tiny --model.layers 1 --model.vocab_size 300 --data.corpus synthetic "
        f"--data.seq_len 16 --train.batch_tokens 32 --train.eval_tokens 64 --checkpoint.every 50 {layout}"
    )
    return [sys.executable, "-m", "meshwright", "train", *words.split(), "--train.steps", str(steps),
            "--out", str(out)]  # fmt: skip


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def listening(pids: list[int]) -> dict[int, str]:
    """Port -> address, as /proc writes it, of each TCP socket on which one of the processes listens."""
    sockets = {
        os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
    }
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            address, port = local.split(":")
            if state == LISTENS and f"socket:[{inode}]" in sockets:
                found[int(port, 16)] = address
    return found


def is_loopback(address: str) -> bool:
    """True for 127.x.x.x, as IPv4 or within IPv6, and ::1: /proc writes words of 32 bits in host order."""
    *rest, last = (address[start : start + 8] for start in range(0, len(address), 8))
    packed = struct.pack("=I", int(last, 16))
    return packed[0] == 127 or "".join(rest) + packed.hex() == "0" * 31 + "1"


def strangers(port: int, count: int, draw: random.Random) -> list[socket.socket]:
    """Connect `count` times and send junk; return the connections that are left open."""
    left = []
    for number in range(count):
        stranger = socket.socket()
        stranger.settimeout(0.1)
        try:
            stranger.connect(("127.0.0.1", port))
            junk = (
                b"",
                draw.randbytes(draw.randrange(1, 4096)),
                b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                b"\xff" * 64,  # a length of 2^64 - 1
                b"\x00" * 64,
                b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
            )[number % 6]
            stranger.sendall(junk)
        except OSError:  # the process refuses it, which is its right
            stranger.close()
            continue
        if number % 4 == 0:
            left.append(stranger)
            continue
        if number % 4 == 1:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
        stranger.close()
    return left


@pytest.mark.full
@pytest.mark.parametrize(("count", "steps"), [(20, 150), (200, 1_000)], ids=["20", "200"])
def test_strangers_on_every_port_change_nothing(count: int, steps: int, tmp_path: Path) -> None:
    undisturbed = subprocess.Popen(
        command(tmp_path / "twin", steps), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    run = subprocess.Popen(
        command(tmp_path / "run", steps), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    told = next((line for line in run.stdout if line.startswith("step ")), None)
    assert told is not None, run.communicate()[1]
    ports = listening([run.pid, *descendants(run.pid)])
    assert ports and all(map(is_loopback, ports.values())), ports
    draw = random.Random(0)
    left = [open_one for port in ports for open_one in strangers(port, count, draw)]
    assert left and run.poll() is None
    assert next(line for line in run.stdout if line.startswith("step "))
    _, err = run.communicate(timeout=280)
    for open_one in left:
        open_one.close()
    assert run.returncode == 0, err
    _, err = undisturbed.communicate(timeout=280)
    assert undisturbed.returncode == 0, err
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "twin")]
    for key in ("parameters_sha256", "samples_sha256", "steps"):
        assert results[0][key] == results[1][key]


CLIENT = """
import encodings.idna, os, sys, time
from datetime import timedelta
import torch.distributed as dist
from meshwright.comm.store import AuthenticatedStore
if os.geteuid() == 0:  # another user, who cannot read what is imported above
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
refused, end = 0, time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    for endpoint in sys.argv[2:]:
        host, _, port = endpoint.rpartition(":")
        makers = [lambda: AuthenticatedStore(endpoint, b"0" * 32, connect_s=1, answer_s=1)]
        if host:
            short = timedelta(seconds=0.5)
            makers.append(lambda: dist.TCPStore(host, int(port), None, False, short, wait_for_workers=False))
        for make in makers:
            try:
                store = make()
                for key in store.list_keys():
                    store.set(key, "0")
                    store.delete_key(key)
            except (dist.DistError, PermissionError) as error:
                refused += 1
    time.sleep(0.1)
print(refused)
"""
"""Speaks to each endpoint as torch's store does, and as the run's does without its secret."""


def torment(endpoints: list[str], seconds: float) -> int:
    """Let another user speak to the endpoints as a rank would; returns how often it was refused."""
    words = [sys.executable, "-c", CLIENT, str(seconds), *endpoints]
    found = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    return int(found.stdout)


def endpoints_of(run: subprocess.Popen[str]) -> list[str]:
    """The ports on which processes of a run listen, and its Unix sockets."""
    pids = [run.pid, *descendants(run.pid)]
    ports = listening(pids)
    assert all(map(is_loopback, ports.values())), ports
    inodes = {
        os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
    }
    rows = [line.split() for line in Path(f"/proc/{run.pid}/net/unix").read_text().splitlines()[1:]]
    paths = {row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in inodes and row[7][0] == "/"}
    return [*(f"127.0.0.1:{port}" for port in ports), *sorted(paths)]


@pytest.mark.parametrize(
    "islands",
    [pytest.param(False, id="two ranks"), pytest.param(True, id="two islands", marks=pytest.mark.full)],
)
def test_who_speaks_the_stores_protocol_without_the_secret_changes_nothing(
    islands: bool, tmp_path: Path
) -> None:
    quorum = "--layout.replicate 2 --outer.every 10 --outer.quorum 2 --outer.grace_seconds 20"
    layout = quorum if islands else "--layout.dp 2"
    results = []
    for name, tormented in (("run", True), ("twin", False)):
        out = tmp_path / name
        run = subprocess.Popen(
            command(out, 150, layout), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if tormented:
            begun = out / ("islands/entry-00000001.json" if islands else "metrics.jsonl")
            end = time.monotonic() + 120
            while not (begun.exists() and begun.stat().st_size) and time.monotonic() < end:
                assert run.poll() is None
                time.sleep(0.05)
            endpoints = endpoints_of(run)
            assert endpoints and torment(endpoints, 3.0) >= len(endpoints)
        _, err = run.communicate(timeout=280)
        assert run.returncode == 0, err
        results.append(json.loads((out / "result.json").read_text()))
        directory = out / "checkpoints"
        for found in list_checkpoints(directory):
            assert not found.problem and not verify_checkpoint(directory, found.step).problems
    assert results[0]["parameters_sha256"] == results[1]["parameters_sha256"]
