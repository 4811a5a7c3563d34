"""Engines on every layout equal transformers' model on one device: losses, gradients, steps, log-probs."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from covering import each_choice, marked, some
from engine_cases import (
    LAYOUTS,
    OBJECTIVES,
    Steps,
    assert_same_steps,
    engine_steps,
    own_rows,
    spec_of,
    their_log_probs,
    their_model,
    their_steps,
    trained_tokens,
    whole_batch,
)
from hf_models import CASES as MODELS
from hf_models import save_theirs
from meshwright.api.engine import Engine
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from ranks import Ranks, RanksFailedError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HF folder of a model in float64."""
    made = tmp_path_factory.mktemp("model")
    save_theirs(made / "float32", *MODELS["llama"]).double().save_pretrained(made / "hf")
    return made / "hf"


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """A function from an objective to the steps of transformers' model."""
    return cache(lambda objective: their_steps(folder, objective))


CASES = [{"layout": layout, "objective": objective} for layout, objective in product(LAYOUTS, OBJECTIVES)]
QUICK = each_choice(CASES)
"""Each layout with an objective, and each objective."""


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_every_layout_equals_one_device(
    ranks: Ranks, folder: Path, theirs: Any, case: dict[str, str]
) -> None:
    spec = spec_of(folder, LAYOUTS[case["layout"]])
    found: list[Steps] = ranks.run(spec.layout, engine_steps, spec, case["objective"])
    assert_same_steps(found[0], theirs(case["objective"]))


@pytest.mark.parametrize(
    "layout",
    some(
        ["one process", "dp2 zero3", "dp2 zero1", "tp2 dp2", "pp2 zb-h1", "cp2 tp2"],
        ["dp2 zero3", "pp2 zb-h1"],
    ),
)
def test_batches_before_a_step_are_one_batch(ranks: Ranks, folder: Path, theirs: Any, layout: str) -> None:
    """Also where their counts differ: a mean of means would weigh them alike."""
    spec = spec_of(folder, LAYOUTS[layout])
    for objective in ("cross-entropy", "dpo"):
        found: list[Steps] = ranks.run(spec.layout, engine_steps, spec, objective, 3)
        assert_same_steps(found[0], theirs(objective))


def test_a_mean_of_means_is_found(ranks: Ranks, folder: Path, theirs: Any) -> None:
    """The comparison fails where each batch is divided by its own count."""
    spec = spec_of(folder, {})
    found: list[Steps] = ranks.run(spec.layout, steps_of_means, spec)
    with pytest.raises(AssertionError, match="losses"):
        assert_same_steps(found[0], theirs("cross-entropy"))


