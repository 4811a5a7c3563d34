"""A run that sizes no axis gets a layout that is planned for the machine, and one line of why."""

from __future__ import annotations

import pytest

from meshwright.hardware.find import cluster
from meshwright.planner.plan import Plans
from meshwright.planner.search.request import PlanRequest
from meshwright.rank.auto_layout import check_room, planned, present
from meshwright.spec import UserError
from meshwright.spec.load import from_tree

TREE = {"data": {"seq_len": 64, "corpus": "synthetic"}, "train": {"batch_tokens": 4096}}


def test_ranks_get_a_layout_and_a_reason() -> None:
    spec, why = planned(TREE, nproc=2, on="cpu")
    assert spec.layout.world_size == 2
    assert why is not None and "\n" not in why
    assert spec.layout.describe() in why and "s a step" in why
    alone = from_tree(TREE)
    assert spec.data == alone.data and spec.train == alone.train and spec.model == alone.model


def test_a_layout_that_is_given_is_kept() -> None:
    spec, why = planned({**TREE, "layout": {"dp": 2, "zero": 3}}, on="cpu")
    assert why is None and (spec.layout.dp, spec.layout.zero) == (2, 3)
    spec, why = planned(TREE, [("layout.tp", "2")])
    assert why is None and spec.layout.tp == 2


def test_what_is_said_of_a_layout_stays() -> None:
    spec, why = planned({**TREE, "layout": {"zero": 1}}, [("layout.micro_batch", "2")], nproc=4, on="cpu")
    assert why is not None and spec.layout.world_size == 4
    assert (spec.layout.zero, spec.layout.micro_batch) == (1, 2)


def test_recomputation_that_is_given_stays() -> None:
    spec, _ = planned({**TREE, "recompute": {"policy": "full"}}, nproc=2, on="cpu")
    assert spec.recompute.policy == "full"


def test_the_cluster_decides() -> None:
    near, _ = planned(TREE, nproc=8, on="h100-sxm")
    assert near.layout.world_size == 8
    with pytest.raises(UserError, match="did you mean"):
        planned(TREE, nproc=2, on="h100-sx")


def test_no_layout_for_a_number_of_ranks_is_a_sentence() -> None:
    with pytest.raises(UserError, match="no layout"):
        planned({**TREE, "train": {"batch_tokens": 64}}, nproc=37, on="cpu")


def test_the_present_host_is_planned_for_by_its_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """And any power of two of them, or all."""
    monkeypatch.setattr("meshwright.host.cores", lambda: 12)
    monkeypatch.setattr("meshwright.profile.machine.gpus", lambda: 0)
    host = present()
    assert host.device.units == 12 and host.count == 12
    assert host.device.peak["fp32"] == pytest.approx(6 * cluster("cpu").device.peak["fp32"])
    planned_for: list[int] = []

    def seen(request: PlanRequest) -> Plans:
        assert isinstance(request.gpus, int)
        planned_for.append(request.gpus)
        raise UserError("none fits")

    monkeypatch.setattr("meshwright.rank.auto_layout.plan", seen)
    monkeypatch.setattr("meshwright.rank.auto_layout.count_devices", lambda: 12)
    with pytest.raises(UserError, match="none fits"):
        planned(TREE)
    assert planned_for == [1, 2, 4, 8, 12]


def test_ranks_that_do_not_fit_on_this_host_together_are_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshwright.profile.machine.gpus", lambda: 0)
    check_room(from_tree(TREE))
    large = from_tree({**TREE, "model": {"preset": "llama3-405b"}, "layout": {"tp": 8, "pp": 2}})
    with pytest.raises(
        UserError, match=r"layout: 16 ranks .* 405\.9B parameters need .* TB together, but this"
    ):
        check_room(large)
