"""The choice of a next token: the likeliest, or a draw at a temperature from the top k or the top p.

A draw is a function of (seed, number of the request, position of the token), so neither the other requests of
a batch nor the layout changes what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwright.kernels.splitmix64 import mix64_, shift, stream
from meshwright.spec import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Temperature 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature),
    after keeping the `top_k` likeliest and, of these, the fewest that hold `top_p` of the probability
    (Holtzman et al. 2020). Raises `UserError` for values out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise UserError(f"generate: seed {self.seed} is out of range; give 0 or more, below 2**63")
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(
                f"generate: temperature {self.temperature} is out of range; give 0 (greedy) or more"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"generate: top_k {self.top_k} keeps no token; give 1 or more")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise UserError(f"generate: top_p {self.top_p} is out of range; give more than 0 and at most 1")
        for name in ("top_k", "top_p"):
            if self.temperature == 0.0 and getattr(self, name) is not None:
                raise UserError(
                    f"generate: {name} {getattr(self, name)} has no effect at temperature 0, which takes the "
                    f"likeliest token; give a temperature, such as 0.7, or remove it"
                )

    def choose(self, logits_BV: Tensor, requests: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Token ids (B,): row b is of request `requests[b]`, and its token will stand at `positions[b]`."""
        if self.temperature == 0.0:
            return _likeliest(logits_BV)
        exact = logits_BV.double()
        scores = (exact - exact.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        shares = scores.softmax(-1)
        if self.top_p is not None:
            ordered, order = shares.sort(descending=True, stable=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # the likeliest one always stays
            shares = shares.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), 0.0)
        # In the order of ids: in that of shares, last bits that swap two tokens would move all draws between.
        ends = shares.cumsum(-1)
        drawn = self._uniform(requests, positions).to(ends.device).unsqueeze(1) * ends[:, -1:]
        # The first token whose share ends beyond what was drawn; one without a share is never that.
        return (ends <= drawn).sum(-1)

    def _uniform(self, requests: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Numbers (B,) in float64 from 0 to below 1, multiples of 2^-53."""
        of_requests = mix64_(stream(torch.tensor(requests), self.seed))
        mixed = mix64_(of_requests + stream(torch.tensor(positions), 0))
        return shift(mixed, 11).double() * 2.0**-53


def _likeliest(logits_BV: Tensor) -> Tensor:
    """The first of the largest (B,). On the CPU by NumPy, which compares eight numbers and more at once."""
    if logits_BV.device.type != "cpu":
        return logits_BV.argmax(-1)
    exact = torch.promote_types(logits_BV.dtype, torch.float32)
    return torch.from_numpy(np.asarray(logits_BV.detach().to(exact).numpy().argmax(-1)))
