"""How blocks are cut into stages, and what a schedule asks of them."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import schedule
from meshwright.spec import Layout, ModelSpec, RunSpec, UserError
from meshwright.spec.load import from_tree, load
from meshwright.spec.parameters import parameters
from meshwright.spec.stages import balanced, even, stages
from meshwright.spec.train import TrainSpec


def model(layers: int, vocab_size: int = 2048) -> ModelSpec:
    return ModelSpec.model_validate({"preset": "tiny", "layers": layers, "vocab_size": vocab_size})


def test_the_names_are_those_of_the_schedules() -> None:
    from meshwright.spec.schema import known_keys

    assert known_keys()["layout.schedule"].choices == schedule.NAMES


@pytest.mark.parametrize("name", schedule.NAMES)
@pytest.mark.parametrize("virtual", [None, 1, 2, 3])
def test_the_rule_accepts_what_the_schedule_makes(name: str, virtual: int | None) -> None:
    tree = {"model": {"layers": 12}, "layout": {"pp": 4, "schedule": name, "virtual": virtual or "none"}}
    try:
        layout = from_tree(tree).layout
    except UserError:
        with pytest.raises(schedule.ScheduleError):
            schedule.make(name, 4, virtual or 1, 8)
    else:
        assert schedule.make(name, 4, layout.chunks, 8).stages == 4 * layout.chunks
        assert virtual is None or layout.chunks == virtual


@pytest.mark.parametrize("name", schedule.NAMES)
def test_without_a_pipeline_there_is_one_stage(name: str) -> None:
    layout = from_tree({"layout": {"schedule": name, "virtual": 3}}).layout
    (only,) = stages(model(4), layout, 512)
    assert layout.chunks == 1 and "schedule" not in layout.describe()
    assert only.units == ("embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")
    assert only.units == tuple(parameters(model(4)))


cuts = st.one_of(st.sampled_from(["even", "balanced"]), st.none())


@given(st.integers(1, 40), st.integers(2, 12), st.sampled_from(schedule.NAMES), cuts, st.data())
def test_every_unit_is_on_one_stage_in_order(
    layers: int, pp: int, name: str, cut: str | None, data: st.DataObject
) -> None:
    layout = Layout(pp=pp, schedule=name)
    count = pp * layout.chunks
    if cut is None:
        borders = sorted(data.draw(st.lists(st.integers(0, layers), min_size=count - 1, max_size=count - 1)))
        listed = [b - a for a, b in zip([0, *borders], [*borders, layers], strict=True)]
        layout = layout.model_copy(update={"stages": tuple(listed)})
    else:
        layout = layout.model_copy(update={"stages": cut})
    found = stages(model(layers), layout, 512)
    assert [stage.index for stage in found] == list(range(count))
    assert [unit for stage in found for unit in stage.units] == list(parameters(model(layers)))
    assert found[0].embed and found[-1].head
    if cut is None:
        assert [len(stage.blocks) for stage in found] == listed


@given(st.integers(1, 60), st.integers(2, 20))
def test_an_even_cut_differs_by_one_and_spares_the_ends(layers: int, count: int) -> None:
    blocks = even(layers, count)
    assert sum(blocks) == layers and max(blocks) - min(blocks) <= 1
    if count > 2:
        assert min(blocks[1:-1]) >= max(blocks[0], blocks[-1])
    assert blocks[0] >= blocks[-1]
    if count <= layers + 2:
        assert all(blocks[1:-1])  # nobody has nothing


@given(st.integers(1, 9), st.integers(2, 5), st.integers(2, 200_000))
def test_no_cut_has_a_smaller_largest_stage_than_the_balanced_one(
    layers: int, count: int, vocab_size: int
) -> None:
    cut = model(layers, vocab_size)

    def largest(blocks: list[int] | tuple[int, ...]) -> float:
        costs = [number * cut.block_flops(512, cut.kinds[0]) for number in blocks]
        return max([*costs[:-1], costs[-1] + cut.head_flops])

    others = [blocks for blocks in product(range(layers + 1), repeat=count) if sum(blocks) == layers]
    assert largest(balanced(cut, count, 512)) == min(map(largest, others))


@given(st.integers(1, 7), st.integers(2, 4), st.integers(0, 4), st.integers(1, 3), st.integers(2, 60_000))
def test_nor_where_layers_differ(
    layers: int, count: int, dense_first: int, every: int, vocab_size: int
) -> None:
    moe = {"experts": 8, "top_k": 2, "ffn": 1500, "dense_first": dense_first, "every": every}
    cut = ModelSpec.model_validate({"preset": "tiny", "layers": layers, "vocab_size": vocab_size, "moe": moe})
    costs = [cut.block_flops(512, kind) for kind in cut.layer_kinds]

    def largest(blocks: list[int] | tuple[int, ...]) -> float:
        ends = list(accumulate(blocks, initial=0))
        each = [sum(costs[first:last]) for first, last in pairwise(ends)]
        return max([*each[:-1], each[-1] + cut.head_flops])

    found = balanced(cut, count, 512)
    others = [blocks for blocks in product(range(layers + 1), repeat=count) if sum(blocks) == layers]
    assert sum(found) == layers and len(found) == count
    assert largest(found) == min(map(largest, others))


def test_a_large_head_takes_the_place_of_blocks() -> None:
    assert balanced(model(8, 2), 4, 512) == [2, 2, 2, 2]
    assert balanced(model(8, 200_000), 4, 512)[-1] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3,1", (3, 1)), ("[0, 4]", (0, 4)), ("even", "even"), ("balanced", "balanced")],
)
def test_a_flag_gives_a_word_or_a_list(text: str, expected: object) -> None:
    assert from_tree({}, [("layout.pp", "2"), ("layout.stages", text)]).layout.stages == expected


def test_a_pipeline_is_named_in_one_line() -> None:
    assert from_tree({"layout": {"pp": 2}}).layout.describe() == "dp=1 x pp=2, zero=0, schedule=zb-h1"
    folded = from_tree({"layout": {"pp": 2, "schedule": "zb-v", "dp": 2}}).layout
    assert folded.describe() == "dp=2 x pp=2, zero=0, schedule=zb-v, virtual=2"


def test_a_pipeline_is_left_microbatches_to_be_filled_with() -> None:
    assert from_tree({}).microbatches == 1
    assert from_tree({"layout": {"pp": 2}}).microbatches == 4
    assert from_tree({"layout": {"pp": 6}}).microbatches == 16  # as many as there are sequences


def test_blocks_that_are_compiled_or_recomputed_have_whole_backwards_by_default() -> None:
    compiled = {"train": {"compile": True}}
    assert from_tree({"layout": {"pp": 2}}, [("recompute.policy", "full")]).layout.schedule == "1f1b"
    assert from_tree({"layout": {"pp": 2}}, [("recompute.policy", "none")]).layout.schedule == "zb-h1"
    assert from_tree({"layout": {"pp": 2}} | compiled).layout.schedule == "1f1b"
    assert from_tree(compiled, [("layout.pp", "2")]).layout.schedule == "1f1b"
    assert from_tree({"layout": {"pp": 2, "schedule": "gpipe"}} | compiled).layout.schedule == "gpipe"
    assert from_tree({"layout": {"pp": 2}}, [("train.compile", "false")]).layout.schedule == "zb-h1"


def test_a_schedule_that_nobody_chose_follows_the_keys_that_it_depends_on(tmp_path: Path) -> None:
    compiled = TrainSpec(compile=True)
    assert RunSpec(layout=Layout(pp=2), train=compiled).layout.schedule == "1f1b"
    assert RunSpec(layout=Layout(pp=2, schedule="gpipe"), train=compiled).layout.schedule == "gpipe"
    for layout, after in (({}, "1f1b"), ({"schedule": "gpipe"}, "gpipe"), ({"pp": 2}, "zb-h1")):
        record = {"spec": from_tree({"layout": layout}).to_json()}
        (tmp_path / "run.json").write_text(json.dumps(record))
        again = load(tmp_path, [("layout.pp", "2"), ("recompute.policy", "full")])
        assert again.layout.schedule == after
