"""Kinds of layers: windows and rotary positions by the type of each layer, and what follows from them."""

from __future__ import annotations

from itertools import accumulate, pairwise, product
from typing import Any

import pytest

from meshwright.planner.cost.stages import blocks_before
from meshwright.spec import ModelSpec, UserError, load
from meshwright.spec.layers import LinearRope, RopeSpec
from meshwright.spec.load import from_tree
from meshwright.spec.stages import balanced
from meshwright.verify.narrow import narrow, narrow_for_all

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = {"kind": "linear", "factor": 8.0}
GLOBAL = RopeSpec(1e6, 32, LinearRope(factor=8.0))


def model(**fields: Any) -> ModelSpec:
    return ModelSpec.model_validate({"preset": "tiny"} | fields)


def test_types_repeat_and_sliding_layers_have_their_own_base_without_scaling() -> None:
    """Gemma 3: of six layers the last attends to all, by a larger base that is scaled."""
    gemma = model(
        layers=8, sliding_window=64, layer_types=[SLIDING] * 5 + [FULL], rope_theta=1e6, rope_scaling=LINEAR,
        rope_local_base_freq=1e4,
    )  # fmt: skip
    kinds = gemma.layer_kinds
    assert [kind.window for kind in kinds] == [64, 64, 64, 64, 64, None, 64, 64]
    assert {kind.rope for kind in kinds if kind.window is None} == {GLOBAL}
    assert {kind.rope for kind in kinds if kind.window == 64} == {RopeSpec(1e4, 32, None)}


def test_types_alone_leave_all_layers_one_rotary_base() -> None:
    """GPT-OSS: every second layer slides, and all positions are scaled alike."""
    found = model(sliding_window=64, layer_types=[SLIDING, FULL], rope_theta=1e6, rope_scaling=LINEAR)
    assert [kind.window for kind in found.layer_kinds] == [64, None, 64, None]
    assert {kind.rope for kind in found.kinds} == {GLOBAL}


def test_kinds_count_layers_with_and_without_experts_apart() -> None:
    found = model(preset="moe-tiny", layers=5, sliding_window=64, layer_types=[SLIDING, FULL])
    assert [(kind.mlp, kind.window) for kind in found.kinds] == [
        ("dense", 64),
        ("experts", None),
        ("experts", 64),
    ]
    assert blocks_before(found) == [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 2, 1), (1, 2, 2)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": [FULL] * 5}, "5 types are more than model.layers = 4"),
        ({"layer_types": [SLIDING, FULL]}, "'sliding_attention' attends to the last model.sliding_window"),
        ({"layer_types": [FULL], "sliding_window": 8}, "model.sliding_window: 8 has no effect without"),
        ({"rope_local_base_freq": 100.0, "sliding_window": 8}, "base_freq: 100.0 has no effect without"),
        (
            {
                "layer_types": [SLIDING, FULL], "sliding_window": 8, "rope_local_base_freq": 1e4,
                "position": "learned",
            },
            'model.position: "learned" does not go with model.rope_local_base_freq',
        ),
        ({"layer_types": ["chunked_attention"]}, "it should be 'full_attention' or 'sliding_attention'"),
    ],
)  # fmt: skip
def test_types_that_say_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_tree({"model": fields})


def test_flops_are_those_of_each_layer() -> None:
    length = 512
    full, sliding = model(), model(sliding_window=64)
    mixed = model(sliding_window=64, layer_types=[SLIDING, SLIDING, SLIDING, FULL])
    for causal in (False, True):
        one, all_, found = (each.forward_flops(length, causal) for each in (full, sliding, mixed))
        assert found == pytest.approx((one + 3 * all_) / 4, rel=1e-12)


def test_stages_are_balanced_by_the_windows() -> None:
    """No cut has a smaller largest stage, and the four layers that slide are one stage."""
    found = model(layers=6, vocab_size=2, sliding_window=8, layer_types=[SLIDING] * 4 + [FULL] * 2)
    flops = [found.block_flops(65536, kind) for kind in found.layer_kinds]
    cut = balanced(found, 3, 65536)

    def largest(blocks: tuple[int, ...]) -> float:
        ends = accumulate(blocks, initial=0)
        *others, last = [sum(flops[first:end]) for first, end in pairwise(ends)]
        return max(*others, last + found.head_flops)

    cuts = [blocks for blocks in product(range(7), repeat=3) if sum(blocks) == 6]
    assert largest(tuple(cut)) == min(map(largest, cuts)) and cut == [4, 1, 1]


@pytest.mark.parametrize("moe", ["none", "dense_first", "every"])
def test_a_narrowed_copy_has_every_kind_of_layer(moe: str) -> None:
    flags = {"preset": "small", "layers": "24", "sliding_window": "32"}
    flags["layer_types"] = ",".join([SLIDING] * 5 + [FULL])
    if moe != "none":
        flags |= {"moe.experts": "8", "moe.top_k": "2", "moe.ffn": "64"}
        flags["moe.dense_first"] = "6" if moe == "dense_first" else "1"
        flags["moe.every"] = "2" if moe == "every" else "1"
    spec = load(None, [(f"model.{key}", value) for key, value in flags.items()])
    for copy, note in (narrow(spec), narrow_for_all(spec, 2)):
        assert note is not None and copy.model.layers < 24
        kinds = [{(kind.mlp, kind.window is None) for kind in each.model.kinds} for each in (copy, spec)]
        assert kinds[0] == kinds[1]
