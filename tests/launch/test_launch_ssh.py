"""Runs that `meshwright launch --on ssh` starts on two hosts with real servers of ssh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright import api
from meshwright.runs.record import read_metrics, read_run
from meshwright.runs.status import read_status
from meshwright.spec import UserError
from node_namespaces import BRIDGE, address, namespaces
from small_run_file import run_file

STEPS = 40
TRAINED_S = 240.0
"""Most time in which a run of so few steps is over, also beside other work."""
RUN = run_file(STEPS)
SERVER = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
ListenAddress {address}
PidFile {folder}/{host}.pid
StrictModes no
UsePAM no
PermitRootLogin yes
SetEnv PYTHONPATH={path} OMP_NUM_THREADS=1 PATH={programs}
"""
CLIENT = """
Host {host}
    HostName {address}
    IdentityFile {folder}/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""
HOSTS = ("a", "b")


def missing() -> str | None:
    """Why there can be no hosts with ssh here, or None; installs the server first where it can be."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which take root"
    if shutil.which("ip") is None or shutil.which("ssh") is None:
        return "there is no ip (iproute2), or no ssh, here"
    if shutil.which("sshd") is None and shutil.which("apt-get") is not None:
        install = ["apt-get", "install", "-y", "--no-install-recommends", "openssh-server"]
        subprocess.run(install, check=False, capture_output=True, stdin=subprocess.DEVNULL)
    return None if shutil.which("sshd") else "openssh-server is not installed, and could not be"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run file and a program `ssh` that knows both hosts, whose servers run."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    made = tmp_path_factory.mktemp("ssh")
    (made / "run.toml").write_text(RUN, encoding="utf-8")
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(made / "key")], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd drops its rights there
    client = ""
    with namespaces(HOSTS):
        for number, host in enumerate(HOSTS, start=1):
            told = {"folder": made, "host": host, "address": address(number)}
            programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            server = SERVER.format(path=":".join(filter(None, sys.path)), programs=programs, **told)
            (made / f"{host}.conf").write_text(server, encoding="utf-8")
            client += CLIENT.format(**told)
            named = 'hostname "$0" && exec "$1" -f "$2"'
            command = ["ip", "netns", "exec", f"{BRIDGE}-{host}", "unshare", "--uts", "sh", "-c", named, host]
            subprocess.run([*command, str(shutil.which("sshd")), str(made / f"{host}.conf")], check=True)
        (made / "client.conf").write_text(client, encoding="utf-8")
        (made / "bin").mkdir()
        program = made / "bin" / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {made}/client.conf "$@"\n')
        program.chmod(0o755)
        yield made
        for host in HOSTS:
            space = f"{BRIDGE}-{host}"
            found = subprocess.run(
                ["ip", "netns", "pids", space], check=False, capture_output=True, text=True
            )
            subprocess.run(["kill", "-9", *found.stdout.split()], check=False)


@pytest.fixture(autouse=True)
def client(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")


def test_a_run_on_two_hosts_is_followed_to_its_last_step(folder: Path) -> None:
    out, lines = folder / "two", list[str]()
    found = api.launch(folder / "run.toml", on="ssh", hosts=HOSTS, out=out, gpus_per_node=1, cpu=True)
    assert [each.split(":")[0] for each in found["ids"]] == [*HOSTS]
    assert api.follow(out, lines.append) == ["done"]
    assert read_status(out) == ("done", "")
    assert read_run(out).info["world_size"] == 2
    assert read_run(out).info["machine"]["hosts"] == 2
    assert any(f"step {STEPS}/{STEPS}" in line for line in lines)
    assert any(f"step {STEPS}/{STEPS}" in line for line in api.logs(out))


def test_a_run_is_stopped_on_all_hosts_after_it_has_saved(folder: Path) -> None:
    out = folder / "stopped"
    long = [("train.steps", "100000")]
    options = {"hosts": HOSTS, "out": out, "gpus_per_node": 1, "cpu": True}
    api.launch(folder / "run.toml", on="ssh", overrides=long, **options)
    limit = time.monotonic() + TRAINED_S
    while len(read_metrics(out)) < 20:
        assert time.monotonic() < limit, "\n".join(api.logs(out))
        time.sleep(0.1)
    assert [run["state"] for run in api.status(out)["runs"]] == ["running"]
    with pytest.raises(UserError, match="of ssh already, which is running; end it with meshwright stop"):
        api.launch(folder / "run.toml", on="ssh", **options)
    assert api.stop(out)["states"] == ["running"]
    while api.status(out)["runs"][0]["state"] == "running":
        assert time.monotonic() < limit
        time.sleep(0.1)
    assert (read_status(out) or ("",))[0] == "requeue"
    assert list((out / "checkpoints").glob("step-*"))


def test_a_host_that_is_not_reached_ends_those_that_were_started(folder: Path) -> None:
    out = folder / "unreached"
    with pytest.raises(UserError, match=r"ssh: `ssh .*nowhere .*ended with 255: .*[Cc]ould not resolve"):
        api.launch(folder / "run.toml", on="ssh", hosts=("a", "nowhere"), out=out, gpus_per_node=1, cpu=True)
    limit = time.monotonic() + TRAINED_S
    while runs(out):
        assert time.monotonic() < limit
        time.sleep(0.2)


def runs(out: Path) -> bool:
    """Return whether a process of the run in a folder runs anywhere on this machine."""
    commands = [file for file in Path("/proc").glob("[0-9]*/cmdline") if file.parent.name != str(os.getpid())]
    return any(str(out).encode() in _bytes(file) for file in commands)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
