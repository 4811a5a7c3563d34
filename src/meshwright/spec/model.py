"""`ModelSpec`: an architecture with its numbers of parameters and of floating-point operations."""

from __future__ import annotations

from functools import lru_cache

from meshwright.spec.architecture import Architecture
from meshwright.spec.parameters import Parameter, block_parameters, parameters


class ModelSpec(Architecture):
    """A decoder-only transformer. `preset` or `hf` fill the fields; those that are given take precedence."""

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(parameter.size for unit in parameters(self).values() for parameter in unit)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token is computed with; only its own of the routed experts count."""
        return sum(_active_size(self, parameter) for unit in parameters(self).values() for parameter in unit)

    @property
    def head_flops(self) -> int:
        """Forward FLOPs of the output head on one token."""
        return 2 * self.vocab_size * self.hidden

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of training on one token, forward and backward, in sequences of `seq_len` tokens.

        Counts 2 FLOPs per multiply-add and twice the forward for the backward. That is 6 for each weight that
        is multiplied (the head included, the embedding lookup not, and only those experts that the token is
        routed to), and 12 * layers * heads * head_dim * seq_len for the two products of attention, without a
        discount for the causal mask (Chowdhery et al. 2022, PaLM, appendix B). Recomputation is not counted,
        as it is work of the hardware, not of the model.
        """
        blocks = sum(self.block_flops(seq_len, layer) for layer in range(self.layers))
        return 3.0 * (blocks + self.head_flops)

    def block_flops(self, seq_len: int, layer: int) -> int:
        """Forward FLOPs of block `layer` on one token: its weights, and attention as above."""
        channels = self.head_dim + self.v_dim
        return self.block_weight_flops(layer) + 2 * self.heads * channels * seq_len

    def block_weight_flops(self, layer: int) -> int:
        """Forward FLOPs of the weights of block `layer` on one token."""
        return _weight_flops(self, self.has_experts(layer))


def _active_size(model: ModelSpec, parameter: Parameter) -> int:
    """Number of elements that one token is computed with: all, or those of its own experts."""
    if model.moe is None or not parameter.expert:
        return parameter.size
    return parameter.size // model.moe.experts * model.moe.top_k


@lru_cache(maxsize=64)
def _weight_flops(model: ModelSpec, experts: bool) -> int:
    """Forward FLOPs on one token of the matrices in the first block with, or without, experts."""
    layer = next(layer for layer in range(model.layers) if model.has_experts(layer) == experts)
    matrices = [parameter for parameter in block_parameters(model, layer) if len(parameter.shape) > 1]
    return 2 * sum(_active_size(model, parameter) for parameter in matrices)
