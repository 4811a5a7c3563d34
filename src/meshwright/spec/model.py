"""`ModelSpec`: an architecture with its numbers of parameters and of floating-point operations."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from meshwright.spec.architecture import Architecture
from meshwright.spec.layers import LayerKind
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
        return sum(active_size(self, parameter) for unit in parameters(self).values() for parameter in unit)

    @property
    def head_flops(self) -> int:
        """Forward FLOPs of the output head on one token."""
        return 2 * self.vocab_size * self.hidden

    def flops_per_token(self, seq_len: int, causal: bool = False) -> float:
        """Model FLOPs of training on one token, forward and backward, in sequences of `seq_len` tokens.

        Counts 2 FLOPs per multiply-add and twice the forward for the backward. That is 6 for each weight that
        is multiplied (the head included, the embedding lookup not, and only those experts that the token is
        routed to), and in each layer 12 * heads * head_dim * `keys_seen` for the two products of attention,
        without a discount for the causal mask (Chowdhery et al. 2022, PaLM, appendix B); `causal` counts
        `keys_visible` instead. Recomputation is not counted, as it is work of the hardware, not of the model;
        nor are norms, rotations and activations, and documents in a sequence count as one.
        """
        return 3.0 * self.forward_flops(seq_len, causal)

    def forward_flops(self, seq_len: int, causal: bool = False) -> float:
        """Model FLOPs of a forward on one token, counted as in `flops_per_token`."""
        total: float = self.head_flops * (1 + self.mtp_num_layers) + sum(
            map(self.join_flops, self.mtp_layers)
        )
        every = (self.kind_of(layer) for layer in (*range(self.layers), *self.mtp_layers))
        for kind, count in Counter(every).items():
            keys = kind.keys_visible(seq_len) if causal else kind.keys_seen(seq_len)
            total += count * (self.block_weight_flops(kind) + self.flops_per_key * keys)
        return total

    def join_flops(self, layer: int) -> int:
        """Forward FLOPs on one token of the map that joins its hidden state and the next token's embedding;
        0 in other layers than those that predict further tokens."""
        return 4 * self.hidden**2 if layer in self.mtp_layers else 0

    def end_flops(self, seq_len: int) -> int:
        """Forward FLOPs on one token of what follows the blocks: the head, and layers that predict further
        tokens with it."""
        beyond = (self.block_flops(seq_len, self.kind_of(n)) + self.join_flops(n) for n in self.mtp_layers)
        return self.head_flops * (1 + self.mtp_num_layers) + sum(beyond)

    def block_flops(self, seq_len: int, kind: LayerKind) -> int:
        """Forward FLOPs of a block of a kind on one token: its weights, and attention as above."""
        return self.block_weight_flops(kind) + self.flops_per_key * kind.keys_seen(seq_len)

    @property
    def flops_per_key(self) -> int:
        """Forward FLOPs of a block's attention for a query and a key: their scores, and the sum of values."""
        return 2 * self.heads * (self.head_dim + self.v_dim)

    def block_weight_flops(self, kind: LayerKind) -> int:
        """Forward FLOPs of the weights of a block of a kind on one token."""
        return _weight_flops(self, kind)


def active_size(model: ModelSpec, parameter: Parameter) -> int:
    """Number of elements that one token is computed with: all, or those of its own experts."""
    if model.moe is None or not parameter.expert:
        return parameter.size
    return parameter.size // model.moe.experts * model.moe.top_k


@lru_cache(maxsize=64)
def _weight_flops(model: ModelSpec, kind: LayerKind) -> int:
    """Forward FLOPs on one token of the matrices in the first block of a kind."""
    listed = block_parameters(model, model.layer_kinds.index(kind))
    matrices = [parameter for parameter in listed if parameter.is_matrix]
    return 2 * sum(active_size(model, parameter) for parameter in matrices)
