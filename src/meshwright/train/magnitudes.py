"""Magnitudes of adapters (Liu et al. 2024, DoRA) as a run begins: the lengths of the frozen weights' rows.

Splits and sends nothing: of a row that tensor ranks share, each reads or draws the whole.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from meshwright.checkpoint.weights import WeightParts, read_rectangle
from meshwright.model.blockwise_quantisation import rounded_to_blocks
from meshwright.model.init import init_part_
from meshwright.model.lora import squares_of_rows
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.flat_param import ParamSlot
from meshwright.parallel.fsdp_unit import Unit
from meshwright.parallel.parallelize import round_stored
from meshwright.parallel.precision import Formats
from meshwright.spec import RunSpec
from meshwright.spec.lora import MAGNITUDE


def begin_magnitudes(
    states: DataParallel, spec: RunSpec, weights: WeightParts | None, given: Collection[str]
) -> None:
    """Set this rank's magnitudes, but those `given` by name, from the weights beside them as the run stores
    these.

    The weights are stored already, drawn or taken out of `weights`. Local. Raises `UserError` for weights
    that are damaged.
    """
    places = {slot.key: (unit, slot) for unit in states.units for slot in unit.slots}
    for key, (unit, slot) in places.items():
        if not key.endswith(MAGNITUDE) or key in given or not slot.rows:
            continue
        frozen, weight = places[key.removesuffix(MAGNITUDE) + ".weight"]
        first, columns = slot.offset[0], weight.global_shape[1]
        begin, end = first - weight.offset[0], first - weight.offset[0] + slot.rows
        if weight.local_shape[1] == columns and begin >= 0 and end <= weight.rows:
            rows = frozen.values(weight)[begin:end]
        else:
            drawn = _read(weight, slot, weights) if weights else _drawn(weight, slot, spec, states.formats)
            rows = _as_stored(frozen, weight, drawn)
        unit.set_values(slot, squares_of_rows(rows).sqrt())
    round_stored(states)


def _read(weight: ParamSlot, magnitudes: ParamSlot, weights: WeightParts) -> Tensor:
    """The whole rows of a weight whose magnitudes these are."""
    rectangle = (magnitudes.offset[0], 0), (magnitudes.rows, weight.global_shape[1])
    return read_rectangle(weights.parts, weight.key, rectangle)


def _drawn(weight: ParamSlot, magnitudes: ParamSlot, spec: RunSpec, formats: Formats) -> Tensor:
    """As `_read`, of initial weights."""
    indices = [*magnitudes.indices(), torch.arange(weight.global_shape[1])]
    rows = torch.empty([len(each) for each in indices], dtype=formats.master)
    whole = torch.Size(weight.global_shape)
    init_part_(rows, spec.model, seed=spec.train.seed, name=weight.key, index_vectors=indices, shape=whole)
    return rows


def _as_stored(unit: Unit, weight: ParamSlot, rows: Tensor) -> Tensor:
    """Rows of a weight rounded as the unit that stores it rounds them."""
    rounded = (rows.bfloat16() if unit.formats.rounded else rows).to(unit.formats.compute)
    form = weight.piece.quantised
    return (rounded if form is None else rounded_to_blocks(rounded, form)).to(unit.stored.device)
