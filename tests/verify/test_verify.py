"""Every layout equals one device: the check that users run with `meshwright verify`, on the test ranks."""

from __future__ import annotations

from itertools import product

import pytest

from broken_trainers import verify_broken
from covering import covered
from equality import equal_to_one_device
from meshwright.spec import load
from meshwright.verify import verify as subject
from meshwright.verify.narrow import MOST_WORK, narrow
from ranks import Ranks
from small import scale_gradients, spec_of

BASE = {
    "model.vocab_size": 61,  # prime: no axis divides it
    "data.seq_len": 16,
    "train.batch_tokens": 8 * 16,
    "train.steps": 3,
    "train.warmup_steps": 1,
}


LAYOUTS = [
    {"dp": 1},
    {"dp": 2},
    {"dp": 4},
    *({"dp": dp, "zero": zero} for dp, zero in product((1, 2, 4), (1, 2, 3))),
    *({"dp": 2, "replicate": 2, "zero": zero} for zero in (1, 2, 3)),
    {"dp": 1, "replicate": 4, "zero": 2},
]
DEFAULTS = {"dp": 1, "replicate": 1, "zero": 0}
CASES: list[dict[str, object]] = [
    {**DEFAULTS, **layout, "micro_batch": micro_batch, "policy": policy}
    for layout in LAYOUTS
    for micro_batch, policy in product((1, 2), ("none", "full", "selective"))
]


@pytest.mark.parametrize("case", covered(CASES))
def test_every_layout_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    """Over 8 / ranks / micro_batch microbatches."""
    layout = {f"layout.{key}": value for key, value in case.items() if key != "policy"}
    spec = spec_of(BASE | layout, recompute__policy=case["policy"])
    equal_to_one_device(ranks, spec, 1e-10, rules="gloo")


GPT2 = {
    "model__family": "gpt2", "model__norm": "layernorm", "model__activation": "gelu_tanh",
    "model__position": "learned", "model__max_seq_len": 16, "model__qkv_bias": "true",
    "model__out_bias": "true", "model__mlp_bias": "true", "model__tied": "true", "model__kv_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [{"model__tied": "true"}, {"model__qk_norm": "true", "model__head_dim": 12}, GPT2],
    ids=["tied", "qwen3", "gpt2"],
)
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.full), 3])
def test_every_kind_of_model_equals_one_device(ranks: Ranks, model: dict[str, object], zero: int) -> None:
    spec = spec_of(BASE, **model, layout__dp=4, layout__zero=zero, layout__micro_batch=1)
    equal_to_one_device(ranks, spec, 1e-10, rules="gloo")


@pytest.mark.parametrize("data", [{"data__pack": "false"}, {"data__document_mask": "false"}])
def test_every_packing_equals_one_device(ranks: Ranks, data: dict[str, object]) -> None:
    equal_to_one_device(ranks, spec_of(BASE, **data, layout__dp=2, layout__zero=2), 1e-10, rules="gloo")


def scale_all(trainer: subject.Trainer) -> None:
    scale_gradients(trainer.states, 1 / trainer.mesh.shard.size)


def change_one(trainer: subject.Trainer) -> None:
    dict(trainer.states.gradients())["blocks.1.attn_norm.weight"].to_local().mul_(1 + 1e-6)


def test_gradients_off_by_an_axis_are_found(ranks: Ranks) -> None:
    """The field's densest class of bugs: Adam hides it, the gradient and its norm do not."""
    spec = spec_of(BASE, layout__dp=2)
    found = ranks.run(spec.layout, verify_broken, spec, scale_all)[0]
    assert not found["equal"]
    rows = {row["kind"]: row["worst"] for row in found["rows"]}
    assert rows["step 1 loss"] <= 1e-10
    assert rows["step 1 gradient"] == pytest.approx(0.5)
    assert rows["step 1 grad norm"] == pytest.approx(0.5)


def test_the_worst_offender_is_named(ranks: Ranks) -> None:
    spec = spec_of(BASE, layout__dp=2, layout__zero=1)
    found = ranks.run(spec.layout, verify_broken, spec, change_one)[0]
    assert not found["equal"]
    rows = {row["kind"]: row["name"] for row in found["rows"]}
    assert rows["step 1 gradient"] == "blocks.1.attn_norm.weight"


@pytest.mark.parametrize("preset", ["tiny", "gpt3-175b", "llama3-405b", "qwen3-32b"])
def test_narrowed_keeps_the_structure(preset: str) -> None:
    spec = load(None, [("model.preset", preset), ("layout.dp", "2"), ("train.batch_tokens", "65536")])
    small, note = narrow(spec)
    assert note is not None and f"{spec.model.parameters:,}" in note
    assert small.model.parameters * small.train.batch_tokens <= MOST_WORK
    assert small.layout.model_dump(exclude={"micro_batch"}) == spec.layout.model_dump(exclude={"micro_batch"})
    assert small.model.heads // small.model.kv_heads == spec.model.heads // spec.model.kv_heads
    switches = ("norm", "activation", "position", "qk_norm", "qkv_bias", "tied", "rope_theta", "family")
    assert all(getattr(small.model, key) == getattr(spec.model, key) for key in switches)
    assert small.model.vocab_size % 64 == spec.model.vocab_size % 64
