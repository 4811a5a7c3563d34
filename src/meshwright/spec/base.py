"""Base class of the spec's parts: a frozen model that refuses unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MAX_LAYERS = 10_000
"""Most layers of a model: each is listed."""
MAX_HEADS = 2**16
"""Most heads, channels of a head, and experts."""
MAX_WIDTH = 2**20
"""Most channels of a layer. With all of them at their bounds, a tensor's bytes are still a 64-bit number."""
MAX_LENGTH = 2**31
"""Most tokens of a vocabulary, of a sequence, and of a model's positions."""
MAX_RANKS = 2**20
"""Most ranks of a layout."""
MAX_BATCH = 2**40
"""Most tokens of an optimiser step."""


class FrozenModel(BaseModel):
    """A frozen part of a `RunSpec`; equal parts hash and compare equal."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)
