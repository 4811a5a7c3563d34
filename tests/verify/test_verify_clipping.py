"""Clipped steps of every layout equal one device's, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from test_verify_optimisers import BASE, LAYOUTS

from covering import marked, name
from meshwright.parallel.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.verify import verify
from ranks import Ranks
from small import spec_of

STEEP = {"train.steps": 6, "train.warmup_steps": 0, "train.lr": 0.05, "train.schedule": "constant"}
ZCLIP = {"train__zclip": 0.1, "train__zclip_warmup": 2, "train__zclip_alpha": 0.5}
CASES: list[dict[str, object]] = [ZCLIP | {"train__clip": "none"} | layout for layout in LAYOUTS]
CASES += [{**ZCLIP, "train__clip": clip, "layout__dp": 2, "layout__zero": 1} for clip in (0.5, 2.0)]


def verified(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    """The result of five steps."""
    return verify(spec, mesh, 5)


@pytest.mark.parametrize("case", marked(CASES, CASES[::3]), ids=name)
def test_clipped_steps_equal_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    spec = spec_of(BASE | STEEP, **case)
    found = ranks.run(spec.layout, verified, spec)[0]
    assert found["equal"], found["first"]["sentence"]
    assert found["worst_relative"] <= 1e-9, found["worst_name"]
