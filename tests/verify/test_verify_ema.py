"""The moving average of the weights under every layout equals one device's, in float64."""

from __future__ import annotations

import pytest
import torch

from covering import marked, name
from equality import equal_to_one_device
from meshwright.verify.reference.updates import averaged
from optimiser_cases import BASE, LAYOUTS
from ranks import Ranks
from small import spec_of

CASES: list[dict[str, object]] = [
    *LAYOUTS,
    {"train__optimiser": "muon", "layout__dp": 4, "layout__zero": 3},
    {"precision__compute": "bf16", "precision__master": "bf16", "layout__dp": 4, "layout__zero": 2},
]


@pytest.mark.parametrize("case", marked(CASES, [CASES[7], CASES[15]]), ids=name)
def test_the_moving_average_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    kinds = equal_to_one_device(ranks, spec_of(BASE, train__ema=0.9, **case), 1e-9)
    assert {"step 1 ema", "step 2 ema"} <= set(kinds)


def test_the_reference_average_is_of_all_weights_so_far() -> None:
    values = [torch.tensor([float(each)], dtype=torch.float64) for each in (8, 4, 2)]
    average = values[0]
    for value in values[1:]:
        average = averaged(average, value, 0.75)
    assert float(average) == pytest.approx(0.75**2 * 8 + 0.75 * 0.25 * 4 + 0.25 * 2, rel=1e-15)
