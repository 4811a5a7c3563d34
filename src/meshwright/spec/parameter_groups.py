"""The parameters that are trained, and the learning rate and weight decay of each: patterns of names in
`[train]`, and factors of muP.

In a pattern `*` stands for any characters, `?` for one, and `[abc]` for one of these. Of several that match a
name the one with most other characters holds, wherever it stands: so a table means the same in any order.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import NamedTuple

from meshwright.spec.architecture import RANDOM, Architecture
from meshwright.spec.errors import UserError
from meshwright.spec.lora import LoraSpec, is_adapter, with_adapters
from meshwright.spec.mup import rate_factor, widths_are_known
from meshwright.spec.parameters import Parameter, parameters
from meshwright.spec.sections import Sections
from meshwright.spec.sharded_tensor import is_matrix


class Group(NamedTuple):
    """How a parameter is updated."""

    factor: float
    """Factor on the learning rate."""
    decay: float
    """Weight decay; a step shrinks the parameter by rate x factor x decay of it."""


def run_parameters(spec: Sections) -> Mapping[str, tuple[Parameter, ...]]:
    """The parameters of each unit of a run, adapters included; `train.frozen` names some that are not
    trained, and beside adapters none of the model's own are."""
    return _run_parameters(spec.model, spec.train.frozen, spec.lora)


@lru_cache(maxsize=8)  # as `parameters`
def _run_parameters(
    model: Architecture, frozen: tuple[str, ...], lora: LoraSpec | None
) -> Mapping[str, tuple[Parameter, ...]]:
    units = parameters(model, frozen)
    return units if lora is None else with_adapters(units, lora)


def frozen_names(spec: Sections) -> frozenset[str]:
    """Names of the parameters that a run does not train."""
    return frozenset() if spec.trains_all else _frozen_names(spec.model, spec.train.frozen, spec.lora)


@lru_cache(maxsize=8)
def _frozen_names(model: Architecture, frozen: tuple[str, ...], lora: LoraSpec | None) -> frozenset[str]:
    every = _run_parameters(model, frozen, lora).values()
    return frozenset(p.name for unit in every for p in unit if not p.trainable)


def trained_names(spec: Sections) -> frozenset[str]:
    """Names of the parameters that a run trains."""
    return _trained_names(spec.model, spec.train.frozen, spec.lora)


@lru_cache(maxsize=8)
def _trained_names(model: Architecture, frozen: tuple[str, ...], lora: LoraSpec | None) -> frozenset[str]:
    every = _run_parameters(model, frozen, lora).values()
    return frozenset(p.name for unit in every for p in unit if p.trainable)


def trained_parameters(spec: Sections) -> tuple[int, int]:
    """The number of parameters that a run trains, and that of all, adapters included."""
    every = [p for unit in run_parameters(spec).values() for p in unit]
    return sum(prod(p.shape) for p in every if p.trainable), sum(prod(p.shape) for p in every)


def trains_adapters(spec: Sections) -> bool:
    """True if some of the trained parameters are adapters."""
    return any(map(is_adapter, trained_names(spec)))


def given_names(spec: Sections) -> frozenset[str]:
    """Names of the parameters whose first values are in the folders that a trained model is read from."""
    every = [p.name for unit in run_parameters(spec).values() for p in unit]
    goes_on = spec.lora is not None and spec.lora.weights != RANDOM
    return frozenset(name for name in every if goes_on or not is_adapter(name))


def adapters_beside(spec: Sections) -> Mapping[str, tuple[Parameter, ...]]:
    """The adapters of each weight that has any, by its name."""
    return {p.name: p.adapters for unit in run_parameters(spec).values() for p in unit if p.adapters}


def group_of(spec: Sections, name: str, dims: int) -> Group:
    """The group of the parameter `name` (as in `Decoder.named_parameters`) of `dims` dims.

    muP divides the decay by its factor, so that rate x decay is as at the base (Wang & Aitchison 2024, arXiv
    2405.13698); that of `train.lr_factors` acts on both.
    """
    train, width = spec.train, rate_factor(spec.model, spec.train.optimiser_kind, name, dims)
    usual = train.weight_decay if is_matrix(name, dims) else 0.0
    decay = _chosen(train.weight_decays, name, usual)
    return Group(_chosen(train.lr_factors, name, 1.0) * width, decay / width)


def _chosen(table: Mapping[str, float], name: str, usual: float) -> float:
    """The value of the most specific pattern that matches `name`, or `usual` if there is none."""
    matching = [pattern for pattern in table if fnmatchcase(name, pattern)]
    return table[max(matching, key=_specific)] if matching else usual


def _specific(pattern: str) -> int:
    """Number of characters that stand for themselves."""
    return len(re.sub(r"\[!?[^]]+\]|[*?]", "", pattern))


def patterns_match_parameters(spec: Sections) -> None:
    """Each pattern matches a parameter, and no two that match one are as specific with other values."""
    freezes = "train.frozen" if spec.lora is None else "[lora]"
    tables = {"lr_factors": spec.train.lr_factors, "weight_decays": spec.train.weight_decays}
    if not any(tables.values()):
        return
    every = [parameter for unit in run_parameters(spec).values() for parameter in unit]
    names = [parameter.name for parameter in every]
    trained = [parameter.name for parameter in every if parameter.trainable]
    for key, table in tables.items():
        for pattern in table:
            _matches_one_of(names, pattern, f"train.{key}.{pattern}:")
            if not any(fnmatchcase(name, pattern) for name in trained):
                raise UserError(
                    f"train.{key}.{pattern}: every parameter that it matches is frozen by {freezes}, so "
                    f"it has no effect; leave it out, or train one of them"
                )
        for name in names:
            matching = [pattern for pattern in table if fnmatchcase(name, pattern)]
            best = [pattern for pattern in matching if _specific(pattern) == max(map(_specific, matching))]
            for one, other in itertools.pairwise(best):
                if table[one] == table[other]:
                    continue
                raise UserError(
                    f"train.{key}.{other}: {table[other]:g} and {table[one]:g} of '{one}', which is as "
                    f"specific, both match {name}; give '{name}' too, or one of them a longer pattern"
                )


def _matches_one_of(names: Sequence[str], pattern: str, what: str) -> None:
    """Raise `UserError`, which begins with `what`, if a pattern matches no name."""
    if not any(fnmatchcase(name, pattern) for name in names):
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
        raise UserError(f"{what} matches no parameter of the model; the nearest are {', '.join(near)}")


def something_is_trained(spec: Sections) -> None:
    """Each pattern of `train.frozen` matches a parameter, and some parameter matches none."""
    if not spec.train.frozen:
        return
    every = [parameter for unit in run_parameters(spec).values() for parameter in unit]
    for pattern in spec.train.frozen:
        _matches_one_of([parameter.name for parameter in every], pattern, f"train.frozen: '{pattern}'")
    if not any(parameter.trainable for parameter in every):
        patterns = " and ".join(f"'{pattern}'" for pattern in spec.train.frozen)
        raise UserError(
            f"train.frozen: no parameter is left to train beside those of {patterns}; leave some out"
        )


GROUP_RULES = (patterns_match_parameters, something_is_trained, widths_are_known)
