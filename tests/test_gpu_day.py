"""`make gpu-day`: its parts run on a faked GPU, what fails or hangs takes nothing else with it, and its fake
traces are those of today's step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_day import commands, differences, gpu_tests, profiles, traces
from gpu_day.page import page, table
from gpu_day.parts import parts_of
from gpu_day.results import DONE, FAILED, Result, Task, Work
from gpu_day.verify_layouts import EIGHT, ONE_RANK, words_of
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.spec import load

ROOT = Path(__file__).resolve().parents[1]
faked = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)
NEEDS_A_GPU = {"driver", "NCCL", "nvidia-smi"}
"""Facts of a machine that a faked GPU has not."""


def rehearse(out: Path, *words: str) -> dict[str, Result]:
    """The results of a rehearsal, by part."""
    command = [sys.executable, "-m", "gpu_day", "--device", "fake", "--out", str(out), *words]
    ran = subprocess.run(command, env=commands.environment(), cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return {each.stem: Result.read(each) for each in sorted(out.glob("*.json"))}


def unexpected(result: Result) -> list[dict[str, Any]]:
    """The rows with errors that a machine without a GPU does not explain."""
    rows = [row for row in result.rows if "error" in row]
    packages = ("varlen FA3", "varlen FA4")
    return [row for row in rows if row.get("fact") not in NEEDS_A_GPU and row.get("backend") not in packages]


# Rehearsals ---------------------------------------------------------------------------------------------


@pytest.mark.full  # the next test rehearses a step, and `test_rows_are_on_disk_as_they_come` what is left
@faked
def test_kernels_are_rehearsed_on_a_faked_gpu(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "--parts", "attention", "products")
    assert [*found] == ["attention", "machine", "products"]
    assert all(each.state == DONE and each.nominal and not unexpected(each) for each in found.values())
    rates = [row for row in found["attention"].rows if "error" not in row]
    assert {row["backend"] for row in rates} == {
        "SDPA flash", "SDPA cuDNN", "SDPA efficient, kv heads repeated", "varlen FA2",
    }  # fmt: skip
    assert len(found["products"].rows) == 8 * 2 * 5
    shown = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "mean nothing" in shown and "| nvfp4, scales of 16 | 8b | down |" in shown
    rehearse(tmp_path, "--parts", "products")
    again = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "| attention | done |" in again  # a part that is not done again keeps its results


def small_step(out: str, compiled: bool, gpus: int) -> None:
    """The part of a step with a small model, in a process with a faked GPU."""
    from gpu_day import steps

    steps.MODELS["1b"], steps.SEQ_LEN = "tiny", 128
    options = {"model": "1b", "compute": "bf16", "compiled": compiled}
    steps.run(Work(Task("step", "steps", options, "fake", gpus, 100.0, out, gpus)))


@faked
@pytest.mark.parametrize(("compiled", "gpus"), [(False, 1), (True, 8)])
def test_a_step_is_rehearsed_on_a_faked_gpu(tmp_path: Path, compiled: bool, gpus: int) -> None:
    file = tmp_path / "step.json"
    with FakeCudaProcess() as process:
        process.call(small_step, str(file), compiled, gpus)
    result = Result.read(file)
    (row,) = result.rows
    assert "error" not in row and result.nominal
    assert row["steps"] == 1 and row["layers"] == 1 and row["peak_memory_bytes"] > 2**20
    operators = row["operators"]
    # Those of compiled blocks are in this program's operators, which have the name of the trace.
    products = [each["count"] for name, each in operators.items() if "aten::mm" in name or "matmul" in name]
    assert sum(products) > 10, sorted(operators)
    assert ("messages" in operators) == (gpus > 1)
    assert row["kernels_a_step"] == sum(each["kernels"] for each in operators.values())
    shown = page([result], "make gpu-day", "2026-12-01")
    assert f"### 1b, bf16, {'compiled' if compiled else 'eager'}" in shown and "| aten::mm |" in shown


@faked
@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_whole_day_is_rehearsed(tmp_path: Path) -> None:
    found = rehearse(tmp_path)
    parts = parts_of(1)
    assert {*found} == {part.name for part in parts}
    for each in found.values():
        assert each.state == DONE and not each.left_out and not unexpected(each), each.part
    tests = {row["file"]: row["collected"] for row in found["tests"].rows}
    assert {*tests} == {file.name for file in gpu_tests.FOLDER.glob("test_*.py")} and min(tests.values()) > 0
    assert all(row["races"] == 0 < row["launches"] for row in found["verify"].rows)
    shown = (tmp_path / "index.md").read_text(encoding="utf-8")
    # Products in fp8 are within one operator of a compiled block, into which a faked device does not look.
    for field in ("count", "seconds"):
        none = f"differences of {field} from the fake trace, with the rates of h100-sxm: none"
        assert shown.count(none) == 6


@faked
@pytest.mark.full
def test_a_step_of_eight_ranks_is_rehearsed(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "--gpus", "8", "--parts", "step-1b-bf16-eager", "verify")
    (row,) = found["step-1b-bf16-eager"].rows
    assert row["gpus"] == 8 and row["operators"]["messages"]["count"] > 5
    assert differences.largest(differences.differences(row, "h100-sxm"), "count") == []
    assert {each["layout"] for each in found["verify"].rows} > {*EIGHT}
    assert not any(unexpected(each) for each in found.values())


@faked
def test_a_machine_without_a_gpu_is_told(tmp_path: Path) -> None:
    command = commands.python("-m", "gpu_day", "--out", str(tmp_path))
    ran = subprocess.run(command, env=commands.environment(), cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and not ran.stdout and not [*tmp_path.iterdir()]
    assert ran.stderr.strip().endswith("or give --device fake") and "\n" not in ran.stderr.strip()


# Parts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minutes", [10, 30])
@pytest.mark.parametrize("gpus", [1, 8])
def test_limits_leave_each_part_a_chance(gpus: int, minutes: int) -> None:
    parts = parts_of(gpus)
    assert parts[0].kind == "machine" and len({part.name for part in parts}) == len(parts)
    limits = [part.seconds(minutes) for part in parts]
    assert all(0 < limit < 600 for limit in limits)
    before_fp8 = sum(limits[: len(limits) - 4])
    assert before_fp8 <= 1.1 * 60 * minutes if minutes == 10 else sum(limits) < 1.5 * 60 * minutes


@pytest.mark.parametrize("name", [*ONE_RANK, *EIGHT])
def test_layouts_are_runs_of_as_many_ranks(name: str) -> None:
    flags = (ONE_RANK | EIGHT)[name]
    words = words_of(flags)
    pairs = [(word[2:], words[at + 1]) for at, word in enumerate(words) if "." in word]
    assert load(None, pairs).layout.world_size == (8 if name in EIGHT else 1)


def work_of(tmp_path: Path, seconds: float = 100.0) -> Work:
    return Work(Task("p", "k", {}, "cuda", 1, seconds, str(tmp_path / "p.json")))


def test_rows_are_on_disk_as_they_come(tmp_path: Path) -> None:
    work = work_of(tmp_path)
    work.attempt({"name": "good"}, lambda: {"value": 1})

    def fails() -> dict[str, Any]:
        raise ValueError("a first line\nand more")

    work.attempt({"name": "bad"}, fails)
    work.leave_out("the rest")
    found = Result.read(tmp_path / "p.json")
    assert found.state == "running" and found.rows[0] == {"name": "good", "value": 1}
    assert found.rows[1] == {"name": "bad", "error": "ValueError: a first line"}
    assert found.left_out == [{"what": "the rest", "why": "no time was left"}]


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(99)\n"
    )
    log, began = tmp_path / "log", time.monotonic()
    code = commands.run_limited(commands.python("-c", program), 3, log, dict(os.environ), own_group=True)
    assert code is None and time.monotonic() - began < 30
    number = int(log.read_text())
    for _ in range(100):
        state = Path(f"/proc/{number}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child goes on")


def test_outcomes_of_tests_survive_one_that_hangs(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import time, pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'one is not two'\n"
        "@pytest.mark.skip(reason='no GPU')\n"
        "def test_skipped(): pass\n"
        "def test_hangs(): time.sleep(99)\n"
        "def test_after(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    before, gpu_tests.TEST_SECONDS = gpu_tests.TEST_SECONDS, 3
    try:
        (row,) = gpu_tests.outcomes(work_of(tmp_path), [file], "some")
    finally:
        gpu_tests.TEST_SECONDS = before
    assert {key: row[key] for key in ("collected", "passed", "failed", "skipped", "not_run")} == {
        "collected": 5, "passed": 1, "failed": 1, "skipped": 1, "not_run": 2,
    }  # fmt: skip
    (failure,) = row["failures"]
    assert failure["test"] == "test_bad" and "one is not two" in failure["why"]
    assert "Timeout" in (tmp_path / "some.log").read_text()


# Kernels of profiles ------------------------------------------------------------------------------------


def test_kernels_belong_to_the_outermost_operator_that_a_trace_knows() -> None:
    x = torch.randn(8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        x.to(torch.float64)
        x @ x
    events = profiler.events()
    copy = next(each for each in events if each.name == "aten::copy_")
    product = next(each for each in events if each.name == "aten::mm")
    for event, name, duration in ((copy, "cast", 3.0), (product, "gemm", 5.0), (product, "split-k", 1.0)):
        event.append_kernel(name, 0, duration)
    span = SimpleNamespace(start=0.0, end=7.0)
    message = SimpleNamespace(device_type="DeviceType.CUDA", name="ncclDevKernel", time_range=span)
    linked = SimpleNamespace(
        device_type="DeviceType.CUDA", name="gemm", time_range=SimpleNamespace(start=1.0, end=6.0)
    )
    calls = profiles.kernel_calls([*events, message, linked], {"aten::_to_copy", "aten::mm"})
    by_operator = profiles.operators(calls, 1)
    assert by_operator == {
        "aten::_to_copy": {"count": 1, "kernels": 1, "seconds": 3e-6},
        "aten::mm": {"count": 1, "kernels": 2, "seconds": 6e-6},
        "messages": {"count": 1, "kernels": 1, "seconds": 7e-6},
    }
    (longest, *_) = profiles.longest(calls, 5)
    assert longest["kernel"] == "ncclDevKernel" and longest["seconds"] == 7e-6


# Fake traces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["count", "seconds"])
def test_the_largest_differences_are_told(field: str) -> None:
    layers = 3
    wanted = traces.expected("1b", "bf16", 1, layers, "h200")
    assert wanted is not None and wanted["aten::mm"]["flops"] > 1e12
    own = {name: {key: round(each[key], 9) for key in ("count", "seconds")} for name, each in wanted.items()}
    row = {"model": "1b", "compute": "bf16", "gpus": 1, "layers": layers, "compiled": False, "operators": own}
    rows = differences.differences(row, "h200")
    assert differences.largest(rows, field) == []
    own["aten::mm"]["count"] += 7
    own["aten::mm"]["seconds"] += 0.5
    del own["aten::_fused_adamw_"]
    own["aten::new"] = {"count": 2.0, "seconds": 0.25}
    found = differences.largest(differences.differences(row, "h200"), field)
    assert {each["operator"] for each in found} == {"aten::mm", "aten::_fused_adamw_", "aten::new"}
    assert found[0]["operator"] == "aten::mm"
    compiled = differences.differences(row | {"compiled": True}, "h200")
    assert {each["operator"] for each in compiled} >= {"aten::mm", "all others"}
    assert sum(each["seconds"] for each in compiled) == pytest.approx(
        sum(each["seconds"] for each in own.values())
    )


@pytest.mark.parametrize(
    ("cluster", "capability", "nearest"),
    [
        ("h200", (9, 0), "h200"),
        ("h800", (9, 0), "h100-sxm"),
        (None, (10, 0), "b200"),
        (None, (8, 0), "h100-sxm"),
    ],
)
def test_rates_are_those_of_the_nearest_gpu(
    cluster: str | None, capability: tuple[int, int], nearest: str
) -> None:
    assert traces.nearest(cluster, capability) == nearest


@faked
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.full) for case in traces.CASES],
    ids=lambda case: traces.key_of(*case),
)
@pytest.mark.timeout(900)
def test_traces_are_those_of_todays_step(case: tuple[str, str, int]) -> None:
    """`make gpu-day-traces` records them anew after a change of what a step launches."""
    with FakeCudaProcess() as process:
        found = process.call(traces.record, [case])
    (own,) = found["cases"].values()
    kept = traces.kept()["cases"][traces.key_of(*case)]
    assert json.loads(json.dumps(own)) == kept


# The page -----------------------------------------------------------------------------------------------


def test_the_page_tells_what_failed_and_what_was_left_out() -> None:
    machine = Result("machine", "machine", DONE, rows=[{"fact": "GPU", "value": "NVIDIA H200"}])
    broken = Result("attention", "attention", FAILED, "exit code 1\nRuntimeError: no | kernel")
    broken.left_out.append({"what": "FA2, 8b", "why": "no time was left"})
    shown = page([machine, broken], "make gpu-day", "2026-12-01")
    assert "| GPU | NVIDIA H200 |" in shown and "mean nothing" not in shown
    assert "| attention | failed | 0 | RuntimeError: no \\| kernel |" in shown
    assert "| attention | FA2, 8b | no time was left |" in shown
    assert "```text\nexit code 1" in shown


def test_an_error_stands_in_the_last_column_of_its_row() -> None:
    rows = [{"a": 1234567, "b": True}, {"a": 0.123456, "error": "no kernel"}]
    assert table(rows, ("a", "b", "remark"))[2:] == ["| 1,234,567 | yes |  |", "| 0.1235 |  | no kernel |"]
