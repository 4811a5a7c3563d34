"""Outputs of a block that a program keeps by their names, on the device or in its host's memory.

Names and policies are MaxText's (`layers/decoders.py`, `get_remat_policy`, and `configs/base.yml`, 2025): a
policy lists outputs, and 'custom' places each by itself. What is not kept is computed again. A block's input
is kept under every policy, on the device if it does not offload it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from pydantic.dataclasses import dataclass

from meshwright.spec.records import Record

Output = Literal[
    "decoder_layer_input",
    "query_proj",
    "key_proj",
    "value_proj",
    "context",
    "out_proj",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
]
"""A block's input, the outputs of its products, and attention's ('context'), with what its backward needs."""
OUTPUTS: tuple[Output, ...] = get_args(Output)


@dataclass(frozen=True)
class Remat(Record):
    """Where the outputs of a block wait for its backward."""

    device: tuple[Output, ...] = ()
    host: tuple[Output, ...] = ()
    """Offloaded: copied to the host in the forward, and back ahead of the backward."""

    @property
    def kept(self) -> frozenset[Output]:
        """The outputs that are not computed again."""
        return frozenset((*self.device, *self.host))


_QKV: tuple[Output, ...] = ("query_proj", "key_proj", "value_proj")
_GATES: tuple[Output, ...] = ("mlpwi_0", "mlpwi_1")
_PRODUCTS: tuple[Output, ...] = (*_QKV, "out_proj", *_GATES, "mlpwo")

POLICIES: Mapping[str, Remat] = {
    "full": Remat(),
    "minimal": Remat(_PRODUCTS),
    "minimal_with_context": Remat((*_PRODUCTS, "context")),
    "minimal_flash": Remat((*_PRODUCTS, "context")),
    "minimal_offloaded": Remat((), _PRODUCTS),
    "save_dot_with_context_except_mlp": Remat((*_QKV, "context", "out_proj")),
    "save_dot_except_mlpwi": Remat((*_QKV, "out_proj", "mlpwo")),
    "save_dot_except_mlp": Remat((*_QKV, "out_proj")),
    "save_qkv_proj": Remat(_QKV),
    "save_out_proj": Remat(("out_proj",)),
    "qkv_proj_offloaded": Remat((), _QKV),
    "custom": Remat((), ("decoder_layer_input", *_QKV, "out_proj")),
}
"""MaxText's policies. Of 'custom', which a run places output by output, this is what Google's recipes for TPU
v6e of 2025 place in the host's memory where they state it; source: AI-Hypercomputer/tpu-recipes."""
