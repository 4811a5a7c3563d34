"""Every layout equals one device: the check that users run with `meshwright verify`, on the test ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.parallel.mesh import Mesh
from meshwright.spec import RunSpec, load
from meshwright.train import verify as subject
from meshwright.train.shrink import MOST_WORK, shrink
from ranks import Ranks
from small import spec_of

STEPS = 2  # the second takes up the first's moments
BASE = {
    "model.vocab_size": 61,  # prime: no axis divides it
    "data.seq_len": 16,
    "train.batch_tokens": 8 * 16,
    "train.steps": 3,
    "train.warmup_steps": 1,
}


def body(mesh: Mesh, spec: RunSpec, steps: int) -> dict[str, object] | None:
    return subject.verify(spec, mesh, steps)


def worst(ranks: Ranks, spec: RunSpec) -> float:
    found = ranks.run(spec.layout, body, spec, STEPS)[0]
    assert found["compared"] == STEPS * (2 + 2 * len(list(found_names(spec))))
    assert found["equal"] == (found["worst_relative"] <= subject.TOLERANCE)
    return float(found["worst_relative"])


def found_names(spec: RunSpec) -> list[str]:
    from meshwright.model.decoder import Decoder

    with torch.device("meta"):
        return [name for name, _ in Decoder(spec.model).named_parameters()]


LAYOUTS = [
    {"dp": 1},
    {"dp": 2},
    {"dp": 4},
    *({"dp": dp, "zero": zero} for dp, zero in product((1, 2, 4), (1, 2, 3))),
    *({"dp": 2, "replicate": 2, "zero": zero} for zero in (1, 2, 3)),
    {"dp": 1, "replicate": 4, "zero": 2},
]


RECOMPUTE = ["none", "full", "selective"]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout.items()))
def test_every_layout_equals_one_device(ranks: Ranks, layout: dict[str, int], recompute: str) -> None:
    """Over 8 / ranks / micro_batch microbatches, of one size and of two with each layout and each policy."""
    flags = {f"layout__{key}": value for key, value in layout.items()}
    micro_batch = 1 + (LAYOUTS.index(layout) + RECOMPUTE.index(recompute)) % 2
    spec = spec_of(BASE, **flags, layout__micro_batch=micro_batch, recompute__policy=recompute)
    assert worst(ranks, spec) <= 1e-10


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
@pytest.mark.parametrize("zero", [0, 3])
def test_every_kind_of_model_equals_one_device(ranks: Ranks, model: dict[str, object], zero: int) -> None:
    assert (
        worst(ranks, spec_of(BASE, **model, layout__dp=4, layout__zero=zero, layout__micro_batch=1)) <= 1e-10
    )


@pytest.mark.parametrize("data", [{"data__pack": "false"}, {"data__document_mask": "false"}])
def test_every_packing_equals_one_device(ranks: Ranks, data: dict[str, object]) -> None:
    assert worst(ranks, spec_of(BASE, **data, layout__dp=2, layout__zero=2)) <= 1e-10


def scale_all(trainer: subject.Trainer) -> None:
    trainer.states.scale_gradients(1 / trainer.mesh.shard.size)


def change_one(trainer: subject.Trainer) -> None:
    dict(trainer.states.gradients())["blocks.1.attn_norm.weight"].to_local().mul_(1 + 1e-6)


def verify_broken(
    mesh: Mesh, spec: RunSpec, harm: Callable[[subject.Trainer], None]
) -> dict[str, object] | None:
    """`verify` of a trainer that does `harm` to its gradients after each backward."""

    class Broken(subject.Trainer):
        def gradients(self, batch: Batch) -> Tensor:
            loss = super().gradients(batch)
            harm(self)
            self.states._squares = [self.states.squares(exact=True)]
            return loss

    with patch.object(subject, "Trainer", Broken):
        return subject.verify(spec, mesh, 1)


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
    small, note = shrink(spec)
    assert note is not None and f"{spec.model.parameters:,}" in note
    assert small.model.parameters * small.train.batch_tokens <= MOST_WORK
    assert small.layout.model_dump(exclude={"micro_batch"}) == spec.layout.model_dump(exclude={"micro_batch"})
    assert small.model.heads // small.model.kv_heads == spec.model.heads // spec.model.kv_heads
    switches = ("norm", "activation", "position", "qk_norm", "qkv_bias", "tied", "rope_theta", "family")
    assert all(getattr(small.model, key) == getattr(spec.model, key) for key in switches)
    assert small.model.vocab_size % 64 == spec.model.vocab_size % 64
