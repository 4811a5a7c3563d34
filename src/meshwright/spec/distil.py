"""The section `[distil]` of a run file: knowledge distillation from a frozen teacher."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from meshwright.spec.base import MAX_RANKS, FrozenModel


class DistilSpec(FrozenModel):
    """Teacher, its layout over the run's own ranks, and the loss that replaces plain cross entropy."""

    teacher: str | None = Field(
        None, min_length=1, description="folder of the teacher: a run's, or an HF model's"
    )
    logits: str | None = Field(
        None,
        min_length=1,
        description="folder of a teacher's log-probabilities, as `meshwright distil` writes it, in place of "
        "a teacher",
    )
    loss: Literal["forward_kl", "reverse_kl"] = Field(
        "forward_kl",
        description="KL of the student from the teacher, sum p log(p/q) (Hinton et al. 2015), or of the "
        "teacher from the student, sum q log(q/p) (Gu et al. 2024, MiniLLM)",
    )
    weight: float = Field(
        0.5, gt=0, le=1, description="share of the KL in the loss; the rest is cross entropy"
    )
    temperature: PositiveFloat = Field(
        1.0, description="divides both logits in the KL, which is then multiplied by its square"
    )
    top_k: PositiveInt | None = Field(
        None,
        description="the teacher's likeliest tokens that the KL tells apart, all others counting as one; "
        "'none' for the whole vocabulary",
    )
    hidden: float = Field(
        0.0,
        ge=0,
        description="weight of the mean squared error between the hidden states that the heads take; needs "
        "equal widths",
    )
    tp: int = Field(1, ge=1, le=MAX_RANKS, description="the teacher's tensor-parallel ranks")
    pp: int = Field(1, ge=1, le=MAX_RANKS, description="the teacher's pipeline ranks")
    cp: int = Field(1, ge=1, le=MAX_RANKS, description="the teacher's context-parallel ranks")
    ep: int = Field(1, ge=1, le=MAX_RANKS, description="the teacher's expert-parallel ranks")
    zero: Literal[0, 3] = Field(
        0, description="3 shards the teacher's parameters over its data ranks, 0 replicates them"
    )
