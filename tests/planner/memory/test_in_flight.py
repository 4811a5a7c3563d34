"""How many microbatches a rank of each schedule holds, and after how many it holds no more."""

from __future__ import annotations

import pytest

from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.memory.exact import memory_model, shortened
from meshwright.planner.memory.generic import Generic, held_microbatches
from meshwright.planner.memory.in_flight import peak_activations
from meshwright.planner.memory.states import states
from meshwright.schedule import NAMES, make
from meshwright.schedule.in_flight import in_flight, most_in_flight
from meshwright.schedule.validate import peak
from meshwright.spec import RunSpec
from meshwright.spec.pipeline_schedules import SCHEDULES
from small import spec_of

LAYERS = 18


def run(name: str, ranks: int, microbatches: int) -> RunSpec:
    flags = {
        "model.layers": LAYERS, "data.corpus": "synthetic", "data.seq_len": 64, "layout.pp": ranks,
        "layout.schedule": name, "layout.micro_batch": 1, "train.batch_tokens": 64 * microbatches,
        "precision.compute": "bf16",
    }  # fmt: skip
    return spec_of(flags)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_no_more_is_held_than_the_lists_of_all_microbatches_hold(name: str, ranks: int) -> None:
    few, many = 2 * ranks, 11 * ranks
    virtual = SCHEDULES[name].stages or 2
    spec = run(name, ranks, many)
    found = in_flight(spec.layout, held_microbatches(spec))
    made = make(name, ranks, virtual, many)
    for rank, listed in enumerate(made.actions):
        assert found[rank].most([1.0] * virtual, [1.0] * virtual) == peak(listed)
        sizes = [5.0, 3.0][:virtual]
        for share in (0.0, 0.3, 1.0):  # of the activations, what the first half of a backward frees
            left = [size * (1 - share) for size in sizes]
            by_stage = dict(zip(made.stages_of(rank), sizes, strict=True))
            every = [by_stage.get(stage, 0.0) for stage in range(virtual * ranks)]
            assert found[rank].most(sizes, left) == pytest.approx(peak(listed, every, [share] * len(every)))
    assert held_microbatches(run(name, ranks, many)) == (many if SCHEDULES[name].holds_all else few)


@pytest.mark.parametrize("name", NAMES)
def test_several_ranks_together_hold_what_the_fullest_of_them_does(name: str) -> None:
    spec, some = run(name, 6, 12), (1, 3, 4)
    each, together = in_flight(spec.layout, 12), most_in_flight(spec.layout, 12, some)
    for whole, deferred in ((5.0, 3.0), (2.0, 2.0)), ((4.0, 4.0), (1.0, 1.0)):
        sizes = whole[: spec.layout.chunks], deferred[: spec.layout.chunks]
        assert together.most(*sizes) == max(each[rank].most(*sizes) for rank in some)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_the_run_that_is_looked_at_needs_what_the_whole_one_does(name: str, ranks: int) -> None:
    on = CostModel(cluster("h100", ranks))
    few, many = run(name, ranks, 5 * ranks), run(name, ranks, 11 * ranks)
    for rank in range(ranks):
        assert states(few, rank) == states(many, rank) == states(shortened(many), rank)
        assert peak_activations(shortened(many), rank) == peak_activations(many, rank)
    if SCHEDULES[name].holds_all:
        assert memory_model(on).peak(many).activations > 2 * memory_model(on).peak(few).activations
        assert Generic(on).peak(many).activations > 2 * Generic(on).peak(few).activations
    else:
        assert memory_model(on).peak(many) == memory_model(on).peak(few)
        assert Generic(on).peak(many) == Generic(on).peak(few)


def test_memory_is_that_of_the_fullest_step_of_a_growing_batch() -> None:
    """Three microbatches on two ranks make an uneven round, of which more is held than of even ones."""
    on = CostModel(cluster("h100", 2))
    sizes = {count: memory_model(on).ranks(run("interleaved", 2, count)) for count in (1, 3, 4)}
    assert sizes[3][0].allocated > sizes[4][0].allocated
    tree = run("interleaved", 2, 4).to_json()
    tree["train"]["batch_warmup"] = [[64, 64], [192, 200]]
    grown = RunSpec.model_validate(tree)
    assert memory_model(on).ranks(grown)[0] == sizes[3][0]
    assert Generic(on).ranks(grown)[0] == Generic(on).ranks(run("interleaved", 2, 3))[0]
