"""Loss, bits per byte and perplexity of a text, by source."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.collectives import start_all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch, SplitReader


@dataclass(frozen=True)
class Likelihood:
    """The negative log-likelihood of a text in nats, its tokens that were predicted, and its UTF-8 bytes."""

    nll: float
    tokens: int
    utf8_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per UTF-8 byte; None for tokens that spell nothing."""
        return self.nll / math.log(2) / self.utf8_bytes if self.utf8_bytes else None

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where that is too large for a number."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return all of these as plain JSON."""
        return {
            "loss": self.loss,
            "bits_per_byte": self.bits_per_byte,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "tokens": self.tokens,
            "bytes": self.utf8_bytes,
        }


def total(parts: Sequence[Likelihood]) -> Likelihood:
    """Return the likelihood of several texts together."""
    return Likelihood(
        math.fsum(part.nll for part in parts),
        sum(part.tokens for part in parts),
        sum(part.utf8_bytes for part in parts),
    )


def likelihoods(
    reader: SplitReader, nll: Callable[[Batch], Tensor], mesh: Mesh, max_tokens: int | None = None
) -> list[Likelihood]:
    """Return the likelihood of each source's share of the first `max_tokens` targets (default all).

    All ranks call this, each with the reader of its data rank; `nll` gives this rank's share of a batch
    (`train.nll.nll`). Raises the error of a batch that could not be read.
    """
    sources = range(len(reader.split.sizes))
    found = torch.zeros(len(sources), 2, dtype=torch.float64, device=mesh.device)
    for source in sources:
        for batch in mesh.control.together(partial(reader.batches, max_tokens, source)):
            found[source] += nll(batch)
        mesh.control.together(reader.check)
    start_all_reduce(found, mesh.world, "scalars").wait()
    sizes = mesh.control.together(lambda: reader.split.bytes_by_source(max_tokens))
    return [
        Likelihood(nats, int(tokens), size)
        for (nats, tokens), size in zip(found.tolist(), sizes, strict=True)
    ]
