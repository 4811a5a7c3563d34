"""Learning rates and weight decays of single parameters, written apart from `spec/parameter_groups.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshwright.spec import RunSpec


def factor_and_decay(spec: RunSpec, name: str, dims: int) -> tuple[float, float]:
    """The factor on the learning rate of a parameter of `dims` dims, and its weight decay.

    With muP (Yang et al. 2022, table 3) rates of matrices fall with their fan-in, and Muon's with the root of
    it where the fan-out grows too (Yang et al. 2023); the product of rate and decay does not.
    """
    train, model = spec.train, spec.model
    slower = 1.0
    if model.mup_base_hidden is not None and dims > 1 and "embed" not in name:
        slower = model.hidden / model.mup_base_hidden
        if train.optimiser == "muon" and "blocks" in name and "router" not in name:
            slower **= 0.5
    decay = train.weight_decay if dims > 1 else 0.0
    return _of(train.lr_factors, name, 1.0) / slower, _of(train.weight_decays, name, decay) * slower


def _of(table: Mapping[str, float], name: str, usual: float) -> float:
    """The value of the pattern with most characters besides * and ? that matches the whole name."""
    best, found = -1, usual
    for pattern, value in table.items():
        expression = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
        own = len(re.sub(r"[*?]", "", pattern))
        if own > best and re.fullmatch(expression, name):
            best, found = own, value
    return found
