"""Where kernels in C++ cannot be compiled, torch's operators compute."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.cpp_library import SWITCH
from meshwright.kernels import attention_cpu_kernel, cpu_kernels, elementwise_cpu
from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.model.norm import RmsNorm
from meshwright.rank.world import groups_of
from meshwright.spec.load import load
from sanitizers import address_sanitizer, output


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
    with pytest.warns(UserWarning, match=f"{reason}.*install g\\+\\+.*{SWITCH}=1") as told:
        results = [computed() for _ in range(2)]
    assert len(told) == 1 and cpu_kernels.library() is None
    for found in results:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("compute", "calls"), [("fp32", 1), ("bf16", 1), ("fp64", 0)])
def test_runs_compile_before_their_first_step(compute: str, calls: int) -> None:
    """In a step the watch for hangs would see a rank that waits for the compiler."""
    spec = load(None, [("model.preset", "tiny"), ("precision.compute", compute)])
    with patch.object(cpu_kernels, "library") as compiled, groups_of(spec):
        assert compiled.call_count == calls


def test_the_switch_takes_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    x = torch.ones(2, 8, 4, 8)
    with warnings.catch_warnings(action="error"):
        assert not elementwise_cpu.takes(x) and not attention_cpu_kernel.takes(x, x, x, None)
    assert len(computed()) == 2


@pytest.mark.full
@pytest.mark.skipif(
    address_sanitizer() is None or cpu_kernels.library() is None,
    reason="it needs g++ with its address sanitizer, and AVX2",
)
@pytest.mark.parametrize("options", [[], ["-DPLAIN_PRODUCTS"]], ids=["oneDNN", "loops"])
def test_sanitizers_find_nothing(options: list[str]) -> None:
    assert output(Path(__file__).with_name("sanitised_kernels.py"), *options) == "42 calls\n"
