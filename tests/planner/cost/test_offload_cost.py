"""Moments in the host's memory: the bytes that they save, and the seconds of their way over the link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import api
from meshwright.hardware.find import cluster
from meshwright.planner.activations import activations
from meshwright.planner.cost.software import MESHWRIGHT
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.memory.host import host_bytes
from meshwright.planner.memory.states import moment_bytes, units
from meshwright.planner.plan import estimate
from meshwright.planner.rank_view import place_of
from meshwright.planner.search.infeasible import shortfall
from meshwright.planner.search.problem import SearchProblem
from meshwright.report.plan_text import offload
from meshwright.spec import RunSpec, UserError


def spec_of(**train: object) -> RunSpec:
    tree = {
        "model": {"preset": "base"},
        "train": {"batch_tokens": 8 * 4096, **train},
        "data": {"seq_len": 1024},
        "layout": {"dp": 8, "zero": 1},
        "precision": {"compute": "bf16"},
    }
    return RunSpec.model_validate(tree)


@pytest.mark.parametrize(("kind", "link"), [("adamw", 2), ("lion", 1)])
@pytest.mark.parametrize("name", ["a100", "h100"])
def test_a_step_waits_for_the_link_and_the_device_holds_less(name: str, kind: str, link: int) -> None:
    devices = cluster(name, 8)
    usual, away = (
        estimate(spec_of(optimiser=kind, offload=offload), devices) for offload in ("none", "host")
    )
    speed = devices.device.host_link
    assert speed == {"a100": 32e9, "h100": 64e9}[name]
    spec = away.spec
    view = place_of(spec, 0)
    size = moment_bytes(view, units(view))
    staged = 3 * link * 4 * min(2**24, max(unit.part for unit in units(view)))
    assert usual.memory.optimiser - away.memory.optimiser == pytest.approx(
        size - staged, abs=1000
    )  # AdamW's counts
    found = away.offloaded
    assert found is not None and usual.offloaded is None
    assert found["bytes"] == size and found["node_bytes"] == 8 * size
    assert found["seconds"] == pytest.approx(link * 4 * spec.model.parameters / 8 / speed, rel=1e-3)
    assert found["seconds_on_device"] == usual.parts["optimiser"] < found["seconds"]
    assert "moments in the host's memory" in offload(away) and offload(usual) == ""


@pytest.mark.parametrize(
    ("where", "kind", "says"),
    [
        ("h100", "disk", "train.offload: 'disk' cannot be planned for H100"),
        ("cpu", "host", "train.offload: 'host' has no effect on"),
        ("tpu-v5p", "host", "train.offload: 'host' cannot be planned for tpu-v5p"),
    ],
)
def test_what_has_no_known_cost_is_refused(where: str, kind: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        api.plan(spec_of(offload=kind), where, gpus=8)
    with pytest.raises(UserError, match=says):
        estimate(spec_of(offload=kind), cluster(where, 8))


def test_the_search_finds_what_fits_with_offloaded_moments() -> None:
    wish = {"gpus": 4, "batch_tokens": "1M", "seq_len": 2048}
    with pytest.raises(UserError, match="nothing fits"):
        api.plan("llama3-8b", "rtx-4090", **wish)
    found = api.plan("llama3-8b", "rtx-4090", overrides=[("train.offload", "host")], **wish)
    assert found.best.offloaded is not None and found.best.fits(found.capacity)


def activations_away(link: float) -> tuple[Candidate, Candidate]:
    """A run with activations on the devices, and in the hosts' memory over a link of `link` bytes/s."""
    devices = cluster("h100", 8)
    devices = replace(devices, device=replace(devices.device, host_link=link))
    usual, away = spec_of(), spec_of(offload_activations="host")
    return estimate(usual, devices), estimate(away, devices)


def test_a_step_waits_for_copies_that_take_longer_than_blocks() -> None:
    """A slow link sets the pace of each block, both ways; a fast one costs nothing."""
    link = 1e8
    usual, away = activations_away(link)
    kept = activations(away.spec)
    copies = away.spec.model.layers * away.spec.microbatches * max(kept.moved) / link
    assert away.parts["activation offload"] == pytest.approx(2 * copies, rel=0.05)
    assert away.seconds == pytest.approx(usual.seconds + away.parts["activation offload"], rel=1e-6)
    usual, away = activations_away(1e15)
    assert away.seconds == usual.seconds and away.parts["activation offload"] == 0
    assert away.memory.activations < usual.memory.activations
    found = away.offloaded_activations
    assert found is not None and usual.offloaded_activations is None
    assert found["bytes"] == sum(kept.moved) and found["node_bytes"] == 8 * sum(kept.moved)
    assert "activations in the host's memory" in offload(away) and offload(usual) == ""


@pytest.mark.parametrize(
    ("where", "stack", "says"),
    [
        ("cpu", "meshwright", "train.offload_activations: 'host' has no effect on"),
        ("tpu-v5p", "meshwright", "train.offload_activations: 'host' cannot be planned for tpu-v5p"),
        ("h100", "megatron-lm", "train.offload_activations: 'host' is of this program"),
    ],
)
def test_activation_offload_without_known_cost_is_refused(where: str, stack: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        api.plan(spec_of(offload_activations="host"), where, gpus=8, stack=stack)


def test_the_search_finds_what_fits_with_offloaded_activations() -> None:
    """Without recomputation, longer sequences fit."""
    wish = {"gpus": 8, "batch_tokens": "1M", "seq_len": 32768, "max_stages": 1}
    fixed = [("recompute.policy", "none"), ("layout.tp", "1"), ("layout.cp", "1"), ("layout.pp", "1")]
    with pytest.raises(UserError, match="nothing fits"):
        api.plan("llama3-8b", "h100", overrides=fixed, **wish)
    found = api.plan("llama3-8b", "h100", overrides=[*fixed, ("train.offload_activations", "host")], **wish)
    assert found.best.offloaded_activations is not None and found.best.fits(found.capacity)


def test_a_plan_that_its_hosts_have_no_memory_for_is_not_offered() -> None:
    """With less than the fastest takes another one is, and with hardly any none."""
    known, keys = cluster("rtx-4090", 8), {"pp": 1, "cp": 1, "tp": 1, "policy": "none"}

    def with_host(size: float | None) -> SearchProblem:
        device = replace(known.device, host_memory=size)
        return SearchProblem(spec_of(offload="host"), replace(known, device=device), MESHWRIGHT, keys)

    (free,) = with_host(None).search(1).best
    most = host_bytes(free.spec, 8) / 8 / 0.9
    assert with_host(1.01 * most).search(1).best[0].spec == free.spec
    assert all(
        host_bytes(each.spec, 8) / 8 <= 0.8 * 0.9 * most for each in with_host(0.8 * most).search(5).best
    )
    none = with_host(1000.0)
    assert not none.search(1).best
    said = shortfall(none)
    assert said.startswith("train.offload: the layouts that fit 8 x RTX 4090 24 GB need more memory of their")
