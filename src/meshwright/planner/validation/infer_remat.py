"""Recomputation in MaxText's words, from a row's comment: a policy's name, or where each output waits."""

from __future__ import annotations

import re
from dataclasses import replace

from meshwright.planner.cost.remat import OUTPUTS, POLICIES, Output, Remat
from meshwright.planner.cost.software import Recipe, SoftwareStack
from meshwright.planner.validation.table import Row, short

_POLICY = rf"remat(?:[ _]policy)?[\"']? ?[=:]? ?[\"']?({'|'.join(sorted(POLICIES, key=len, reverse=True))})"
"""A policy's name after the word remat; of a longer name that is not known, what it begins with."""
_PLACES = ("offload", "device", "remat")
_PLACE = rf"\b({'|'.join(OUTPUTS)}|qkv_proj|mlpwi)\b[\"']? ?[=:]? ?[\"']?({'|'.join(_PLACES)})\b"
"""An output, and where it waits: in the host's memory, on the device, or nowhere."""
_GIVEN = r"remat(?:[ _]policy[\"']? ?[=:]?|[\"']? ?[=:]) ?[\"']?([a-z][\w-]*)"
"""A policy that a comment gives, known or not."""
_PLACED = r"(?<![\w.])([a-z]\w*)[\"']? ?[=:] ?[\"']?(offload|remat)\b"
"""Anything that a comment places, known or not."""
_OTHER_WORDS = ("context",)
"""Outputs whose names comments have in other senses."""
_DISTINCT = "|".join(name for name in OUTPUTS if name not in _OTHER_WORDS)
_SOMEWHERE = rf"\b({_DISTINCT}|qkv_proj|mlpwi)\b[\"']? ?[=:] ?[\"']?([a-z]\w*)"
"""An output whose name is no other word, and where it waits, known or not."""
_TOGETHER: dict[str, tuple[Output, ...]] = {
    "qkv_proj": ("query_proj", "key_proj", "value_proj"),
    "mlpwi": ("mlpwi_0", "mlpwi_1"),
}
"""Names of several outputs that one product makes."""
_NARROW = r"weight_dtype[\"']? ?[=:]? ?[\"']?(?:bfloat16|bf16)"
"""Words for weights that are stored in bf16, of whose format gradients and moments are, too."""


def policy_of(row: Row) -> str:
    """The recomputation that a comment names: none, selective or full; an empty text where it does not tell.

    A 'custom' policy tells only with the places of outputs.
    """
    if _places(row):
        return "selective"
    named = _named(row)
    return "" if named in ("", "custom") else "full" if named == "full" else "selective"


def with_words(stack: SoftwareStack, row: Row) -> SoftwareStack:
    """A program that keeps outputs by name, with the policy and the states that a row's comment names."""
    if places := _places(row):
        device, host = (
            tuple(name for name in OUTPUTS if places.get(name) == at) for at in ("device", "offload")
        )
        stack = replace(stack, remat=Remat(device, host))
        row.derive("remat", ", ".join(f"{name}={at}" for name, at in places.items()))
    elif named := _named(row):
        stack = replace(stack, remat=POLICIES[named])
    if row.says(_NARROW):
        row.derive("weight_dtype", "bf16")
        stack = replace(stack, recipe=Recipe(stack.recipe.copy, gradient=2, optimiser=6, wide=0))
    return stack


def note_unknown(row: Row) -> None:
    """Note policies, outputs and places of a row's comment that are not known."""
    if (given := row.says(_GIVEN)) and (word := given[1].lower()) not in POLICIES:
        instead = f"taken for '{named}'" if (named := _named(row)) else "not counted"
        row.notes.append(
            f"the remat policy '{short(word)}' of its comment is not known and {instead}; known are "
            f"{', '.join(POLICIES)}"
        )
    outputs, where = (*OUTPUTS, *_TOGETHER), row.words["where"]
    for name, place in re.findall(_PLACED, where):
        if name not in (*outputs, "schedule", "remat", "policy", "remat_policy"):
            row.notes.append(
                f"the output '{short(name)}' that its comment places ({place}) is unknown and not counted; "
                f"known are {', '.join(outputs)}"
            )
    for name, place in re.findall(_SOMEWHERE, where):
        if place not in _PLACES:
            row.notes.append(
                f"the place '{short(place)}' of {name} in its comment is unknown and not counted; known are "
                f"{', '.join(_PLACES)}"
            )


def _named(row: Row) -> str:
    """The policy that the row's comment names, or an empty text."""
    found = row.says(rf"{_POLICY}(?:_\w+)?")
    return found[1].lower() if found else ""


def _places(row: Row) -> dict[Output, str]:
    """Outputs -> where the row's comment says that they wait."""
    found: dict[Output, str] = {}
    for name, place in re.findall(_PLACE, row.words["where"]):
        for output in _TOGETHER.get(name, (name,)):
            found[output] = place
    return found
