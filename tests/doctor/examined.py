"""Examinations of this host, and of hosts that are network namespaces of it, with planted faults."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SMALL = [
    *("--model.preset", "tiny", "--model.layers", "1", "--model.hidden", "64", "--model.ffn", "64"),
    *("--model.vocab_size", "300", "--data.tokenizer", "byte", "--data.corpus", "synthetic"),
    *("--data.seq_len", "64", "--train.batch_tokens", "512", "--train.steps", "30"),
]
"""Flags of a run of a small model."""
LONGEST_S = 120.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Host:
    """A host of a world: what enters it, the words that it alone has, and its environment."""

    enter: Sequence[str] = ()
    words: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def start(
    words: Sequence[str], host: Host, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `meshwright doctor --json` in a host."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [*host.enter, sys.executable, "-m", "meshwright", "doctor", *words, *host.words, "--json"],
        env=os.environ | {"PYTHONPATH": path} | (environment or {}) | host.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> Result:
    """The result of an examination, with its exit code as `code`; of a rank that tells none, only this."""
    try:
        out, err = process.communicate(timeout=LONGEST_S)
    finally:
        process.kill()
    lines = out.splitlines()
    assert process.returncode == 0 or (process.returncode == 1 and lines), err
    return {"code": process.returncode} | (json.loads(lines[-1]) if lines else {})


def examined(*words: str, host: Host | None = None) -> Result:
    """Examine one host."""
    return ended(start(words, host or Host()))


def together(
    words: Sequence[str], hosts: Sequence[Host], master: str = "127.0.0.1", local: bool = False
) -> Result:
    """Examine hosts with a rank each, or with `local` one host with as many; return rank 0's result."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    size = str(len(hosts))
    world = {
        "MASTER_ADDR": master,
        "MASTER_PORT": port,
        "WORLD_SIZE": size,
        "MESHWRIGHT_SECRET": "of this test alone",
    }
    started = []
    for rank, host in enumerate(hosts):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank if local else 0),
            "LOCAL_WORLD_SIZE": size if local else "1",
        }
        started.append(start(words, host, world | place))
    try:
        first, *_ = [ended(each) for each in started]
        return first
    finally:
        for each in started:
            each.kill()


def sentences(result: Result) -> list[str]:
    """Each finding in a line: its check, its ranks, and its sentence."""
    return [f"{each['check']} {each['ranks']}: {each['sentence']}" for each in result["findings"]]


def is_root() -> bool:
    return os.geteuid() == 0


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system in memory at a folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def namespaces(count: int) -> Iterator[list[tuple[str, str]]]:
    """(namespace, address) of hosts on one switch, which is a bridge; their interface is eth0."""
    made = [f"mwdoctor-{os.getpid()}-{number}" for number in range(count)]
    bridge = f"mwd{os.getpid() % 10**6}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for number, name in enumerate(made):
            ip("netns", "add", name)
            ip("link", "add", f"{bridge}-{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{bridge}-{number}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield [(name, f"10.78.0.{number + 1}") for number, name in enumerate(made)]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def in_namespace(name: str) -> list[str]:
    """The command that enters a host of `namespaces`."""
    return ["ip", "netns", "exec", name]


def library(folder: Path, name: str, source: str) -> dict[str, str]:
    """The environment in which functions of the C library are those of `source`."""
    code, built = folder / f"{name}.c", folder / f"{name}.so"
    code.write_text(source, encoding="utf-8")
    compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(code), "-ldl"], check=True)
    return {"LD_PRELOAD": str(built)}
