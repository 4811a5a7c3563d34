"""Pairs of answers: each layout's loss of them equals one device, and planted bugs are named."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapter_cases import DENSE, PAIRS, assert_equal
from covering import marked, name
from expert_cases import BASE, ROUTERS
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import TENSORS, Batch, SplitReader
from meshwright.model.preference_loss import Answers, log_1_minus_exp, pair_losses
from meshwright.parallel import preference, preference_objectives
from meshwright.parallel.preference import Preference
from meshwright.parallel.preference_objectives import both, by_document, log_ratios
from meshwright.spec import RunSpec
from meshwright.spec.preference import PreferenceSpec
from meshwright.train.step import Trainer
from meshwright.verify.verify import verify
from ranks import Ranks
from small import spec_of

LORA: dict[str, object] = {"lora__rank": 3, "lora__alpha": 40.0}
SIMPO: dict[str, object] = {"preference__loss": "simpo", "preference__beta": 2.0}
ORPO: dict[str, object] = {"preference__loss": "orpo", "preference__beta": 0.7}
KTO: dict[str, object] = {
    **LORA, "train__seed": 7, "preference__loss": "kto", "preference__beta": 0.6,
    "preference__desirable_weight": 1.3,
    "preference__undesirable_weight": 0.7,
}  # fmt: skip
SMOOTH: dict[str, object] = {"preference__label_smoothing": 0.2}
CASES: list[dict[str, object]] = [
    {**LORA},
    {**LORA, **SMOOTH, "lora__dropout": 0.3, "recompute__policy": "full"},
    {**LORA, "dp": 2, "zero": 3},
    {**SIMPO, "dp": 2, "zero": 2, "data__pack": "false"},
    {**ORPO, "dp": 2, "zero": 3, "train__ema": 0.9},
    {**LORA, "tp": 2},
    {**LORA, "tp": 2, "sequence_parallel": "false"},
    {**SIMPO, **SMOOTH, "tp": 2},
    {**LORA, "cp": 2},
    {**ORPO, "cp": 2, "context_mode": "ulysses"},
    {**LORA, "pp": 2, "schedule": "zb-h1"},
    {**SIMPO, "pp": 2, "schedule": "1f1b"},
    {**LORA, "dp": 2, "zero": 3, "tp": 2},
    {**LORA, "pp": 2, "schedule": "zb-h1", "cp": 2, "micro_batch": 2},
    {**LORA, "cp": 2, "tp": 2, "recompute__policy": "selective", "data__pack": "false"},
    {**KTO},
    {**KTO, "dp": 2, "zero": 3},
    {**KTO, "tp": 2, "lora__dropout": 0.3},
    {**KTO, "cp": 2},
    {**KTO, "pp": 2, "schedule": "zb-h1", "micro_batch": 2},
    {**KTO, "dp": 2, "zero": 3, "tp": 2, "data__pack": "false"},
    {**KTO, "pp": 2, "schedule": "zb-h1", "cp": 2, "micro_batch": 2},
]  # fmt: skip


def flags(case: dict[str, object]) -> dict[str, object]:
    """Flags of a case, whose names without a section are of the layout."""
    return {key if "__" in key else f"layout__{key}": value for key, value in case.items()}


@pytest.mark.parametrize("case", marked(CASES, [CASES[n] for n in (4, 5, 11, 16)]), ids=name)
def test_every_axis_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    assert_equal(ranks, spec_of(DENSE | PAIRS, **flags(case)))


def test_experts_equal_one_device(ranks: Ranks) -> None:
    case = {"ep": 2, "dp": 2, "zero": 2, **LORA}
    assert_equal(ranks, spec_of(BASE | PAIRS, **ROUTERS["qwen3"], **flags(case)))


def test_two_copies_of_the_formula_are_told_apart_by_their_values() -> None:
    """A loss by hand: the reference's and the program's formulas of one pair."""
    for loss, wanted in (
        ("dpo", 0.3 * (-2.0 + 4.0 + 5.0 - 6.0)),
        ("simpo", 0.3 * (-2.0 / 4 + 5.0 / 2) - 0.5),
    ):
        how = PreferenceSpec.model_validate({"loss": loss, "beta": 0.3, "label_smoothing": 0.1})
        right = -0.9 * math.log(1 / (1 + math.exp(-wanted))) - 0.1 * math.log(1 / (1 + math.exp(wanted)))
        answers = [Answers(*(torch.tensor([each]) for each in given)) for given in GIVEN]
        assert float(pair_losses(how, *answers).loss) == pytest.approx(right, rel=1e-6)
    a, b = math.exp(-0.5), math.exp(-2.5)
    odds = (a / (1 - a)) / (b / (1 - b))
    how = PreferenceSpec(loss="orpo", beta=0.3)
    right = 0.5 - 0.3 * math.log(odds / (1 + odds))
    answers = [Answers(*(torch.tensor([each]) for each in given)) for given in GIVEN]
    assert float(pair_losses(how, *answers).loss) == pytest.approx(right, rel=1e-6)


GIVEN = ((-2.0, 4.0, -4.0), (-5.0, 2.0, -6.0))
"""Log-probability, tokens and the reference's log-probability of a chosen and a rejected answer."""


