"""FLOPs of training on one token, of which frozen parameters have none for their gradients."""

from __future__ import annotations

from meshwright.spec.model import active_size
from meshwright.spec.parameter_groups import frozen_names, run_parameters
from meshwright.spec.sections import Sections
from meshwright.spec.stages import first_trained


def trained_share(spec: Sections, layer: int) -> float:
    """The share of a block's matrices, by the elements that a token is multiplied by, that is trained."""
    if spec.trains_all:
        return 1.0
    matrices = [p for p in run_parameters(spec)[f"blocks.{layer}"] if p.is_matrix]
    trained = sum(active_size(spec.model, p) for p in matrices if p.trainable)
    return trained / sum(active_size(spec.model, p) for p in matrices)


def adapter_flops(spec: Sections, layer: int) -> int:
    """Forward FLOPs of a block's adapters on one token."""
    listed = run_parameters(spec)[f"blocks.{layer}"]
    return 2 * sum(active_size(spec.model, adapter) for p in listed for adapter in p.adapters)


def head_has_gradient(spec: Sections) -> bool:
    """True if the input of the head's product has a gradient: one goes to its norm, or to modules before."""
    listed = [p for unit in ("embed", "head") for p in run_parameters(spec).get(unit, ())]
    of_norm = any(p.trainable for p in listed if p.name.startswith("head.norm."))
    return of_norm or first_trained(spec) <= spec.model.layers


def head_is_trained(spec: Sections) -> bool:
    """True if the head's matrix has a gradient."""
    return ("embed.weight" if spec.model.tied else "head.weight") not in frozen_names(spec)


def _forward(spec: Sections, causal: bool) -> float:
    """Model FLOPs of a forward on one token, those of adapters among them."""
    added = sum(adapter_flops(spec, layer) for layer in range(spec.model.layers))
    return spec.model.forward_flops(spec.data.seq_len, causal) + added


def flops_per_token(spec: Sections, causal: bool = False) -> float:
    """Model FLOPs of training on one token, counted as in `ModelSpec.flops_per_token`.

    Modules before the first one that is trained have no backward, and frozen matrices no gradient; forwards
    ahead of a step (`Sections.forwards_ahead`) count.
    """
    model, length = spec.model, spec.data.seq_len
    ahead = sum(_forward(spec.in_forward(each), causal) for each in spec.forwards_ahead)
    if not frozen_names(spec):
        return ahead + model.flops_per_token(length, causal)
    total = ahead + _forward(spec, causal)
    for layer in (*range(max(0, first_trained(spec) - 1), model.layers), *model.mtp_layers):
        kind = model.kind_of(layer)
        keys = kind.keys_visible(length) if causal else kind.keys_seen(length)
        weights = model.block_weight_flops(kind) + model.join_flops(layer) + adapter_flops(spec, layer)
        total += (1 + trained_share(spec, layer)) * weights
        total += 2 * model.flops_per_key * keys
    heads = 1 + model.mtp_num_layers
    return total + heads * (head_has_gradient(spec) + head_is_trained(spec)) * model.head_flops
