"""The parameters that are trained, and learning rates and weight decays of single ones, written apart from
`spec/parameter_groups.py`."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.spec import RunSpec
from meshwright.verify.reference.lora import is_adapter
from meshwright.verify.reference.patterns import matches, parts


def is_frozen(spec: RunSpec, name: str) -> bool:
    """True for a parameter that is not trained."""
    if spec.lora is not None:
        return not is_adapter(name)
    return any(matches(pattern, name) for pattern in spec.train.frozen)


def multiplies(name: str, dims: int) -> bool:
    """True for matrices, also those of experts; a bias of experts has two dims and is none."""
    return dims > 1 and not name.endswith("_bias")


def factor_and_decay(spec: RunSpec, name: str, dims: int) -> tuple[float, float]:
    """The factor on the learning rate of a parameter of `dims` dims, and its weight decay.

    With muP (Yang et al. 2022, table 3) rates of matrices fall with their fan-in, and Muon's with the root of
    it where the fan-out grows too (Yang et al. 2023); the product of rate and decay does not.
    """
    train, model = spec.train, spec.model
    slower = 1.0
    matrix = multiplies(name, dims)
    if model.mup_base_hidden is not None and matrix and "embed" not in name:
        slower = model.hidden / model.mup_base_hidden
        if train.optimiser == "muon" and "blocks" in name and "router" not in name and "_gate." not in name:
            slower **= 0.5
    decay = train.weight_decay if matrix else 0.0
    return _of(train.lr_factors, name, 1.0) / slower, _of(train.weight_decays, name, decay) * slower


def _of(table: Mapping[str, float], name: str, usual: float) -> float:
    """The value of the pattern with most characters of its own that matches the whole name."""
    best, found = -1, usual
    for pattern, value in table.items():
        own = sum(len(part) == 1 and part not in "*?" for part in parts(pattern))
        if own > best and matches(pattern, name):
            best, found = own, value
    return found
