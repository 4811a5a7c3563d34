"""Widths learn alike with muP, and do not without (Yang et al. 2022): the coordinate check of the bench."""

from __future__ import annotations

import pytest

from coordinate_check import checked
from meshwright.spec import Layout
from ranks import Ranks

WIDTHS = [32, 64, 128, 256]


@pytest.mark.parametrize(
    ("optimiser", "flags"),
    [
        ("adamw", {}),
        pytest.param("lion", {}, marks=pytest.mark.full),
        pytest.param("muon", {}, marks=pytest.mark.full),
        pytest.param("adamw", {"model.moe.experts": 4, "model.moe.top_k": 2}, marks=pytest.mark.full),
        ("muon", {"model.moe.experts": 4, "model.moe.top_k": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "experts" * bool(value),
)
def test_steps_move_models_of_all_widths_alike_with_mup(
    ranks: Ranks, optimiser: str, flags: dict[str, object]
) -> None:
    """Changes over five steps as powers of the width: near 0 with muP, far from it without."""
    ((_, mup),) = ranks.run(Layout(), checked, WIDTHS, optimiser, True, 5, 1, flags)
    assert mup.keys() == {"embed", "blocks.0", "blocks.1", "logits"}
    assert all(abs(slope) < 0.15 for slope in mup.values()), mup
    ((_, standard),) = ranks.run(Layout(), checked, WIDTHS, optimiser, False, 5, 1, flags)
    assert standard["blocks.1"] > 0.4 and standard["logits"] > 0.18, standard
