"""The memory that is planned of LoRA, QLoRA and DoRA is that of a dry run on a faked GPU, on each axis."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from faked_gpu import dryrun_on
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.memory.exact import memory_model
from meshwright.spec import RunSpec, load

pytestmark = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)

MODELS = {
    "four blocks of 8B": {"model.preset": "llama3-8b", "model.layers": "4", "model.vocab_size": "16384"},
    "1B": {"model.preset": "llama3.2-1b"},
}
WAYS = {
    "lora": {"train.compile": "true"},
    "qlora": {"lora.quantise": "nf4", "train.compile": "false"},
    "dora": {"lora.dora": "true", "train.compile": "true"},
}
LAYOUTS = {
    "one device": {},
    "dp 2, ZeRO-3": {"layout.dp": "2", "layout.zero": "3"},
    "tp 2": {"layout.tp": "2"},
    "pp 2": {"layout.pp": "2"},
    "cp 2": {"layout.cp": "2"},
    "tp 2, pp 2": {"layout.tp": "2", "layout.pp": "2"},
}
QUICK = {("lora", "tp 2, pp 2"), ("qlora", "pp 2"), ("dora", "one device"), ("dora", "tp 2")}


def run(*given: dict[str, str]) -> RunSpec:
    keys = {"data.corpus": "synthetic", "data.seq_len": "4096", "train.batch_tokens": "32768"}
    keys |= {"layout.micro_batch": "1", "precision.compute": "bf16", "lora.rank": "16"}
    for each in given:
        keys |= each
    return load(None, [*keys.items()])


def off(process: FakeCudaProcess, spec: RunSpec) -> float:
    """Share by which the fullest rank is planned above its dry run."""
    told: dict[str, Any] = dryrun_on(process, spec, all_stages=spec.layout.pp > 1)
    planned = memory_model(CostModel(cluster("h100", spec.layout.world_size))).in_step(spec)
    most = max(each.allocated for each in planned)
    return float(most) / max(row["peak"] for row in told["ranks"]) - 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "way", "layout"),
    [
        pytest.param(*each, marks=() if each[0] != "1B" and each[1:] in QUICK else pytest.mark.full)
        for each in product(MODELS, WAYS, LAYOUTS)
    ],
)
def test_adapters_are_planned_to_two_percent_on_every_axis(
    process: FakeCudaProcess, model: str, way: str, layout: str
) -> None:
    spec = run(MODELS[model], WAYS[way], LAYOUTS[layout])
    assert off(process, spec) == pytest.approx(0, abs=0.02)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("way", "policy", "compiled"),
    [
        pytest.param(*each, marks=() if each == ("dora", "selective", "false") else pytest.mark.full)
        for each in product(("lora", "dora"), ("none", "selective", "full"), ("false", "true"))
    ],
)
def test_so_are_their_recomputed_blocks(
    process: FakeCudaProcess, way: str, policy: str, compiled: str
) -> None:
    keys = {"train.compile": compiled, "recompute.policy": policy, "model.layers": "2"}
    spec = run(MODELS["four blocks of 8B"], WAYS[way], keys)
    assert off(process, spec) == pytest.approx(0, abs=0.02)
