"""Dry runs of 1,024 and 16,384 ranks: their groups, collectives, waits and kernels may only fall."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from covering import some
from meshwright.dryrun.rank_step import rehearse
from meshwright.parallel.flat_param import ParamSlot
from meshwright.parallel.fsdp_unit import Unit
from meshwright.spec import RunSpec, load

RECORDED = tomllib.loads((Path(__file__).parent / "counts.toml").read_text())
CPU = torch.device("cpu")
MOST_GROUPS = 30
MOST_START_SECONDS = 60.0

SEQ_LEN = 512
DENSE = {
    "model.preset": "llama3-8b", "model.layers": 4, "data.seq_len": SEQ_LEN, "layout.micro_batch": 1,
    "precision.compute": "bf16", "recompute.policy": "selective",
}  # fmt: skip
MOE = DENSE | {
    "model.preset": "mixtral-8x7b", "model.layers": 8, "layout.ep": 8, "layout.tp": 8, "layout.pp": 4,
    "layout.schedule": "zb-v", "layout.zero": 1,
}  # fmt: skip
FIVE = {
    "model.layers": 8,
    "layout.tp": 8,
    "layout.cp": 2,
    "layout.pp": 4,
    "layout.schedule": "interleaved",
    "layout.zero": 2,
}
CASES: dict[str, tuple[dict[str, object], int]] = {
    "hybrid": (DENSE | {"layout.zero": 3, "layout.dp": 64}, 64),
    "tensor": (DENSE | {"layout.tp": 8, "layout.zero": 3, "layout.dp": 32}, 256),
    "five axes": (DENSE | FIVE, 64),
    "experts": (MOE, 32),
}
"""Name -> (keys, ranks of the axes given there); the others replicate where dp is given, else are dp."""


def spec_of(name: str, world: int) -> RunSpec:
    """The case on `world` ranks, with four microbatches a rank."""
    keys, ranks = CASES[name]
    rest = "layout.replicate" if "layout.dp" in keys else "layout.dp"
    given = keys | {rest: world // ranks, "data.corpus": "synthetic"}
    sequences = 4 * int(str(given["layout.dp"])) * int(str(given.get("layout.replicate", 1)))
    given |= {"train.batch_tokens": sequences * SEQ_LEN}
    return load(None, [(key, str(value)) for key, value in given.items()])


def counted(name: str, world: int) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The counts of a case, and of these the kernels that zero the padding of parameters whose rows the ranks
    share unevenly: one for each buffer that gradients are packed into. More ranks leave more of them."""
    zeroed, spec = Counter[str](), spec_of(name, world)

    def place(unit: Unit, slot: ParamSlot, _place: Any = Unit._place) -> Any:
        uneven = slot.piece.local_shape[slot.dim] % unit.ranks != 0
        zeroed[".".join(slot.key.split(".")[:2])] += uneven and slot.key not in unit.arrived
        return _place(unit, slot)

    with patch.object(Unit, "_place", place):
        counts = rehearse(spec, 0, CPU).counts
    most = max(count for unit, count in zeroed.items() if unit.startswith("blocks."))
    padding = {"kernels": zeroed.total(), "kernels_a_block": most / spec.microbatches}
    return counts, padding


@pytest.mark.parametrize("name", some(CASES, ("five axes",)))
def test_counts_do_not_grow_with_the_world_and_only_fall(name: str) -> None:
    (few, padded), (many, more_padded) = (counted(name, world) for world in (1024, 16384))
    seconds = [(each["setup"].pop("seconds"), each["step"].pop("seconds")) for each in (few, many)]
    without = [
        {**each, "step": {key: value - zeroed.get(key, 0) for key, value in each["step"].items()}}
        for each, zeroed in ((few, padded), (many, more_padded))
    ]
    assert without[0] == without[1]
    flat = {f"{part}.{key}": value for part in many for key, value in many[part].items()}
    recorded = RECORDED.get(name, {})
    grown = {key: value for key, value in flat.items() if value > recorded.get(key, -1)}
    assert not grown, f"more than counts.toml has for '{name}': {grown}"
    assert flat == recorded, f"less than counts.toml has for '{name}': write the new numbers there"
    assert flat["setup.groups"] <= MOST_GROUPS and flat["step.groups"] == 0
    assert flat["step.host_collectives"] == 0
    assert seconds[1][0] < MOST_START_SECONDS
    # Python that walks all ranks in a step would show: 16 times the ranks, the same step.
    assert seconds[1][1] < 2 * seconds[0][1] + 1
