"""Kernels in C++ are compiled once, and where they cannot be torch's operators compute."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.launch.world import groups_of
from meshwright.model import attention_cpu_kernel, cpu_kernels, elementwise_cpu
from meshwright.model.attention_cpu import blocked_attention
from meshwright.model.norm import RmsNorm
from meshwright.spec.load import load


def sanitizer() -> str | None:
    """The library of g++'s address sanitizer."""
    if cpu_kernels.library() is None:
        return None
    asked = ["g++", "-print-file-name=libasan.so"]
    found = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    return str(found) if found.is_absolute() else None


ASAN = sanitizer()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """A process that has not looked for kernels yet."""
    known = cpu_kernels.library, attention_cpu_kernel._works
    for each in known:
        each.cache_clear()
    yield
    for each in known:
        each.cache_clear()


def computed() -> list[Tensor]:
    """A norm and attention, in fp32."""
    x = torch.randn(2, 70, 4, 8, generator=torch.Generator().manual_seed(0))
    norm = RmsNorm(8, 1e-5)
    torch.nn.init.ones_(norm.weight)
    return [norm(x).detach(), blocked_attention(x, x, x, None)]


@pytest.mark.skipif(cpu_kernels.library() is None, reason="it needs g++, Linux and a processor with AVX2")
@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-compiler", "No such file.*no-compiler"), ("g++ -fno-such", "-fno-such")]
)
def test_who_has_no_compiler_is_told_once(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = computed()
    assert cpu_kernels.library() is not None
    cpu_kernels.library.cache_clear(), attention_cpu_kernel._works.cache_clear()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match=f"{reason}.*install g\\+\\+.*{cpu_kernels.SWITCH}=1") as told:
        results = [computed() for _ in range(2)]
    assert len(told) == 1 and cpu_kernels.library() is None
    for found in results:
        torch.testing.assert_close(found, expected)


def test_a_compiler_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    late = subprocess.TimeoutExpired("g++", 600, stderr=b"error")
    with (
        patch.object(cpu_kernels, "cpu_info", lambda _: "avx2 fma"),
        patch.object(subprocess, "run", side_effect=late),
        pytest.warns(UserWarning, match="timed out after 600 seconds; install"),
    ):
        assert cpu_kernels.library() is None


@pytest.mark.parametrize(("compute", "calls"), [("fp32", 1), ("bf16", 1), ("fp64", 0)])
def test_runs_compile_before_their_first_step(compute: str, calls: int) -> None:
    """In a step the watch for hangs would see a rank that waits for the compiler."""
    spec = load(None, [("model.preset", "tiny"), ("precision.compute", compute)])
    with patch.object(cpu_kernels, "library") as compiled, groups_of(spec):
        assert compiled.call_count == calls


def test_the_switch_takes_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_kernels.SWITCH, "1")
    x = torch.ones(2, 8, 4, 8)
    with warnings.catch_warnings(action="error"):
        assert not elementwise_cpu.takes(x) and not attention_cpu_kernel.takes(x, x, x, None)
    assert len(computed()) == 2


@pytest.mark.full
@pytest.mark.skipif(ASAN is None, reason="it needs g++ with its address sanitizer, and AVX2")
@pytest.mark.parametrize("options", [[], ["-DPLAIN_PRODUCTS"]], ids=["oneDNN", "loops"])
def test_sanitizers_find_nothing(options: list[str]) -> None:
    program = [sys.executable, str(Path(__file__).with_name("sanitised_kernels.py")), *options]
    environment = os.environ | {"LD_PRELOAD": str(ASAN), "ASAN_OPTIONS": "detect_leaks=0"}
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0 and ended.stdout == "36 calls\n", ended.stderr[-3000:]


def test_one_of_several_processes_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    find_output = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'
    compiler.write_text(f"#!/bin/sh\nsleep 0.2\necho call >> {calls}\n{find_output}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    folder = tmp_path / "kernels"
    threads = [threading.Thread(target=cpu_kernels.build, args=(folder,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cpu_kernels.build(folder).read_text() == "made\n" and calls.read_text() == "call\n"
    for info, count in (("another processor", 2), ("a third one", 3)):
        monkeypatch.setattr(cpu_kernels, "cpu_info", lambda _, info=info: info)
        assert cpu_kernels.build(folder).exists() and calls.read_text() == "call\n" * count
