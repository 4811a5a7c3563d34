"""Faults between hosts that `meshwright doctor` names; hosts are network namespaces on one switch."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from examined import Host, in_namespace, is_root, library, namespaces, sentences, together

from meshwright.hardware.cluster import Cluster, Device, Level, Link
from meshwright.hardware.hardware_file import write

pytestmark = pytest.mark.skipif(not is_root(), reason="network namespaces are made by root")

AN_HOUR_ON = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 3600;
    return failed;
}
"""
SLOW = ("tbf", "rate", "40mbit", "burst", "64kb", "latency", "400ms")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[tuple[str, str]]]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are made with the command ip")
    try:
        with namespaces(3) as made:
            yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")


def entered(hosts: list[tuple[str, str]], *others: Host) -> list[Host]:
    """A host in each namespace, the last ones with what `others` have besides."""
    plain = [Host()] * (len(hosts) - len(others)) + list(others)
    return [
        Host([*in_namespace(name), *host.enter], host.words, host.environment)
        for (name, _), host in zip(hosts, plain, strict=True)
    ]


@pytest.mark.full  # `test_a_group_is_compared_with_the_others_of_its_axis` has links that are slow
def test_clean_hosts_have_no_findings_and_a_slow_link_is_named(
    hosts: list[tuple[str, str]], tmp_path: Path
) -> None:
    words = ["--out", str(tmp_path / "run")]
    found = together(words, entered(hosts), hosts[0][1])
    assert sentences(found) == [] and found["code"] == 0
    assert found["hosts"] == 3 and len(found["measured"]["links"]) == 3 and found["seconds"] < 30
    slow = ["ip", "netns", "exec", hosts[1][0], "tc", "qdisc"]
    subprocess.run([*slow, "add", "dev", "eth0", "root", *SLOW], check=True)
    try:
        found = together(words, entered(hosts), hosts[0][1])
    finally:
        subprocess.run([*slow, "del", "dev", "eth0", "root"], check=True)
    (line,) = sentences(found)
    assert line.startswith("links [1, 2]: the link from rank 1 on ") and " to rank 2 on " in line
    assert (found["code"] == 0 and "MB/s were expected" in line) or "GB/s were expected" in line
    assert list(tmp_path.iterdir()) == []


def test_two_hosts_are_compared_with_the_hardware_file(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    device = Device("a processor", {"fp32": 1e11}, 1 << 34, 1e10, 1 << 24, 2, "this test", kind="cpu")
    levels = (
        Level("host", 1, Link(1e-6, 1e10), kind="memory"),
        Level("network", 2, Link(1e-4, 1e9), kind="ethernet"),
    )
    file = tmp_path / "hardware.json"
    write(Cluster("two hosts", device, 2, levels, None, "this test"), file)
    subprocess.run(
        ["ip", "netns", "exec", hosts[1][0], "tc", "qdisc", "add", "dev", "eth0", "root", *SLOW], check=True
    )
    try:
        words = ["--out", str(tmp_path / "run"), "--cluster", str(file)]
        found = together(words, entered(hosts[:2]), hosts[0][1])
    finally:
        subprocess.run(
            ["ip", "netns", "exec", hosts[1][0], "tc", "qdisc", "del", "dev", "eth0", "root"], check=True
        )
    group, link = sentences(found)
    assert group.startswith(
        "collectives [0, 1]: an all-reduce of 4.19 MB over the shard axis, all 2 ranks, takes"
    )
    assert link.startswith("links [0, 1]: the link from rank 1 on ")
    assert "where 785 MB/s were expected" in link  # 0.8 of 1 GB/s, after 100 us


def test_a_clock_that_is_an_hour_off(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    ahead = Host(environment=library(tmp_path, "clock", AN_HOUR_ON))
    found = together(["--out", str(tmp_path / "run")], entered(hosts[:2], ahead), hosts[0][1])
    (line,) = sentences(found)
    assert line.startswith("clocks [1]: the clock of ") and " is 3600 s ahead of that of others" in line
    assert found["code"] == 0 and "chronyc makestep" in found["findings"][0]["remedy"]


def test_a_folder_that_a_host_does_not_share(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    mount = f'mount -t tmpfs tmpfs {out}; exec "$@"'
    apart = Host(enter=("unshare", "--mount", "sh", "-c", mount, "sh"))
    found = together(["--out", str(out)], entered(hosts[:2], apart), hosts[0][1])
    (line,) = sentences(found)
    assert found["code"] == 1 and line.startswith("folder [1]: ")
    assert f" does not see in {out} what rank 0 on " in line
    assert list(out.iterdir()) == []


def test_a_lock_that_does_not_reach_the_other_host(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    """A host that asks a server of its own for locks keeps processes of its own apart."""
    own = """
    #include <errno.h>
    #include <sys/file.h>
    int flock(int descriptor, int operation) {
        static int held = 0, calls = 0;
        if (++calls == 2) { errno = EWOULDBLOCK; return -1; }  /* of the same host */
        held = descriptor;
        return 0;
    }
    """
    other = Host(environment=library(tmp_path, "locks", own))
    found = together(["--out", str(tmp_path / "run")], entered(hosts[:2], other), hosts[0][1])
    (line,) = sentences(found)
    assert found["code"] == 0 and line.startswith("folder [1]: a lock of rank 0 on ")
    assert "does not keep" in line


def test_a_firewall_between_hosts(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    """The port of the meeting is open, and those that the kernel chooses are not."""
    if shutil.which("iptables") is None:
        pytest.skip("a firewall is made with iptables")
    rule = ["INPUT", "-p", "tcp", "--syn", "-i", "eth0", "-j", "DROP"]
    inside = ["ip", "netns", "exec", hosts[1][0], "iptables"]
    subprocess.run([*inside, "-A", *rule], check=True)
    try:
        found = together(["--out", str(tmp_path / "run")], entered(hosts[:2]), hosts[0][1])
    finally:
        subprocess.run([*inside, "-D", *rule], check=True)
    (line,) = sentences(found)
    assert found["code"] == 1 and line.startswith("ports [0]: ")
    assert "does not reach rank 1 on " in line and f" at {hosts[1][1]}:" in line
    assert "net.ipv4.ip_local_port_range" in json.dumps(found["findings"])