def test_odds_are_finite_where_an_answer_is_all_but_certain() -> None:
    x = torch.tensor([-1e-12, -1e-3, -0.7, -50.0], dtype=torch.float64, requires_grad=True)
    found = log_1_minus_exp(x)
    found.sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    assert found.tolist() == pytest.approx([math.log(-math.expm1(each)) for each in x.tolist()], rel=1e-12)


# Planted bugs -----------------------------------------------------------------------------------------


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rejected answers are learned, and the chosen ones are not."""
    honest = preference_objectives.pair_losses
    monkeypatch.setattr(preference_objectives, "pair_losses", lambda how, one, other: honest(how, other, one))


def with_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the model itself."""
    monkeypatch.setattr(preference, "adapters_off", lambda _decoder: nullcontext())


def mean_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank divides by its own pairs, and the result by the number of ranks."""
    honest = Preference._loss

    def own_mean(self: Preference, count: int, kl: Tensor, log_probs: Any, rows: Any) -> Any:
        whole = honest(self, count, kl, log_probs, rows)
        pairs = int(both(by_document(rows["trained"], rows["documents"], count)).sum())
        return whole / max(1, pairs)

    monkeypatch.setattr(Preference, "_loss", own_mean)
    monkeypatch.setattr(Preference, "own_count", lambda self, batch: len(batch.tokens) * self.counts)


def unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are of the documents one place off."""
    honest = preference.by_document
    monkeypatch.setattr(
        preference,
        "by_document",
        lambda values, documents, count: honest(values, documents.roll(1, 1), count),
    )


BUGS: list[tuple[Any, int, str]] = [
    (
        swapped,
        1,
        "the backward of head",
    ),  # in the first step model and reference are equal, and so is each loss
    (with_the_adapter, 2, "the loss, though each module's output is right"),
    (mean_of_means, 1, "the backward of head"),
    (unmasked, 1, "the loss, though each module's output is right"),
]


