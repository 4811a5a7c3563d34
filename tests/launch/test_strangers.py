"""Strangers on the ports of a run: whatever they send, the run ends as it would have without them."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks for the ports in /proc")

LISTENS = "0A"
LINGER_0 = struct.pack("ii", 1, 0)  # close by a reset


def command(out: Path, steps: int) -> list[str]:
    words = (
        "--model.preset tiny --model.layers 1 --model.vocab_size 300 --data.corpus synthetic "
        "--data.seq_len 16 --train.batch_tokens 32 --train.eval_tokens 64 --checkpoint.every 50 --layout.dp 2"
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
