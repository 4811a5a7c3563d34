"""Keys that a run leaves open, and what GPUs decide of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.cli.main import main
from meshwright.hardware.cluster import DeviceKind
from meshwright.rank import device_defaults
from meshwright.rank.device_defaults import with_device_defaults
from meshwright.spec.pipeline_schedules import SCHEDULES

BF16, COMPILED = ("precision.compute", "bf16"), ("train.compile", "true")


@pytest.mark.parametrize(
    ("tree", "overrides", "kind", "added"),
    [
        ({}, [], "cuda", [BF16, COMPILED]),
        ({"precision": {"reduce": "bf16"}}, [("train.steps", "3")], "cuda", [BF16, COMPILED]),
        ({"precision": {"compute": "fp16"}}, [], "cuda", [COMPILED]),
        ({}, [("precision.compute", "fp32")], "cuda", [COMPILED]),
        ({}, [], "rocm", [BF16]),
        ({}, [], "cpu", []),
        # What is compiled only where nothing speaks against it.
        ({"train": {"compile": False}}, [], "cuda", [BF16]),
        ({}, [("train.compile", "false")], "cuda", [BF16]),
        ({"model": {"preset": "moe-tiny"}}, [], "cuda", [BF16]),
        ({}, [("precision.compute", "nvfp4")], "cuda", []),
        ({"lora": {"rank": 4, "dropout": 0.1}}, [], "cuda", [BF16]),
        ({"lora": {"rank": 4}}, [], "cuda", [BF16, COMPILED]),
        ({"layout": {"pp": 2}}, [], "cuda", [BF16, COMPILED]),
        ({"layout": {"pp": 2, "schedule": "zb-h1"}}, [], "cuda", [BF16]),
        ({}, [("layout.schedule", "zb-h2")], "cuda", [BF16]),
        ({}, [("train.steps", "none of these")], "cuda", [BF16]),  # which is told where the run is read
    ],
)
def test_devices_decide_keys_that_are_open(
    tree: dict[str, Any], overrides: list[tuple[str, str]], kind: DeviceKind, added: list[tuple[str, str]]
) -> None:
    assert with_device_defaults(tree, overrides, kind) == [*overrides, *added]


def test_this_machine_is_asked_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_defaults, "has_bf16_gpu", lambda: True)
    assert with_device_defaults({}, []) == [BF16]
    monkeypatch.setattr(device_defaults, "gpus", lambda: 1)
    monkeypatch.setattr(device_defaults, "has_bf16_gpu", lambda: False)
    assert with_device_defaults({}, []) == [COMPILED]
    monkeypatch.setattr(device_defaults, "find_spec", lambda _: None)  # Triton's
    assert with_device_defaults({}, []) == []


def test_a_run_file_is_planned_and_explained_in_what_the_cluster_computes_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[model]\npreset = 'small'\n[train]\nbatch_tokens = 65536\n[precision]\nreduce = 'fp32'\n"
    )
    for cluster, compute in (("h100-sxm", "bf16"), ("cpu", "fp32")):
        best = api.plan(file, cluster, gpus=2, top=1).best.spec
        assert best.precision.compute == compute
        assert best.train.compile == (cluster != "cpu")
    for cluster, compute in (("h100-sxm", "bf16"), ("cpu", "fp32")):
        assert main(["explain", str(file), "--cluster", cluster]) == 0
        shown = capsys.readouterr().out
        assert f"in {compute}" in shown
        assert ("blocks" in shown and "compiled, as a run" in shown) == (cluster != "cpu")


@pytest.mark.parametrize(
    ("model", "cluster", "more", "compiled"),
    [
        ("small", "h100-sxm", {}, True),
        ("small", "h100-sxm", {"stack": "megatron-core"}, False),
        ("small", "h100-sxm", {"overrides": [("train.compile", "false")]}, False),
        ("small", "h100-sxm", {"overrides": [("layout.schedule", "zb-h1"), ("layout.pp", "2")]}, False),
        ("small", "h100-sxm", {"overrides": [("layout.schedule", "interleaved"), ("layout.pp", "2")]}, True),
        ("small", "mi300x", {}, False),
        ("moe-tiny", "h100-sxm", {}, False),
    ],
)
def test_plans_are_of_the_blocks_that_runs_compile(
    model: str, cluster: str, more: dict[str, Any], compiled: bool
) -> None:
    best = api.plan(model, cluster, gpus=2, seq_len=512, batch_tokens=65536, top=1, **more).best
    assert best.spec.train.compile == compiled
    tree = {"model": {"preset": model}, "layout": {"schedule": best.spec.layout.schedule}}
    runs = ("train.compile", "true") in with_device_defaults(tree, [], best.cluster.device.kind)
    assert runs == compiled or more


def test_a_schedule_that_splits_backwards_is_planned_with_blocks_as_they_are() -> None:
    """Where its bubble costs more than what compiled blocks save; and the run does as the plan says."""
    wish: dict[str, Any] = {"gpus": 8, "seq_len": 4096, "batch_tokens": 4 * 4096, "top": 1}
    fixed = [("layout.pp", "8"), ("layout.micro_batch", "1"), ("recompute.policy", "none")]
    best = api.plan("llama2-7b", "h100", overrides=fixed, **wish).best
    compiled = api.plan("llama2-7b", "h100", overrides=[*fixed, ("train.compile", "true")], **wish).best
    assert compiled.spec.train.compile and best.step_seconds <= compiled.step_seconds
    assert SCHEDULES[best.spec.layout.schedule].splits and not best.spec.train.compile
    tree = {"layout": {"schedule": best.spec.layout.schedule}}
    assert with_device_defaults(tree, [], "cuda") == [BF16]