def unclamped(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate below 0 stays as it is."""
    monkeypatch.setattr(preference, "estimated_kl", lambda ratios, count: ratios / count)


def with_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate has the gradient of the microbatch's own part of it."""
    honest = preference_objectives.JudgedObjective.losses

    def followed(self: Any, sums: Any, kl: Tensor) -> Any:
        ratios, count = log_ratios(sums)
        return honest(self, sums, kl + (ratios - ratios.detach()) / count)

    monkeypatch.setattr(preference_objectives.JudgedObjective, "losses", followed)


def of_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's estimate is that of its own samples, as TRL's is of a microbatch."""
    monkeypatch.setattr(preference, "start_all_reduce", lambda *_: SimpleNamespace(wait=lambda: None))


def with_its_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is of prompts with their own answers."""
    honest = log_ratios
    monkeypatch.setattr(
        preference, "log_ratios", lambda sums: honest(type(sums)(*(each.roll(1, 1) for each in sums)))
    )


KTO_BUGS: list[tuple[Any, dict[str, object], str]] = [
    (unclamped, {"train__seed": 0}, "the loss, though"),
    (with_a_gradient, {}, "the backward of head"),
    (of_own_samples, {"dp": 2, "zero": 3}, "the validation loss"),
    (with_its_own_answers, {}, "the loss, though"),
]


@pytest.mark.parametrize(("plant", "layout", "where"), KTO_BUGS, ids=[bug[0].__name__ for bug in KTO_BUGS])
def test_a_planted_bug_of_kto_is_named(
    ranks: Ranks, plant: Any, layout: dict[str, object], where: str
) -> None:
    spec = spec_of(DENSE | PAIRS, **flags({**KTO, **layout}))
    found = ranks.run(spec.layout, broken, spec, plant)[0]
    assert not found["equal"]
    assert f"the first difference is in {where}" in found["first"]["sentence"]


def broken(mesh: Mesh, spec: RunSpec, plant: Any) -> dict[str, Any] | None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        return verify(spec, mesh, 2)


@pytest.mark.parametrize(("plant", "step", "where"), BUGS, ids=[bug[0].__name__ for bug in BUGS])
@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero": 3}], ids=["one", "dp2"])
def test_a_planted_bug_is_named(
    ranks: Ranks, plant: Any, step: int, where: str, layout: dict[str, object]
) -> None:
    spec = spec_of(DENSE | PAIRS, **flags({**LORA, **layout}))
    found = ranks.run(spec.layout, broken, spec, plant)[0]
    assert not found["equal"]
    assert found["first"]["sentence"].startswith(f"step {step}: the first difference is in {where}")


# Packing ----------------------------------------------------------------------------------------------


def of_held_out_pairs(mesh: Mesh, spec: RunSpec) -> tuple[int, float, dict[str, Tensor]]:
    """Number, loss and gradients of all held-out pairs in one batch, after a step that moves the adapters."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    corpus = open_corpus(spec)
    batches = list(SplitReader(corpus.validation, spec, 0, 1).batches())
    batch = Batch(*(torch.cat([getattr(each, field) for each in batches]) for field in TENSORS))
    trainer.step(batch, 1)
    loss = trainer.gradients(batch)
    trainer.sums(loss)
    gradients = {key: value * trainer.applied_factor for key, value in trainer.states.gradients()}
    return trainer._own_targets(batch), float(loss), gradients


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(LORA, id="dpo"),
        pytest.param(SIMPO, id="simpo", marks=pytest.mark.full),
        pytest.param(ORPO, id="orpo", marks=pytest.mark.full),
        pytest.param(KTO, id="kto"),
    ],
)
def test_packed_equals_unpacked(ranks: Ranks, how: dict[str, object]) -> None:
    base = DENSE | PAIRS | {"data.corpus": "synthetic", "data.val_fraction": 0.02}
    found = []
    for pack in ("true", "false"):
        spec = spec_of(base, **how, data__pack=pack, precision__compute="fp64", layout__dp=1)
        found.append(ranks.run(spec.layout, of_held_out_pairs, spec)[0])
    (pairs, loss, gradients), (others, other_loss, other_gradients) = found
    assert pairs == others > 20
    assert loss == pytest.approx(other_loss, rel=1e-12)
    assert gradients.keys() == other_gradients.keys() != set()
    for key, gradient in gradients.items():
        largest = float(other_gradients[key].abs().max())
        assert largest > 0, key
        assert float((gradient - other_gradients[key]).abs().max()) <= 1e-12 * largest, key
