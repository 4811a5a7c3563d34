"""The ways in which a model fits some GPUs, trained or served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshwright.api.options import Option, positive, whole
from meshwright.api.options import tokens as token_count
from meshwright.hardware.cluster import Cluster
from meshwright.planner.fit.fit import FitRequest, Fits
from meshwright.planner.fit.fit import fit as fit_of
from meshwright.spec import RunSpec
from meshwright.spec.load import Overrides


def fit(
    model: str | Path | RunSpec,
    *,
    gpu: Annotated[str | Cluster, Option("a GPU by its cluster's name, or a hardware file", "NAME", str)],
    count: Annotated[int, Option("GPUs, all of one node", "N", whole(1))] = 1,
    seq_len: Annotated[int | None, Option(
        "tokens of a sequence, trained on or served; default the run's, up to 4096", "S", token_count(1024)
    )] = None,
    batch: Annotated[int, Option("sequences that are served at a time", "N", whole(1))] = 1,
    host_memory: Annotated[float | None, Option(
        "GB of the node's own memory, for moments that are kept there", "GB", positive)] = None,
    overrides: Overrides = (),
) -> Fits:  # fmt: skip
    """How each way of training a model, and of serving it, fits `count` GPUs, without torch.

    `model` is what `plan` takes; `overrides` are dotted keys with their texts. The answer has `advice`, a
    sentence; `training`, with the layout, the bytes of the fullest GPU, the probability that it fits, the
    longest sequences, the largest microbatch and the command of each way; `serving`, the same of each format
    of weights; `best`, the way that is advised; and `to_json()`. Raises `UserError`.
    """
    memory = None if host_memory is None else 1e9 * host_memory
    return fit_of(FitRequest(model, gpu, count, seq_len, batch, memory, overrides))
