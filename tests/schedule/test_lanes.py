"""Pipelines on communicators that keep their order, as NCCL's do: with lanes no schedule hangs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.schedule import (
    NAMES,
    Operation,
    PostedKind,
    Schedule,
    ScheduleError,
    check,
    forward_only,
    lane_rule,
    lanes_of,
    make,
    postings,
    replay,
    steps,
)
from meshwright.schedule.lanes import LaneOf
from meshwright.schedule.posting import proofs
from meshwright.spec import Layout

ONE_STAGE = ("gpipe", "1f1b", "zb-h1", "zb-h2")


def virtual(name: str) -> int:
    return 1 if name in ONE_STAGE else 2


def cases(name: str) -> list[Schedule]:
    return [make(name, p, virtual(name), m) for p in (2, 3, 4, 8) for m in (1, 2, p, 2 * p + 1, 4 * p)]


def hangs(schedule: Schedule, lane_of: LaneOf | None = None) -> bool:
    try:
        replay(schedule, lane_of)
    except ScheduleError as error:
        assert "wait for each other" in str(error)
        return True
    return False


def by_kind(gradients: bool, _sender: int, _receiver: int) -> Hashable:
    """One communicator for activations and one for gradients."""
    return gradients


@pytest.mark.parametrize("name", NAMES)
def test_a_communicator_for_each_kind_hangs_where_ranks_send_both_ways_and_lanes_do_not(name: str) -> None:
    expected = 0 if name in ONE_STAGE else 20
    assert sum(hangs(schedule, by_kind) for schedule in cases(name)) == expected
    assert not any(hangs(schedule) for schedule in cases(name))
    assert not any(hangs(forward_only(schedule)) for schedule in cases(name))


@given(st.sampled_from(NAMES), st.integers(2, 17), st.integers(1, 40))
def test_lanes_serve_any_pipeline(name: str, ranks: int, microbatches: int) -> None:
    schedule = make(name, ranks, virtual(name), microbatches)
    assert not hangs(schedule) and not hangs(forward_only(schedule))


def test_what_waits_is_named() -> None:
    with pytest.raises(ScheduleError) as raised:
        replay(make("zb-v", 2, 2, 2), by_kind)
    for words in ("zb-v", "rank 0", "rank 1", "receive for F3.0 from 1 on lane 'False'"):
        assert words in str(raised.value)


def test_check_replays_what_a_runtime_posts() -> None:
    """Two gradients taken in another order than they are sent: no list hangs, but a communicator does."""
    good = make("bfs", 2, 1, 2)
    assert check(good).in_order_by_kind
    first, second = good.actions
    swapped = replace(good, actions=(first, (*second[:-2], second[-1], second[-2])))
    with pytest.raises(
        ScheduleError, match=r"takes the result of B1\.\d of rank 1 for what its B0\.\d needs"
    ):
        check(swapped)


# Lanes.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9])
def test_a_rank_only_sends_or_only_receives_on_a_lane(name: str, ranks: int) -> None:
    schedule = make(name, ranks, virtual(name), 3)
    lane_of, used = lane_rule(ranks), set()
    does: dict[tuple[int, Hashable], set[str]] = {}
    for rank, row in enumerate(steps(schedule)):
        for action, source, target in row:
            gradients = action.kind.name != "F"
            if source is not None:
                does.setdefault((rank, lane_of(gradients, source, rank)), set()).add("receives")
            if target is not None:
                does.setdefault((rank, lane_of(gradients, rank, target)), set()).add("sends")
    used = {lane for _, lane in does}
    assert all(len(found) == 1 for found in does.values())
    assert used == set(lanes_of(schedule.rank_of))


@pytest.mark.parametrize(
    ("name", "virtual", "expected"),
    [
        ("1f1b", 1, {1: 0, 2: 2, 3: 4, 8: 4, 9: 4}),
        ("interleaved", 2, {2: 4, 3: 6, 8: 4, 9: 6}),
        ("interleaved", 3, {2: 4, 3: 6, 8: 4, 9: 6}),
        ("zb-v", 2, {2: 4, 3: 8, 8: 8, 9: 8}),
    ],
)
def test_the_number_of_lanes(name: str, virtual: int, expected: dict[int, int]) -> None:
    assert {p: len(lanes_of(make(name, p, virtual, 1).rank_of)) for p in expected} == expected


# Postings.


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12))
def test_a_posting_computes_the_list_and_posts_every_message(
    name: str, ranks: int, microbatches: int
) -> None:
    schedule = make(name, ranks, virtual(name), microbatches)
    for rank, (listed, row) in enumerate(zip(postings(schedule), steps(schedule), strict=True)):
        computed = [each.action for each in listed if each.verb is PostedKind.COMPUTE]
        assert computed == [*schedule.actions[rank]]
        received = [(each.action, each.peer) for each in listed if each.verb is PostedKind.RECEIVE]
        sent = [(each.action, each.peer) for each in listed if each.verb is PostedKind.SEND]
        assert received == [(step.action, step.source) for step in row if step.source is not None]
        assert sent == [(step.action, step.target) for step in row if step.target is not None]
        verbs = Counter(each.verb for each in listed)
        assert verbs[PostedKind.RECEIVED] == len(received) and verbs[PostedKind.SENT] == len(sent)


@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 9), st.data())
def test_an_exchanged_order_is_found(name: str, ranks: int, microbatches: int, data: st.DataObject) -> None:
    """Two operations of a rank, on one lane or of one action, posted in each other's place."""
    schedule = make(name, ranks, virtual(name), microbatches)
    rank = data.draw(st.integers(0, ranks - 1))
    listed, lane_of = [*postings(schedule)[rank]], lane_rule(ranks)

    def key(each: Operation) -> tuple[object, ...]:
        if each.peer < 0:
            return ("action", each.action)
        ends = (rank, each.peer) if each.verb is PostedKind.SEND else (each.peer, rank)
        return ("lane", lane_of(each.action.kind.name != "F", *ends))

    pairs = [
        (one, two)
        for one in range(len(listed))
        for two in range(one + 1, len(listed))
        if key(listed[one]) == key(listed[two]) or listed[one].action == listed[two].action
    ]
    one, two = data.draw(st.sampled_from(pairs))
    listed[one], listed[two] = listed[two], listed[one]
    posted = [*postings(schedule)]
    posted[rank] = tuple(listed)
    with pytest.raises(ScheduleError, match=r"takes the result|out of order|wait for each other"):
        replay(schedule, posted=posted)


@pytest.mark.parametrize("verb", [PostedKind.RECEIVE, PostedKind.SEND])
def test_a_missing_message_is_found(verb: PostedKind) -> None:
    schedule = make("1f1b", 3, 1, 2)
    posted = [*postings(schedule)]
    posted[1] = tuple(each for each in posted[1] if each.verb not in (verb, verb + 1))
    with pytest.raises(ScheduleError, match="wait for each other"):
        replay(schedule, posted=posted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 5), (4, 8), (5, 3)])
def test_a_send_has_arrived_where_a_receive_proves_it(name: str, pp: int, microbatches: int) -> None:
    schedule = make(name, pp, Layout.model_validate({"pp": pp, "schedule": name}).chunks, microbatches)
    listed, flow = steps(schedule), schedule.flow
    for rank, row in enumerate(listed):
        proven = proofs(flow, rank)
        first = flow.starts[rank]
        for at, sends in proven.items():
            for sent in sends:
                taker = row[sent].target
                assert taker is not None and row[at].source == taker and sent < at
                assert flow.target[first + sent] < flow.source[first + at]
        sends = [sent for found in proven.values() for sent in found]
        assert len(set(sends)) == len(sends)
