"""The table of layouts: tensor, context, data and ZeRO together equal one device, whatever else is chosen.

Each layout is checked with another choice of everything that does not belong to it (heads, recomputation,
accumulation, packing, ...), drawn by its name, so that the table as a whole covers their combinations.
"""

from __future__ import annotations

from itertools import product

import pytest

from covering import each_choice, marked, name
from equality import equal_to_one_device
from layout_cases import BASE, CASES
from meshwright.verify.narrow import narrow
from ranks import Ranks
from small import spec_of


def check(ranks: Ranks, **flags: object) -> None:
    equal_to_one_device(ranks, spec_of(BASE, **flags), 1e-9)


PLACES = [{key: case[f"layout__{key}"] for key in ("tp", "cp", "dp", "zero")} for case in CASES]
QUICK = [case for case, place in zip(CASES, PLACES, strict=True) if place in each_choice(PLACES)]
"""Each size of each axis, and each stage of ZeRO; of the rest what is drawn for them."""


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_every_layout_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    """Over 3 samples for each data rank: as many microbatches, or one."""
    check(ranks, **case, train__batch_tokens=3 * int(str(case["layout__dp"])) * 32)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case["layout__dp"] == 1], ids=name)
def test_every_layout_of_one_data_rank_takes_more_microbatches(ranks: Ranks, case: dict[str, object]) -> None:
    """Over 6 samples: as many microbatches, or two."""
    check(ranks, **case, train__batch_tokens=6 * 32)


MODES: list[dict[str, object]] = [
    {"layout__context_mode": mode, "recompute__policy": policy}
    for mode, policy in product(("ring", "gather", "ulysses", "ring+ulysses"), ("none", "full", "selective"))
]


QUICK_MODES = [MODES[5], MODES[10]]


@pytest.mark.parametrize("case", marked(MODES, QUICK_MODES))
def test_every_context_mode_with_every_recomputation(ranks: Ranks, case: dict[str, object]) -> None:
    """Over four context ranks, with keys and values for each; `make test` has others in the table above."""
    check(ranks, **case, layout__cp=4, model__kv_heads=8, layout__zero=3, layout__micro_batch=3)


GPT2 = {
    "model__family": "gpt2", "model__norm": "layernorm", "model__activation": "gelu_tanh",
    "model__position": "learned", "model__max_seq_len": 32, "model__qkv_bias": "true",
    "model__out_bias": "true", "model__mlp_bias": "true", "model__tied": "true", "model__kv_heads": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("tp", "cp", "replicate", "sequence"),
    [
        pytest.param(4, 1, 2, "true", marks=pytest.mark.full),
        (2, 2, 2, "false"),
        pytest.param(4, 1, 2, "false", marks=pytest.mark.full),
        pytest.param(2, 2, 2, "true", marks=pytest.mark.full),
    ],
)
def test_biases_and_learned_positions(ranks: Ranks, tp: int, cp: int, replicate: int, sequence: str) -> None:
    flags = {"layout__tp": tp, "layout__cp": cp, "layout__sequence_parallel": sequence}
    rest = {"layout__replicate": replicate, "layout__zero": 2 if cp > 1 else 0}
    if cp == 1:
        rest = {"layout__dp": replicate, "layout__zero": 3}
    check(ranks, **GPT2, **flags, **rest)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_vocabulary_of_8191(ranks: Ranks, tp: int) -> None:
    """Padded and masked where the tensor axis does not divide it; three data ranks do not divide a part."""
    flags = {"model__vocab_size": 8191, "model__layers": 1, "layout__tp": tp, "layout__zero": 3}
    check(ranks, **flags, layout__dp=3 if tp == 2 else 2)


def test_a_narrowed_copy_still_goes_with_its_layout() -> None:
    spec = spec_of(
        BASE,
        model__heads=64,
        model__kv_heads=32,
        model__hidden=4096,
        model__ffn=4096,
        model__head_dim=64,
        data__seq_len=4096,
        train__batch_tokens=4096,
        layout__tp=4,
        layout__cp=8,
        layout__context_mode="ulysses",
    )
    small, note = narrow(spec)
    assert note is not None and small.layout.describe() == spec.layout.describe()
    assert small.model.parameters < spec.model.parameters / 10


ORDERS: list[dict[str, object]] = [
    {"order": "replicate-pp-dp-tp", "replicate": 2, "dp": 2, "pp": 2, "zero": 1},
    {"order": "replicate-pp-dp-tp", "replicate": 2, "pp": 2, "tp": 2, "zero": 3},
    {"order": "replicate-dp-pp-tp", "dp": 2, "pp": 2, "tp": 2, "zero": 2},
    {"order": "replicate-dp-pp-tp", "cp": 2, "dp": 2, "pp": 2, "zero": 1},
]


@pytest.mark.parametrize("case", marked(ORDERS, ORDERS[2:3]), ids=name)
def test_ranks_may_be_numbered_in_another_order(ranks: Ranks, case: dict[str, object]) -> None:
    layout = {f"layout__{key}": value for key, value in case.items()}
    check(ranks, **layout, train__batch_tokens=8 * 32)
