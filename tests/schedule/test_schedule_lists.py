"""Every schedule for every small pipeline is one; what it asks of memory and links is as published."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.schedule import NAMES, Action, Kind, Schedule, ScheduleError, check, make, steps

VIRTUAL = {
    **dict.fromkeys(("gpipe", "1f1b", "zb-h1", "zb-h2"), (1,)),
    **dict.fromkeys(("interleaved", "bfs"), (1, 2, 3)),
    **dict.fromkeys(("zb-v", "v-half", "v-min", "dualpipe-v"), (2,)),
}
RANKS = range(1, 9)


def peaks(name: str, ranks: int, virtual: int, microbatches: int) -> tuple[int, ...]:
    return check(make(name, ranks, virtual, microbatches)).peak


def test_every_name_is_tried() -> None:
    assert set(VIRTUAL) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=() if ranks < 6 else pytest.mark.full) for ranks in RANKS]
)
def test_any_number_of_microbatches_makes_a_schedule(name: str, ranks: int) -> None:
    for virtual in VIRTUAL[name]:
        for microbatches in range(1, 4 * ranks + 1):
            report = check(make(name, ranks, virtual, microbatches))
            assert max(report.peak) <= virtual * microbatches


@given(st.sampled_from(NAMES), st.integers(9, 20), st.integers(1, 60), st.integers(1, 5))
def test_larger_pipelines_make_schedules_too(name: str, ranks: int, microbatches: int, virtual: int) -> None:
    check(make(name, ranks, virtual if name in ("interleaved", "bfs") else VIRTUAL[name][0], microbatches))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1", 2, 1, 4), ("layout.schedule", "'1f1'", "1f1b")),
        (("1f1b", 2, 2, 4), ("layout.virtual: 2", "'1f1b'", "layout.virtual = 1", "interleaved", "zb-v")),
        (("zb-v", 4, 1, 8), ("layout.virtual: 1", "'zb-v'", "layout.virtual = 2", "zb-h1")),
        (("zb-v", 4, 3, 8), ("layout.virtual: 3", "layout.virtual = 2", "interleaved, bfs")),
        (("interleaved", 4, 0, 8), ("layout.virtual: 0", "at least 1")),
        (("gpipe", 4, 1, 0), ("0 microbatches", "layout.micro_batch", "at least 1")),
        (("gpipe", 0, 1, 1), ("layout.pp is 0", "at least 1")),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_work(
    arguments: tuple[str, int, int, int], words: tuple[str, ...]
) -> None:
    with pytest.raises(ScheduleError) as raised:
        make(*arguments)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_few_microbatches_are_the_schedule_for_more_without_the_others(name: str) -> None:
    full, few = make(name, 4, 2, 7 if name == "zb-v" else 8), make(name, 4, 2, 3)
    for long, short in zip(full.actions, few.actions, strict=True):
        assert [action for action in long if action.microbatch < 3] == [*short]


# Peak activations, counted from the start of F to the end of W or B.


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("microbatches", [1, 3, 8, 32])
def test_peak_activations_by_rank(ranks: int, microbatches: int) -> None:
    assert peaks("gpipe", ranks, 1, microbatches) == (microbatches,) * ranks
    assert peaks("bfs", ranks, 3, microbatches) == (3 * microbatches,) * ranks
    assert peaks("1f1b", ranks, 1, microbatches) == tuple(min(microbatches, ranks - r) for r in range(ranks))
    assert peaks("zb-h1", ranks, 1, microbatches) == (min(microbatches, ranks),) * ranks
    assert peaks("zb-h2", ranks, 1, microbatches) == (min(microbatches, 2 * ranks - 1),) * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_peak_activations_of_interleaving(ranks: int, virtual: int) -> None:
    """p (v - 1) + 2 (p - r - 1) + 1 chunks (Narayanan et al. 2021: 1F1B's times 1 + (p - 1) / (p v))."""
    expected = tuple(ranks * (virtual - 1) + 2 * (ranks - rank - 1) + 1 for rank in range(ranks))
    assert peaks("interleaved", ranks, virtual, 4 * ranks) == expected


@pytest.mark.parametrize("ranks", [*RANKS, 13, 16, pytest.param(32, marks=pytest.mark.full)])
def test_peak_activations_in_a_v(ranks: int) -> None:
    """In chunks of half a rank's layers, of which 1F1B's rank 0 holds 2p; the same on every rank.

    V-Half and V-Min are as Qi et al. give them with their code: (p + 2) // 2 and (p + 4) // 3 in pairs of
    chunks.
    """
    m = 4 * ranks
    assert set(peaks("zb-v", ranks, 2, m)) == {2 * ranks}
    assert set(peaks("v-half", ranks, 2, m)) == {2 * ((ranks + 2) // 2)}
    assert set(peaks("v-min", ranks, 2, m)) == {2 * ((ranks + 4) // 3)}
    assert set(peaks("dualpipe-v", ranks, 2, m)) == {2 * ranks + 1}


# Messages follow from the lists.


def test_messages_of_a_small_v() -> None:
    """Two ranks: stages 0 and 3 on rank 0, 1 and 2 on rank 1; nothing is sent from stage 1 to 2 or back."""
    listed = steps(make("zb-v", 2, 2, 1))
    assert [(str(s.action), s.source, s.target) for s in listed[0]] == [
        ("F0.0", None, 1),
        ("F3.0", 1, None),
        ("I3.0", None, 1),
        ("W3.0", None, None),
        ("I0.0", 1, None),
        ("W0.0", None, None),
    ]
    assert [(str(s.action), s.source, s.target) for s in listed[1] if s.action.kind is not Kind.W] == [
        ("F1.0", 0, None),
        ("F2.0", None, 0),
        ("I2.0", 0, None),
        ("I1.0", None, 0),
    ]


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12))
def test_what_is_sent_is_received(name: str, ranks: int, microbatches: int) -> None:
    schedule = make(name, ranks, VIRTUAL[name][-1], microbatches)
    listed = steps(schedule)
    sent, received = [], []
    for rank, own in enumerate(listed):
        for (kind, stage, microbatch), source, target in own:
            forward = kind is Kind.F
            if target is not None:
                sent.append((rank, target, forward, stage + (1 if forward else -1), microbatch))
            if source is not None:
                received.append((source, rank, forward, stage, microbatch))
    assert sorted(sent) == sorted(received)
    assert len(sent) == len(set(sent)) == check(schedule).messages


@pytest.mark.parametrize(("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("zb-h2", 1), ("bfs", 3)])
def test_messages_of_looped_schedules(name: str, virtual: int) -> None:
    """One each way across each of the v p - 1 borders between stages, for each microbatch."""
    assert check(make(name, 4, virtual, 6)).messages == 2 * (virtual * 4 - 1) * 6


def test_messages_in_a_v_spare_the_turn() -> None:
    assert check(make("v-half", 4, 2, 6)).messages == 2 * (2 * 4 - 2) * 6


def test_only_all_forward_then_all_backward_runs_without_buffers() -> None:
    assert check(make("gpipe", 4, 1, 8)).unbuffered
    assert not check(make("1f1b", 4, 1, 8)).unbuffered


@given(st.sampled_from(NAMES), st.integers(1, 12), st.integers(1, 30))
def test_activations_and_gradients_each_keep_their_order(name: str, ranks: int, microbatches: int) -> None:
    assert check(make(name, ranks, VIRTUAL[name][-1], microbatches)).in_order_by_kind


def test_messages_of_single_stage_ranks_keep_their_order() -> None:
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        assert check(make(name, 4, 1, 9)).in_order
    assert not check(make("zb-v", 4, 2, 9)).in_order


# The checker.


def mutated(schedule: Schedule, rank: int, listed: list[Action]) -> Schedule:
    lists = [*schedule.actions]
    lists[rank] = tuple(listed)
    return Schedule(
        schedule.name,
        schedule.ranks,
        schedule.virtual,
        schedule.microbatches,
        schedule.rank_of,
        tuple(lists),
    )


names_and_places = (st.sampled_from(NAMES), st.integers(0, 10**6), st.integers(0, 10**6))


@given(*names_and_places)
def test_a_dropped_action_is_found(name: str, rank: int, at: int) -> None:
    schedule = make(name, 3, VIRTUAL[name][-1], 4)
    listed = [*schedule.actions[rank % 3]]
    del listed[at % len(listed)]
    with pytest.raises(ScheduleError):
        check(mutated(schedule, rank % 3, listed))


@given(*names_and_places)
def test_an_action_done_twice_is_found(name: str, rank: int, at: int) -> None:
    schedule = make(name, 3, VIRTUAL[name][-1], 4)
    listed = [*schedule.actions[rank % 3]]
    with pytest.raises(ScheduleError, match="each once"):
        check(mutated(schedule, rank % 3, [*listed, listed[at % len(listed)]]))


@given(*names_and_places)
def test_an_action_of_another_rank_is_found(name: str, rank: int, at: int) -> None:
    schedule = make(name, 3, VIRTUAL[name][-1], 4)
    other = schedule.actions[(rank + 1) % 3]
    listed = [other[at % len(other)], *schedule.actions[rank % 3]]
    with pytest.raises(ScheduleError, match="is on rank"):
        check(mutated(schedule, rank % 3, listed))


@given(*names_and_places)
def test_a_backward_before_its_forward_is_found(name: str, rank: int, at: int) -> None:
    schedule = make(name, 3, VIRTUAL[name][-1], 4)
    listed = [*schedule.actions[rank % 3]]
    later = [i for i, action in enumerate(listed) if action.kind is not Kind.F]
    listed.insert(0, listed.pop(later[at % len(later)]))
    with pytest.raises(ScheduleError, match="after nothing"):
        check(mutated(schedule, rank % 3, listed))


def test_a_weight_backward_before_its_input_backward_is_found() -> None:
    schedule = make("zb-h1", 2, 1, 2)
    listed = [action._replace(kind=_SWAPPED.get(action.kind, action.kind)) for action in schedule.actions[0]]
    with pytest.raises(ScheduleError, match=r"W0\.0 on rank 0 comes after F"):
        check(mutated(schedule, 0, listed))


_SWAPPED = {Kind.I: Kind.W, Kind.W: Kind.I}


def test_a_split_backward_beside_a_whole_one_is_found() -> None:
    schedule = make("1f1b", 2, 1, 2)
    with pytest.raises(ScheduleError, match="comes after F B"):
        check(mutated(schedule, 0, [*schedule.actions[0], Action(Kind.W, 0, 0)]))


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Rank 0 wants the gradient of microbatch 0 before it sends the second; rank 1 wants both first."""
    f, b = Kind.F, Kind.B
    lists = (
        (Action(f, 0, 0), Action(b, 0, 0), Action(f, 0, 1), Action(b, 0, 1)),
        (Action(f, 1, 0), Action(f, 1, 1), Action(b, 1, 0), Action(b, 1, 1)),
    )
    with pytest.raises(
        ScheduleError, match=r"rank 0 with B0\.0 for I or B of stage 1 on rank 1; rank 1 with F1\.1"
    ):
        check(Schedule("mine", 2, 1, 2, (0, 1), lists))


def test_a_wrong_placement_is_found() -> None:
    good = make("1f1b", 2, 1, 1)
    for bad, words in (
        (Schedule("x", 2, 1, 1, (0, 0), good.actions), "rank 0 has 2 stages"),
        (Schedule("x", 2, 1, 1, (0, 1, 7), good.actions), "3 stages"),
        (Schedule("x", 2, 1, 1, (0, 1), good.actions[:1]), "1 lists for 2 ranks"),
        (mutated(good, 0, [Action(Kind.F, 5, 0)]), "no such stage"),
    ):
        with pytest.raises(ScheduleError, match=words):
            check(bad)
