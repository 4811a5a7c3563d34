"""`RunSpec`: the whole of a run as one frozen object; everything else reads it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import Field, ValidationInfo, model_validator

from meshwright.spec.base import FrozenModel
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.sections import (
    CheckpointSpec,
    DataSpec,
    NoRecompute,
    PrecisionSpec,
    RecomputeSpec,
    RecoverySpec,
    TrainSpec,
)


def _default_model() -> ModelSpec:
    return ModelSpec.model_validate({})


class RunSpec(FrozenModel):
    """Model + data + training + layout + precision + recompute + checkpoint + recovery.

    Validated once, by its parts' types and by `rules.check`, which raises `UserError`.
    """

    model: ModelSpec = Field(default_factory=_default_model)
    data: DataSpec = Field(default_factory=lambda: DataSpec())
    train: TrainSpec = Field(default_factory=lambda: TrainSpec())
    layout: Layout = Field(default_factory=lambda: Layout())
    precision: PrecisionSpec = Field(default_factory=lambda: PrecisionSpec())
    recompute: RecomputeSpec = Field(default_factory=NoRecompute)
    checkpoint: CheckpointSpec = Field(default_factory=lambda: CheckpointSpec())
    recovery: RecoverySpec = Field(default_factory=lambda: RecoverySpec())

    @model_validator(mode="before")
    @classmethod
    def _default_policy(cls, given: Any) -> Any:
        """`[recompute]` without a policy means what its keys say: `save` is selective, nothing is none."""
        if isinstance(given, dict) and isinstance(given.get("recompute"), dict):
            recompute = given["recompute"]
            if "policy" not in recompute:
                policy = "selective" if "save" in recompute else "none"
                given = {**given, "recompute": {**recompute, "policy": policy}}
        return given

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> RunSpec:
        from meshwright.spec import rules

        rules.check(self, (info.context or {}).get("ranks"))
        return self

    @property
    def batch_sequences(self) -> int:
        """Samples of one optimiser step, over all ranks."""
        return self.train.batch_tokens // self.data.seq_len

    @property
    def rank_sequences(self) -> int:
        """Samples of one optimiser step that one data rank reads."""
        return self.batch_sequences // self.layout.data_ranks

    @property
    def micro_batch(self) -> int:
        """Samples of one microbatch: `layout.micro_batch`, or what stays within 8,192 tokens.

        Where a pipeline has samples enough, it is left 2 x pp microbatches to be filled with.
        """
        if self.layout.micro_batch is not None:
            return self.layout.micro_batch
        most = max(1, 8192 // self.data.seq_len)
        if self.layout.pp > 1:
            most = min(most, max(1, self.rank_sequences // (2 * self.layout.pp)))
        sizes = range(1, min(most, self.rank_sequences) + 1)
        return max(size for size in sizes if not self.rank_sequences % size)

    @property
    def microbatches(self) -> int:
        """Gradient accumulation: microbatches of one rank in one optimiser step."""
        return self.rank_sequences // self.micro_batch

    def to_json(self) -> dict[str, Any]:
        """Plain JSON that `RunSpec.model_validate` reads back to an equal object."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """SHA-256 of the canonical JSON: equal specs have equal digests."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
