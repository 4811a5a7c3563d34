"""Linear layers whose inputs are rounded, with a scale for each token, as they come."""

from __future__ import annotations

from collections.abc import Collection

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.decoder import Decoder
from meshwright.model.linear import Linear
from meshwright.model.quantisation import fake_quantise_tokens
from meshwright.spec.precision import Quantised


class DynamicLinear(Linear):
    """The layer `linear`, which rounds x (..., inputs) by a recipe before the product."""

    def __init__(self, linear: Linear, recipe: Quantised) -> None:
        nn.Module.__init__(self)  # the parameters are those of `linear`
        self.weight, self.bias, self.recipe = linear.weight, linear.bias, recipe

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(fake_quantise_tokens(x, self.recipe), self.weight, self.bias)


def round_inputs(decoder: Decoder, recipe: Quantised, weights: Collection[str]) -> None:
    """From here on, the linear layers of these `weights` (names of parameters) round their inputs."""
    for name in weights:
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        linear = decoder.get_submodule(f"{parent}.{leaf}")
        assert isinstance(linear, Linear)
        setattr(decoder.get_submodule(parent), leaf, DynamicLinear(linear, recipe))
