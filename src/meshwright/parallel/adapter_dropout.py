"""Dropout of adapters' inputs under a layout: which tokens a rank has, and what a recomputing forward drops.

Splits and sends nothing. Each stage's forward of a microbatch sets the keys of its tokens
(`model/lora_dropout.py`). A block that recomputes is given them beside its input, since its second forward
runs in the backward, when others may be set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.model.lora_dropout import TokenKeys, token_keys
from meshwright.parallel.context_parallel import share
from meshwright.parallel.stage import Microbatch
from meshwright.spec import RunSpec


class AdapterDropout:
    """The keys of the tokens of a rank, from the number of updates that a run has taken."""

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        self.keys, self.update = TokenKeys(), 0
        self._spec, self._mesh = spec, mesh
        self.active = spec.lora is not None and spec.lora.dropout > 0

    def begin(self, microbatch: Microbatch) -> None:
        """Set the keys for the forward of a microbatch; without gradients nothing is dropped."""
        if not (self.active and torch.is_grad_enabled()):
            self.keys.current = None
            return
        device, context = self._mesh.device, self._mesh.context
        length = microbatch.tokens.shape[1] * context.size
        places = share(torch.arange(length).unsqueeze(0), context).squeeze(0)
        slots, places = (each.to(device, non_blocking=True) for each in (microbatch.slots, places))
        self.keys.current = token_keys(self._spec.train.seed, self.update, slots, places)

    def before_recompute(self, blocks: Iterable[nn.Module]) -> None:
        """Make each block's `forward` take the keys first, before it is wrapped to recompute."""
        for block in blocks if self.active else ():
            block.forward = partial(self._with_keys, block.forward)

    def after_recompute(self, blocks: Iterable[nn.Module]) -> None:
        """Make each block's wrapped `forward` be given the keys that are set."""
        for block in blocks if self.active else ():
            block.forward = partial(self._give_keys, block.forward)

    def _with_keys(self, forward: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any) -> Any:
        self.keys.current = keys
        return forward(*args, **kwargs)

    def _give_keys(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(self.keys.current, *args, **kwargs)
