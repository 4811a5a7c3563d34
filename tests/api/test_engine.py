"""Engines on every layout equal transformers' model on one device: losses, gradients, steps, log-probs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_cases import (
    LAYOUTS,
    OBJECTIVES,
    Steps,
    assert_same_steps,
    engine_steps,
    own_rows,
    spec_of,
    their_log_probs,
    their_steps,
    trained_tokens,
    whole_batch,
)
from hf_models import CASES, save_theirs, transformers
from meshwright.api.engine import Engine
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from ranks import Ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HF folder of a model in float64."""
    made = tmp_path_factory.mktemp("model")
    save_theirs(made / "float32", *CASES["llama"]).double().save_pretrained(made / "hf")
    return made / "hf"


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """A function from an objective to the steps of transformers' model."""
    return cache(lambda objective: their_steps(folder, objective))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_layout_equals_one_device(
    ranks: Ranks, folder: Path, theirs: Any, layout: str, objective: str
) -> None:
    spec = spec_of(folder, LAYOUTS[layout])
    found: list[Steps] = ranks.run(spec.layout, engine_steps, spec, objective)
    assert_same_steps(found[0], theirs(objective))
