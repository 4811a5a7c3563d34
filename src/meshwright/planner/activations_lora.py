"""Bytes that adapters of low rank keep for their backward (`parallel/tensor_lora.py`), beside what the layers
that they stand at keep: the products with A, and where outputs of products are saved those with B, too; with
magnitudes (Liu et al. 2024, DoRA) what is multiplied by them, as large as the layer's output. Those of routed
experts keep nothing but, with dropout, the keys of rows (`model/expert_lora.py`)."""

from __future__ import annotations

from meshwright.planner.activations_moe import routed_rows
from meshwright.planner.activations_sizes import Sizes
from meshwright.planner.traffic.layer_shape import ROW_KEY
from meshwright.spec.parameter_groups import run_parameters
from meshwright.spec.parameters import Parameter
from meshwright.spec.sections import SelectiveRecompute


def adapters_kept(s: Sizes, layer: int) -> int:
    """Bytes that the adapters of a block keep under the run's policy."""
    recompute = s.spec.recompute
    if recompute.policy == "none":
        return adapters_everything(s, layer)
    if not isinstance(recompute, SelectiveRecompute) or "matmul" not in recompute.save:
        return 0
    across = s.spec.layout.ep * s.spec.layout.etp > 1
    return (_keys(s, layer) if across else 0) + s.width.compute * sum(
        _outputs(s, each, rank) for each, rank in _adapted(s, layer)
    )


def adapters_everything(s: Sizes, layer: int) -> int:
    """Bytes that the adapters of a block keep without recomputation."""
    adapted = _adapted(s, layer)
    dropped = s.spec.lora is not None and s.spec.lora.dropout > 0
    inputs = sum(_input(s, each) for each, _ in adapted) - _not_kept(s, layer) if dropped else 0
    rescaled = sum(_layer_output(s, each) for each, _ in adapted if len(each.adapters) > 2)
    kept = s.width.compute * (inputs + rescaled + sum(_entered(s, each) * rank for each, rank in adapted))
    return kept + _keys(s, layer)


def adapts_down(s: Sizes, layer: int) -> bool:
    """True if a block's `mlp.down` has adapters, which give its input a gradient, too."""
    return any(each.name.split(".", 2)[-1].startswith("mlp.down") for each, _ in _adapted(s, layer))


def _not_kept(s: Sizes, layer: int) -> int:
    """Elements of inputs that layers keep elsewhere, and do not where they are given what is left of them."""
    rescaled = [each for each, _ in _adapted(s, layer) if len(each.adapters) > 2]
    shared = {
        each.name.rsplit(".", 2)[0]: each.shape[1] for each in rescaled if not each.dim or not each.split
    }
    return s.own * sum(shared.values())


def _keys(s: Sizes, layer: int) -> int:
    """Bytes of the keys of the experts' rows, by which their adapters drop numbers."""
    lora, moe = s.spec.lora, s.spec.model.moe
    if lora is None or moe is None or not lora.dropout:
        return 0
    adapted = any(each.expert and each.adapters for each in run_parameters(s.spec)[f"blocks.{layer}"])
    return ROW_KEY * routed_rows(s.spec, moe) if adapted else 0


def _adapted(s: Sizes, layer: int) -> list[tuple[Parameter, int]]:
    """The weights of a block, its routed experts left out, that have adapters, with the rank of these."""
    listed = run_parameters(s.spec)[f"blocks.{layer}"]
    return [(each, each.adapters[0].shape[0]) for each in listed if each.adapters and not each.expert]


def _input(s: Sizes, weight: Parameter) -> int:
    """Elements of the input of an adapter's A on a rank."""
    inputs = weight.shape[1]
    return s.tokens * inputs // s.spec.layout.tp if weight.dim else s.own * inputs


def _entered(s: Sizes, weight: Parameter) -> int:
    """Tokens for which a rank has the product with A that B is applied to."""
    return s.tokens if weight.split is not None and not weight.dim else s.own


def _outputs(s: Sizes, weight: Parameter, rank: int) -> int:
    """Elements of the outputs of an adapter's products, and of messages between them."""
    tokens = _entered(s, weight)
    low = s.own * rank + (tokens * rank if tokens > s.own else 0)
    return low + _layer_output(s, weight)


def _layer_output(s: Sizes, weight: Parameter) -> int:
    """Elements of a layer's output on a rank."""
    ranks = s.spec.layout.tp if weight.split is not None and not weight.dim else 1
    return _entered(s, weight) * weight.shape[0] // ranks