def steps_of_means(mesh: Mesh, spec: RunSpec) -> Steps:
    engine, found = Engine(spec, mesh=mesh), Steps()
    whole = whole_batch()
    for part in range(3):
        rows = own_rows(whole, part, 3)
        trained = float(trained_tokens(rows).sum())
        engine.forward_backward(rows, lambda log_probs, _, trained=trained: -log_probs.sum() / trained, 1)
    found.losses.append(engine.step()["loss"])
    engine.close()
    return Steps(losses=found.losses * 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_are_those_of_transformers(ranks: Ranks, folder: Path, layout: str) -> None:
    spec = spec_of(folder, LAYOUTS[layout])
    with torch.no_grad():
        wanted = their_log_probs(their_model(folder), whole_batch())
    for rank, (data_rank, found) in enumerate(ranks.run(spec.layout, log_probs_of, spec)):
        for ours, whole in zip(found, wanted, strict=True):
            own = own_rows({"input_ids": whole}, data_rank, spec.layout.data_ranks)["input_ids"]
            torch.testing.assert_close(ours, own, rtol=0, atol=1e-9, msg=f"rank {rank}")


def log_probs_of(mesh: Mesh, spec: RunSpec) -> tuple[int, Any]:
    with Engine(spec, mesh=mesh) as engine:
        rows = own_rows(whole_batch(), engine.data_rank, engine.data_ranks)
        found = engine.log_probs(rows, entropy=True)
        assert torch.equal(engine.log_probs(rows), found[0])  # and a forward leaves nothing behind
        return engine.data_rank, found


DOCUMENTS = [[5, 17, 3, 96, 41], [44, 7, 7], [30, 9, 9, 80]]


@pytest.mark.parametrize("layout", ["one process", "cp2", "tp2", "pp2 1f1b"])
def test_packed_documents_are_those_documents_apart(ranks: Ranks, folder: Path, layout: str) -> None:
    spec, model = spec_of(folder, LAYOUTS[layout]), their_model(folder)
    wanted = []
    for document in DOCUMENTS:
        tokens = torch.tensor([document])
        with torch.no_grad():
            logs = model(tokens).logits.log_softmax(-1)
        found = logs[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
        wanted.append(torch.nn.functional.pad(found, (1, 0)))
    for found in ranks.run(spec.layout, packed_log_probs, spec):
        for packed in found:
            torch.testing.assert_close(packed, torch.cat(wanted, 1), rtol=0, atol=1e-9)


def packed_log_probs(mesh: Mesh, spec: RunSpec) -> list[torch.Tensor]:
    lengths = torch.tensor([len(document) for document in DOCUMENTS])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    tokens = torch.tensor([[token for document in DOCUMENTS for token in document]])
    with Engine(spec, mesh=mesh) as engine:
        given: list[dict[str, torch.Tensor]] = [{"position_ids": positions}, {"seq_lens": lengths}]
        return [engine.log_probs({"input_ids": tokens} | more) for more in given]  # type: ignore[misc]


@pytest.mark.parametrize("objective", ["cross-entropy", "policy"])
def test_experts_with_losses_of_their_own_equal_one_device(
    ranks: Ranks, tmp_path: Path, objective: str
) -> None:
    """Also of several batches before a step, of equally many tokens."""
    save_theirs(tmp_path / "float32", *MODELS["qwen3_moe"]).double().save_pretrained(tmp_path / "moe")
    keys = {"model__moe__aux_loss": 0.1, "model__moe__z_loss": 0.01}
    wanted: Steps | None = None
    for layout in ({}, {"dp": 2, "ep": 2, "zero": 3}, {"tp": 2}, {"pp": 2}):
        spec = spec_of(tmp_path / "moe", layout, **keys)
        # Targets of halves differ, and weigh their balances.
        for parts in (1, 2) if objective == "policy" else (1,):
            found: Steps = ranks.run(spec.layout, engine_steps, spec, objective, parts, 8, 12)[0]
            wanted = wanted or found
            assert_same_steps(found, wanted)


def test_biases_of_experts_follow_the_load_of_all_batches(ranks: Ranks, tmp_path: Path) -> None:
    save_theirs(tmp_path / "float32", *MODELS["deepseek_v3"]).double().save_pretrained(tmp_path / "moe")
    spec = spec_of(tmp_path / "moe", {"dp": 2, "ep": 2})
    whole, halves = (
        ranks.run(spec.layout, engine_steps, spec, "policy", parts, 8, 12)[0] for parts in (1, 2)
    )
    assert any(name.endswith("e_score_correction_bias") for name in whole.weights)
    assert_same_steps(halves, whole)


def test_padding_does_not_enter_the_balance_of_experts(ranks: Ranks, tmp_path: Path) -> None:
    save_theirs(tmp_path / "float32", *MODELS["qwen3_moe"]).double().save_pretrained(tmp_path / "moe")
    for length, layout in ((11, {"tp": 2}), (12, {"dp": 2})):
        spec = spec_of(tmp_path / "moe", layout, model__moe__aux_loss=0.1)
        with pytest.raises(RanksFailedError, match="give each data rank equally many rows, whose length is"):
            ranks.run(spec.layout, engine_steps, spec, "cross-entropy", 1, 6, length)
