"""Lower bounds on a schedule's seconds, against the seconds that it takes."""

from __future__ import annotations

import random

import pytest

from meshwright.hardware.find import cluster
from meshwright.planner.cost import lower_bounds
from meshwright.planner.cost.lower_bounds import rank_ends
from meshwright.planner.cost.model import CostModel
from meshwright.schedule import MOST_HELD, NAMES, Kind, StageCost, StageLink, ends, make
from meshwright.spec import RunSpec
from meshwright.spec.pipeline_schedules import SCHEDULES

VIRTUAL = {"interleaved": (1, 2, 3), "bfs": (1, 2)} | dict.fromkeys(
    ("zb-v", "v-half", "v-min", "dualpipe-v"), (2,)
)
SECONDS = (0.2, 1.0, 1.0, 1.7)


def drawn(choose: random.Random, stages: int) -> list[StageCost]:
    return [StageCost(*(choose.choice(SECONDS) for _ in range(3)), 0.0) for _ in range(stages)]


@pytest.mark.parametrize("name", NAMES)
def test_no_rank_is_done_before_its_bound(name: str) -> None:
    """Whatever stages and messages take; and a path that is known bounds its rank exactly."""
    choose = random.Random(name)
    for _ in range(60):
        ranks, virtual = choose.randint(1, 9), choose.choice(VIRTUAL.get(name, (1,)))
        count = choose.randint(1, 3 * ranks)
        made, costs = make(name, ranks, virtual, count), drawn(choose, ranks * virtual)
        own = [made.stages_of(rank) for rank in range(ranks)]
        hop = choose.choice((0.0, 0.3))
        done, path = ends(made, costs, StageLink(latency=hop))
        for known in ((), (path,)):
            least = rank_ends(costs, own, hop, name, count, known)
            assert all(bound <= end * (1 + 1e-12) for bound, end in zip(least, done, strict=True))
        assert least[path.rank] == pytest.approx(done[path.rank], rel=1e-12)


@pytest.mark.parametrize("name", MOST_HELD)
@pytest.mark.parametrize("ranks", [*range(1, 18), 48])
def test_no_rank_holds_more_than_bounds_take_it_to(name: str, ranks: int) -> None:
    for count in (1, ranks, 2 * ranks + 1):
        for listed in make(name, ranks, 2, count).actions:
            held = most = 0
            for action in listed:
                held += {Kind.F: 1, Kind.W: -1}.get(action.kind, 0)
                most = max(most, held)
            assert most <= MOST_HELD[name](ranks)


@pytest.mark.parametrize("name", MOST_HELD)
def test_what_holds_little_is_bounded_by_what_it_waits_for(name: str) -> None:
    """The middle of a V of equal stages waits for its first backward, but for forwards it may hold."""
    ranks, count = 16, 32
    assert SCHEDULES[name].splits
    own = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
    (*_, middle) = rank_ends([StageCost(1.0, 1.0, 1.0)] * 2 * ranks, own, 0.0, name, count)
    assert middle == 3 * ranks - 1 - MOST_HELD[name](ranks) + 6 * count


def test_a_floor_of_sequences_that_are_shared_is_below_every_way_to_share_them() -> None:
    """A rank has as many tokens of whole sequences, or parts of more, whose keys travel around a ring."""
    found = []
    for cp in (1, 2, 4):
        tree = {
            "model": {"preset": "llama3-8b"},
            "data": {"seq_len": 8192},
            "train": {"batch_tokens": 32 * 8192},
            "layout": {"dp": 8 // cp, "cp": cp, "micro_batch": cp},
            "precision": {"compute": "bf16"},
        }
        spec = RunSpec.model_validate(tree)
        costs = CostModel(cluster("h100", 8))
        floor = lower_bounds.SharedFloor(
            spec, "bf16", costs.stack, costs.kernels, costs.links, costs.dense(spec.model)
        )
        (kind,) = spec.model.kinds
        found.append((floor.seconds(kind).total, costs.blocks(spec).seconds(kind).total))
    floors, seconds = zip(*found, strict=True)
    assert max(floors) <= min(seconds) * (1 + 1e-12)
