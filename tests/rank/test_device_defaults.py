"""Keys that a run leaves open, and what GPUs decide of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.cli.main import main
from meshwright.rank import device_defaults
from meshwright.rank.device_defaults import with_device_defaults

BF16 = ("precision.compute", "bf16")


@pytest.mark.parametrize(
    ("tree", "overrides", "bf16", "added"),
    [
        ({}, [], True, [BF16]),
        ({"precision": {"reduce": "bf16"}}, [("train.steps", "3")], True, [BF16]),
        ({"precision": {"compute": "fp16"}}, [], True, []),
        ({}, [("precision.compute", "fp32")], True, []),
        ({}, [], False, []),
    ],
)
def test_gpus_with_bf16_decide_a_key_that_is_open(
    tree: dict[str, Any], overrides: list[tuple[str, str]], bf16: bool, added: list[tuple[str, str]]
) -> None:
    assert with_device_defaults(tree, overrides, bf16) == [*overrides, *added]


def test_this_machine_is_asked_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_defaults, "has_bf16_gpu", lambda: True)
    assert with_device_defaults({}, []) == [BF16]
    monkeypatch.setattr(device_defaults, "has_bf16_gpu", lambda: False)
    assert with_device_defaults({}, []) == []


def test_a_run_file_is_planned_and_explained_in_what_the_cluster_computes_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[model]\npreset = 'small'\n[train]\nbatch_tokens = 65536\n[precision]\nreduce = 'fp32'\n"
    )
    assert api.plan(file, "h100-sxm", gpus=2, top=1).best.spec.precision.compute == "bf16"
    assert api.plan(file, "cpu", gpus=2, top=1).best.spec.precision.compute == "fp32"
    for cluster, compute in (("h100-sxm", "bf16"), ("cpu", "fp32")):
        assert main(["explain", str(file), "--cluster", cluster]) == 0
        assert f"in {compute}" in capsys.readouterr().out
