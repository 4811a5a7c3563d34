"""Limits of containers on memory, and kills for want of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.host import control_groups
from meshwright.profile import cgroup, machine
from meshwright.profile.cgroup import memory_limit, oom_kills
from meshwright.rank.auto_layout import check_room
from meshwright.spec import UserError
from meshwright.spec.load import from_tree

UNLIMITED = "9223372036854771712\n"


def tree(folder: Path, cgroups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Lay out /proc and /sys/fs/cgroup under `folder`."""
    proc, root = folder / "proc", folder / "cgroup"
    for path, text in {"proc/self/cgroup": cgroups, **{f"cgroup/{k}": v for k, v in files.items()}}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return proc, root


@pytest.mark.parametrize(
    ("cgroups", "files", "limit", "kills"),
    [
        ("0::/job/step\n", {"job/memory.max": "4096\n", "job/step/memory.max": "max\n"}, 4096, None),
        ("0::/job\n", {"job/memory.max": "4096\n", "memory.max": "1024\n"}, 1024, None),
        ("0::/\n", {"memory.max": "8192\n", "memory.events": "low 0\noom 3\noom_kill 2\n"}, 8192, 2),
        ("0::/job\n", {"job/memory.max": "max\n", "job/memory.events": "oom_kill 0\n"}, None, 0),
        (
            "5:cpu,cpuacct:/a\n4:memory:/docker/1\n0::/\n",
            {
                "memory/docker/1/memory.limit_in_bytes": "4096\n",
                "memory/memory.limit_in_bytes": UNLIMITED,
                "memory/docker/1/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
                "memory/memory.oom_control": "oom_kill 9\n",
            },
            4096,
            5,
        ),
        (
            "4:memory:/docker/1\n",
            {"memory/memory.limit_in_bytes": "4096\n"},
            4096,
            None,
        ),  # a container's view
        ("0::/../other\n", {"memory.max": "4096\n", "../other/memory.max": "1\n"}, 4096, None),
        ("", {}, None, None),
        ("nonsense\n", {"memory.max": "nonsense\n", "memory.events": "oom_kill\n"}, None, None),
    ],
)
def test_limits_and_kills_of_both_versions(
    tmp_path: Path, cgroups: str, files: dict[str, str], limit: int | None, kills: int | None
) -> None:
    proc, root = tree(tmp_path, cgroups, files)
    assert memory_limit(proc, root) == limit
    assert oom_kills(proc, root) == kills
    (proc / "vmstat").write_text("pgfault 1\noom_kill 7\n")
    assert oom_kills(proc, root) == (7 if kills is None else kills)


def test_a_container_has_no_more_memory_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, memory in {None: whole, 2**62: whole, 2**20: 2**20}.items():
        monkeypatch.setattr(cgroup, "memory_limit", lambda limit=limit: limit)
        assert machine.host_memory() == memory
    spec = from_tree({"data": {"seq_len": 64, "corpus": "synthetic"}, "train": {"batch_tokens": 4096}})
    monkeypatch.setattr("meshwright.profile.machine.gpus", lambda: 0)
    with pytest.raises(UserError, match=r"together, but this host or container has 1\.05 MB; "):
        check_room(spec)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A real control group of 32 MB below that of this process."""
    folders = [folder for folder in control_groups("memory") if folder.is_dir()]
    place = next((f for f in folders for name in cgroup._LIMITS if (f / name).is_file()), None)
    if place is None:
        pytest.skip("this process sees no memory control group")
    group = place / f"meshwright-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(
            f"control groups can only be made by root, and where they are writable ({error.strerror})"
        )
    try:
        limit = next((group / name for name in cgroup._LIMITS if (group / name).is_file()), None)
        if limit is None:
            pytest.skip("the control group above does not let its children limit memory")
        limit.write_text(str(2**25))
        yield group
    finally:
        group.rmdir()


def test_a_real_limit_and_a_real_kill_are_seen(small_group: Path) -> None:
    script = """
import os, sys, subprocess
from pathlib import Path
from meshwright.profile.cgroup import memory_limit, oom_kills
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
before = oom_kills()
grow = "import mmap; m = mmap.mmap(-1, 1 << 28); m.write(bytes(1 << 28))"
grown = subprocess.run([sys.executable, "-c", grow])
print(memory_limit(), grown.returncode, oom_kills() - before)
"""
    command = [sys.executable, "-S", "-c", script, str(small_group)]
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert ended.stdout.split() == [str(2**25), "-9", "1"], ended.stderr
