"""Clipped steps of every layout equal one device's, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from covering import marked, name
from equality import equal_to_one_device
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.verify import verify
from optimiser_cases import BASE, LAYOUTS
from ranks import Ranks
from small import spec_of

SMALL_STEPS = {"train.steps": 6, "train.lr": 0.003, "train.schedule": "constant"}
"""With these, norms of steps 3 to 5 are above the mean of the first two."""
ZCLIP = {"train__zclip": 0.1, "train__zclip_warmup": 2, "train__zclip_alpha": 0.5}
CASES: list[dict[str, object]] = [ZCLIP | {"train__clip": "none"} | layout for layout in LAYOUTS]
CASES += [{**ZCLIP, "train__clip": clip, "layout__dp": 2, "layout__zero": 1} for clip in (0.5, 2.0)]
EACH: list[dict[str, object]] = [
    {"train__clip_parameter": 0.05, "train__clip": clip} | layout
    for layout, clip in zip(LAYOUTS, ("none", 0.1) * len(LAYOUTS), strict=False)
]
TIED = {"model__tied": "true", "train__clip_parameter": 0.02}
CASES += [*EACH, ZCLIP | {"train__clip_parameter": 0.05, "layout__dp": 2, "layout__zero": 3}]
CASES += [TIED | {"layout__pp": 2}, TIED | {"layout__tp": 2, "layout__dp": 2, "layout__zero": 3}]


@pytest.mark.parametrize("case", marked(EACH, EACH[1::6]), ids=name)
def test_messages_of_clipped_parameters_are_the_planners(ranks: Ranks, case: dict[str, object]) -> None:
    equal_to_one_device(ranks, spec_of(BASE, **case), 1e-9)


def verified(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    """The result of five steps."""
    return verify(spec, mesh, 5)


QUICK = [CASES[number] for number in (14, 23, 31)]
"""Each way to clip, on data, context and pipeline ranks."""


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_clipped_steps_equal_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    spec = spec_of(BASE | SMALL_STEPS, **case)
    found = ranks.run(spec.layout, verified, spec)[0]
    assert found["equal"], found["first"]["sentence"]
    assert found["worst_relative"] <= 1e-9, found["worst_name"]
