"""Choices besides the layout that would make a plan better: estimates beside those of the changed runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.explain.alternatives import WORTH, alternatives
from meshwright.planner.explain.candidate import Candidate
from meshwright.spec import RunSpec


def candidate(where: str, layout: dict[str, Any], sequences: int = 64, **more: Any) -> Candidate:
    tree = {
        "model": {"preset": "llama3-8b"},
        "data": {"seq_len": 8192},
        "train": {"batch_tokens": sequences * 8192},
        "precision": {"compute": "bf16"},
        "layout": {"zero": 3, **layout},
        **more,
    }
    spec = RunSpec.model_validate(tree)
    return Candidate(spec, CostModel(cluster(where, spec.layout.world_size)))


def test_a_recomputation_that_was_given_and_costs_much_is_told() -> None:
    best = candidate("h200", {"dp": 8}, recompute={"policy": "full"})
    plain = candidate("h200", {"dp": 8})
    gain = best.seconds / plain.seconds - 1
    assert gain > WORTH
    (said,) = (each for each in alternatives(best, 141e9, True) if "recompute" in each)
    assert said == f"With --recompute.policy none the first would be {gain:.1%} faster."
    assert not any("recompute" in each for each in alternatives(best, 141e9, False))
    tight = alternatives(best, best.memory.device, True)  # what keeps more does not fit
    assert not any("policy none" in each for each in tight)


def of_precision(best: Candidate) -> list[str]:
    return [each for each in alternatives(best, 141e9, False) if "--precision.compute" in each]


def test_another_precision_is_told_where_the_device_has_it_and_it_gains() -> None:
    best, low = candidate("h200", {"dp": 8}), candidate("h200", {"dp": 8}, precision={"compute": "fp8"})
    gain = best.seconds / low.seconds - 1
    assert gain > WORTH
    (said,) = of_precision(best)
    assert said == f"In fp8 (--precision.compute fp8) the first would be {gain:.1%} faster."
    assert not of_precision(candidate("a100", {"dp": 8})) and not of_precision(low)


def test_low_precision_that_is_slower_is_said() -> None:
    low = candidate("h200", {"dp": 8}, precision={"compute": "fp8"})
    device = low.cluster.device
    slow = replace(device, peak={**device.peak, "fp8": device.peak["bf16"] / 3})
    worse = Candidate(low.spec, CostModel(replace(low.cluster, device=slow)))
    (said,) = of_precision(worse)
    assert said.startswith("In bf16 (--precision.compute bf16) the first would be ")
    assert said.endswith("% faster: fp8 is slower here.")


def test_a_slow_network_asks_for_islands_and_fewer_devices() -> None:
    short = {"data": {"seq_len": 4096}, "recompute": {"policy": "full"}}
    slow = candidate("rtx-4090", {"dp": 32, "zero": 2}, sequences=16, **short)
    said = " ".join(alternatives(slow, 1e12, False))
    assert "Islands (--islands auto)" in said and "On 16 devices each would do" in said
    share = slow.parts["data axis"] / slow.seconds
    assert f"{share:.1%} of a step" in said
    near = candidate("h100", {"dp": 8})
    assert not any("Islands" in each or "devices" in each for each in alternatives(near, 80e9, False))
