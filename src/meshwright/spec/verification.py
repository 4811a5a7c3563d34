"""A comparison with one device, as `meshwright verify` is asked for it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.sections import Sections


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `meshwright verify` that not every run goes with; `api.verify` says what they do."""

    spec: Sections
    precision: str = "exact"
    through: str | None = None
    onto: Sections | None = None
    sweep: bool = False
