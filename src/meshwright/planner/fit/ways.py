"""The ways of training a model that `fit` tries, from the most memory to the least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.planner.search.request import PlanRequest
from meshwright.spec.load import Overrides

RANK = "16"
"""Rank of adapters, where none is given."""


@dataclass(frozen=True)
class Way:
    """A way of training: dotted keys, with their texts, that make a run one of it."""

    name: str
    title: str
    keys: Mapping[str, str]
    adapters: bool = False
    """True if adapters alone are trained."""

    def overrides(self, request: PlanRequest) -> Overrides:
        """The request's dotted keys and those of this way, which take precedence. Raises `UserError`."""
        keys, given = dict(self.keys), request.given_in("lora")
        if self.adapters:
            keys = {} if "rank" in given else {"lora.rank": RANK}
            keys |= self.keys
        elif any(f"lora.{name}" not in dict(request.overrides) for name in given):  # the run file's own
            keys["lora"] = "none"
        left = [(key, text) for key, text in request.overrides if key not in keys]
        if not self.adapters:
            left = [(key, text) for key, text in left if not key.startswith("lora.")]
        return [*left, *keys.items()]


_ON_DEVICE = {"train.offload": "none"}
WAYS = (
    Way("full", "full fine-tuning", _ON_DEVICE),
    Way("full-8bit", "full, 8-bit AdamW", {"train.optimiser": "adamw8bit", **_ON_DEVICE}),
    Way("full-offload", "full, moments on the host", {"train.offload": "host"}),
    Way(
        "full-bf16",
        "full in bf16, 8-bit AdamW",
        {"precision.master": "bf16", "train.optimiser": "adamw8bit", **_ON_DEVICE},
    ),
    Way("lora", "LoRA", {"lora.quantise": "none", **_ON_DEVICE}, adapters=True),
    Way("qlora", "QLoRA", {"lora.quantise": "nf4", **_ON_DEVICE}, adapters=True),
)
