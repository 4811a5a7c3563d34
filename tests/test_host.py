"""The description of this host's processor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.host import cores, cpu_info

LISTED = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: A Xeon: 2.50GHz

processor\t: 1
model name\t: B
"""


def test_a_value_is_that_of_the_first_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_kwargs: LISTED)
    assert cpu_info("vendor_id") == "GenuineIntel"
    assert cpu_info("model name") == "A Xeon: 2.50GHz"
    assert cpu_info("microcode") == ""


def test_other_systems_describe_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_args: object, **_kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_info("vendor_id") == ""


@pytest.mark.parametrize(
    ("cgroups", "files", "worth"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/job/step\n", {"job/cpu.max": "300000 100000\n", "job/step/cpu.max": "max 100000\n"}, 3),
        ("0::/job/step\n", {"job/cpu.max": "300000 100000\n", "job/step/cpu.max": "50000 100000\n"}, 1),
        (
            "5:cpu,cpuacct:/a/b\n4:memory:/c\n0::/\n",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "400000\n",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        ("5:cpu:/a\n", {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ("5:cpuset:/a\n", {"cpuset/a/cpu.cfs_quota_us": "1\n", "cpuset/a/cpu.cfs_period_us": "1\n"}, 8),
        ("nonsense\n", {"cpu.max": "nonsense\n"}, 8),
        ("0::/\n", {"cpu.max": "100000 0\n"}, 8),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 8),
    ],
)
def test_quotas_of_all_levels_and_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroups: str, files: dict[str, str], worth: int
) -> None:
    for path, text in {"proc/self/cgroup": cgroups, **{f"cgroup/{k}": v for k, v in files.items()}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores(tmp_path / "proc", tmp_path / "cgroup") == worth
