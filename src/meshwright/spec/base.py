"""Base class of the spec's parts: a frozen model that refuses unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A frozen part of a `RunSpec`; equal parts hash and compare equal."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)
