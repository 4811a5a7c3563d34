"""Sweeps of `meshwright verify`: which layouts they check, what they find, and how they go on after failures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch

from meshwright import api
from meshwright.api import sweep as subject
from meshwright.launch.failure import RanksFailed
from meshwright.parallel.mesh import Mesh, build_mesh
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.layout import ContextMode, ScheduleName
from meshwright.verify.covering import Pairs
from meshwright.verify.sweep_layouts import SIZES, SweepLayouts, _cases
from small import spec_of

BASE = {
    "model.vocab_size": 61,
    "data.seq_len": 16,
    "train.batch_tokens": 8 * 16,
    "train.warmup_steps": 1,
}
MOE = {"model.moe.experts": 4, "model.moe.top_k": 2, "model.moe.ffn": 8}


def legal(spec: RunSpec, case: dict[str, Any]) -> bool:
    """True if the rules of a run accept the case."""
    tree = spec.to_json()
    tree["layout"] |= {key: value for key, value in case.items() if key != "policy"}
    try:
        found = RunSpec.model_validate(tree)
    except UserError:
        return False
    return found.microbatches <= 2 * found.layout.pp


def canonical(spec: RunSpec, case: dict[str, Any]) -> bool:
    """False for the second name of a layout: a switch of an axis of one rank, a looped schedule of one stage."""
    heads = max(1, spec.model.kv_heads // case["tp"])
    mixed = case["context_mode"] == "ring+ulysses" and heads % case["cp"] == 0
    return (
        (case["cp"] > 1 or case["context_mode"] == "ring")
        and not (mixed and case["cp"] == 2)
        and (case["tp"] > 1 or case["sequence_parallel"])
        and (case["pp"] > 1 or (case["schedule"], case["virtual"]) == ("1f1b", None))
        and (case["pp"] == 1 or case["virtual"] is not None)
        and (case["schedule"] not in ("interleaved", "bfs") or case["virtual"] > 1)
        and (case["dp"] * case["replicate"] * case["cp"] > 1 or case["zero"] == 0)
    )


@pytest.mark.parametrize("model", [{}, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_layouts_are_all_that_the_rules_accept(model: dict[str, object], ranks: int) -> None:
    spec = spec_of(BASE | model, model__layers=2)
    found = {tuple(case.items()) for case in _cases(spec, ranks) if case["policy"] == "none"}
    sizes = [size for size in (1, 2, 4) if size <= ranks]
    values: dict[str, list[Any]] = {name: sizes for name in SIZES} | {
        "zero": [0, 1, 2, 3],
        "sequence_parallel": [True, False],
        "context_mode": list(get_args(ContextMode)),
        "schedule": list(get_args(ScheduleName)),
        "virtual": [None, 1, 2],
        "micro_batch": [1, 2, 4, 8],
    }
    wanted = set()
    for axes in product(*(values[name] for name in SIZES)):
        world = dict(zip(SIZES, axes, strict=True))
        folded = world["ep"] * world["etp"]
        if world["replicate"] * world["dp"] * world["tp"] * world["cp"] * world["pp"] != ranks:
            continue
        if folded > ranks or (folded > 1 and not model):
            continue
        names = [name for name in values if name not in SIZES]
        for choices in product(*(values[name] for name in names)):
            case = world | dict(zip(names, choices, strict=True)) | {"policy": "none"}
            if canonical(spec, case) and legal(spec, case):
                wanted.add(tuple(case.items()))
    assert found == wanted
    assert len(found) > 20
