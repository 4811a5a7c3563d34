"""The groups that run gloo under NCCL's rules do: what hangs on NCCL hangs there, and what runs is right."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.spec import Layout
from nccl_rules import BACKEND, Exchange, InOrderGroup
from ranks import RANKS, Ranks

ALL = Layout(dp=RANKS)
LONG = 60.0
"""Seconds that nothing here waits on a busy machine."""
FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def new_group(backend: str, ranks: list[int], seconds: float) -> Any:
    """A group for one test, so that a hang leaves nothing behind."""
    return dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=seconds))


def crossing(_mesh: Mesh, backend: str, batched: bool, limit: float) -> str | None:
    """Two ranks each post a receive before the send that the other one waits for; the error, if one came."""
    group = new_group(backend, [0, 1], limit)
    if (rank := dist.get_rank()) > 1:
        return None
    received, sent = torch.zeros(3), torch.full((3,), rank + 1.0)
    operations = [(dist.irecv, received), (dist.isend, sent)]
    try:
        if batched:
            works = dist.batch_isend_irecv(
                [dist.P2POp(op, tensor, group=group, group_peer=1 - rank) for op, tensor in operations]
            )
        else:
            works = [
                dist.irecv(received, group=group, group_src=1 - rank),
                dist.isend(sent, group=group, group_dst=1 - rank),
            ]
        for work in works:
            work.wait()
    except TimeoutError as error:
        return str(error)
    assert received.tolist() == [2.0 - rank] * 3
    return None


def test_a_crossing_pair_hangs_where_order_is_kept_and_not_on_gloo(ranks: Ranks) -> None:
    found = ranks.run(ALL, crossing, BACKEND, False, 1.0)
    for rank in (0, 1):
        assert "is not done after 1 s" in found[rank]
        assert f"receive of 3 from {1 - rank}, then send of 3 to {1 - rank}" in found[rank]
    assert ranks.run(ALL, crossing, "gloo", False, LONG) == [None] * RANKS
    assert ranks.run(ALL, crossing, BACKEND, True, LONG) == [None] * RANKS


def mismatched(_mesh: Mesh, case: str) -> str | None:
    group = new_group(BACKEND, [0, 1], LONG)
    if (rank := dist.get_rank()) > 1:
        return None
    x = torch.zeros(4 + (rank if case != "names" else 0), dtype=torch.float64)
    try:
        if case == "rows":
            sent = [1, 1] if rank == 0 else [3, 2]
            received = torch.empty(3, dtype=x.dtype)
            dist.all_to_all_single(received, x[: sum(sent)], [1, 2], sent, group=group)
        elif case == "names" and rank:
            dist.broadcast(x, group=group, group_src=0)
        else:
            dist.all_reduce(x, group=group)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("sizes", ("rank 0 issues all_reduce", "of 4 float64", "of 5 float64")),
        ("names", ("rank 0 issues all_reduce", "rank 1 issues broadcast from 0")),
        ("rows", ("rank 0 expects [1, 2] rows, gets [1, 3]",)),
    ],
)
def test_collectives_that_do_not_fit_are_named(ranks: Ranks, case: str, words: tuple[str, ...]) -> None:
    found = ranks.run(ALL, mismatched, case)
    assert all(word in " ".join(filter(None, found)) for word in words)


def order(_mesh: Mesh) -> dict[str, Any] | None:
    """A send before its receive is posted, and a collective behind it on the same group and on another."""
    group, other = new_group(BACKEND, [0, 1], LONG), new_group(BACKEND, [0, 1], LONG)
    if (rank := dist.get_rank()) > 1:
        return None
    x, y, z = torch.ones(2), torch.ones(2), torch.ones(2)
    if rank == 1:
        dist.all_reduce(z, group=other)
        dist.barrier(other)  # until the other rank has looked
        dist.recv(x, group=group, group_src=0)
        dist.all_reduce(y, group=group)
        return None
    sent = dist.isend(x, group=group, group_dst=1)
    reduced = dist.all_reduce(y, group=group, async_op=True)
    dist.all_reduce(z, group=other)
    time.sleep(0.1)
    early = sent.is_completed(), reduced.is_completed(), group.waiting()
    dist.barrier(other)
    reduced.wait()
    return {"early": early, "late": (sent.is_completed(), y.tolist(), z.tolist())}


def test_a_send_waits_for_its_receive_and_what_is_behind_it_too(ranks: Ranks) -> None:
    found = ranks.run(ALL, order)[0]
    sent, reduced, waiting = found["early"]
    assert not sent and not reduced and [name.split()[0] for name in waiting] == ["send", "all_reduce"]
    assert found["late"] == (True, [2.0, 2.0], [2.0, 2.0])


def everything(mesh: Mesh, name: str) -> dict[str, list[Any]]:
    """Results of each collective of `collectives.py`, and of DTensors, on the shard axis of four."""
    axis, form = mesh.shard, getattr(torch, name)
    own = (torch.arange(8) + 10 * axis.rank).to(form)
    found: dict[str, Any] = {}
    whole, part = torch.zeros(32, dtype=form), torch.zeros(2, dtype=form)
    collectives.start_all_gather(whole, own, axis).wait()
    collectives.start_reduce_scatter(part, own.clone(), axis).wait()
    summed, turned, shifted = own.clone(), torch.zeros_like(own), torch.zeros_like(own)
    collectives.start_all_reduce(summed, axis).wait()
    collectives.start_all_to_all(turned, own, axis).wait()
    collectives.start_shift(shifted, own, axis).wait()
    rows = [[1, 2, 0, 1], [0, 1, 3, 0], [2, 0, 0, 2], [1, 1, 1, 1]]
    taken = [row[axis.rank] for row in rows]
    uneven = torch.zeros(sum(taken), 2, dtype=form)
    sent = torch.stack([own, own + 1], 1)[: sum(rows[axis.rank])]
    collectives.start_all_to_all(uneven, sent, axis, taken, rows[axis.rank]).wait()
    root = own.clone()
    dist.broadcast(root, group=axis.group, group_src=2)
    device_mesh = DeviceMesh.from_group(axis.group, "cpu")
    full = DTensor.from_local(own, device_mesh, [Shard(0)], run_check=False).full_tensor()
    tensors = whole, part, summed, turned, shifted, uneven, root, full
    found["values"] = [tensor.double().flatten().tolist() for tensor in tensors]
    found["scalars"] = collectives.sum_scalars([1.5, axis.rank], axis)
    found["rows"] = collectives.gather_rows(own.view(2, 4), axis).double().flatten().tolist()
    found["kind"] = isinstance(axis.group, InOrderGroup)
    return found


def too_large_to_show(mesh: Mesh, name: str) -> dict[str, list[Any]]:
    """The results of `everything` where gloo carries all, as no tensor fits the ranks' shared memory."""
    with patch.object(Exchange, "SLOT_BYTES", 0):
        return everything(mesh, name)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_collectives_give_what_gloo_gives(ranks: Ranks, form: torch.dtype) -> None:
    name = str(form).removeprefix("torch.")
    plain = ranks.run(Layout(dp=4), everything, name)
    assert not any(theirs.pop("kind") for theirs in plain)
    for function in (everything, too_large_to_show):
        ordered = ranks.run(Layout(dp=4), function, name, rules="nccl")
        assert all(ours.pop("kind") for ours in ordered)
        assert ordered == plain


def lanes(mesh: Mesh) -> tuple[int, int, bool]:
    """The numbers of lanes, of their groups and of their (group, tag) pairs; is one the pipeline's own?"""
    over = list(mesh.lanes.values())
    groups = {id(axis.group) for axis, _ in over}
    pairs = {(id(axis.group), tag) for axis, tag in over}
    assert len(pairs) == len(over)
    return len(over), len(groups), id(mesh.pipeline.group) in groups


@pytest.mark.parametrize(("schedule", "pp", "count"), [("1f1b", 2, 2), ("zb-v", 4, 8), ("bfs", 3, 6)])
def test_lanes_have_groups_of_their_own_where_order_is_kept(
    ranks: Ranks, schedule: str, pp: int, count: int
) -> None:
    layout = Layout.model_validate({"pp": pp, "schedule": schedule, "virtual": 2 if count > 2 else 1})
    assert ranks.run(layout, lanes) == [(count, 1, True)] * pp
    assert ranks.run(layout, lanes, rules="nccl") == [(count, count, False)] * pp
    assert ranks.run(Layout(dp=2), lanes, rules="nccl") == [(0, 0, False)] * 2
