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
        assert best.precision.compute == compute and not best.train.compile
    for cluster, compute in (("h100-sxm", "bf16"), ("cpu", "fp32")):
        assert main(["explain", str(file), "--cluster", cluster]) == 0
        assert f"in {compute}" in capsys.readouterr().out
