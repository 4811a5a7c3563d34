"""Bytes that adapters of low rank keep for their backward (`parallel/tensor_lora.py`), beside what the layers
that they stand at keep: the products with A, and where outputs of products are saved those with B, too; with
magnitudes (Liu et al. 2024, DoRA) what is multiplied by them, as large as the layer's output. Those of routed
experts keep nothing but, with dropout, the keys of rows (`model/expert_lora.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.activations_moe import routed_rows
from meshwright.planner.activations_sizes import Sizes
from meshwright.planner.rank_view import adds_gradients
from meshwright.planner.traffic.layer_shape import ROW_KEY
from meshwright.spec.parameter_groups import run_parameters
from meshwright.spec.parameters import Parameter
from meshwright.spec.sections import SelectiveRecompute
from meshwright.spec.tiling import Tiling


def adapters_kept(s: Sizes, layer: int) -> int:
    """Bytes that the adapters of a block keep under the run's policy."""
    recompute = s.spec.recompute
    if recompute.policy == "none":
        return adapters_everything(s, layer)
    if not _saves_products(s):
        return 0
    across = s.spec.layout.ep * s.spec.layout.etp > 1
    kept = sum(_outputs(s, each, rank) for each, rank in _adapted(s, layer))
    if s.compiled and not s.spec.model.rereads_outputs:  # no backward reads what the last map returns
        kept -= sum(
            _layer_output(s, each) for each in _named(s, layer, "mlp.down") if not _has_magnitudes(each)
        )
    return (_keys(s, layer) if across else 0) + s.width.compute * kept


def adapters_everything(s: Sizes, layer: int) -> int:
    """Bytes that the adapters of a block keep without recomputation."""
    adapted = _adapted(s, layer)
    dropped = s.spec.lora is not None and s.spec.lora.dropout > 0
    inputs = sum(_input(s, each) for each, _ in adapted) - _not_kept(s, layer) if dropped else 0
    rescaled = sum(_layer_output(s, each) for each, _ in adapted if _keeps_rescaled(s, each))
    kept = s.width.compute * (inputs + rescaled + sum(_entered(s, each) * rank for each, rank in adapted))
    return kept + _keys(s, layer)


def adapters_deferred(s: Sizes, layer: int) -> int:
    """Bytes that the deferred weight gradients of a block's adapters need: inputs and the gradients of
    outputs, of A and of B. Layers of one input share it where dropout leaves all of it."""
    adapted = _adapted(s, layer)
    dropped = s.spec.lora is not None and s.spec.lora.dropout > 0
    inputs = {
        (
            each.name if dropped or each.dim else each.name.rpartition(".")[0].rpartition(".")[0],
            each.shape[1],
        ): _input(s, each)
        for each, _ in adapted
    }
    low = sum(rank * (s.own + _entered(s, each)) for each, rank in adapted)
    outputs = sum(_layer_output(s, each) for each, _ in adapted)
    return s.width.compute * (sum(inputs.values()) + low + outputs)


def adapts_down(s: Sizes, layer: int) -> bool:
    """True if a block's `mlp.down` has adapters, which give its input a gradient, too."""
    return any(each.name.split(".", 2)[-1].startswith("mlp.down") for each, _ in _adapted(s, layer))


def rescales_down(s: Sizes, layer: int) -> bool:
    """True if the rows of a block's `mlp.down` have magnitudes."""
    return any(map(_has_magnitudes, _named(s, layer, "mlp.down")))


def at_magnitudes(s: Sizes, layer: int) -> int:
    """Bytes beyond those that a block keeps, in the backward of the first maps' magnitudes, if they have any.

    Three tensors are in the format of exact sums: the gradient of the last map's output, and its products
    with the quotients and with what these multiply. The gradient of the other map waits, and what the layer
    keeps between its products was freed.
    """
    maps = _first_maps(s, layer)
    if not maps or not (wide := _rescaled(s, maps[-1])):
        return 0
    kept = (s.gates + 1) * s.inner(layer) + (s.stream if rescales_down(s, layer) else 0)
    return s.width.compute * (s.stream + 3 * wide + (s.gates - 1) * s.inner(layer) - kept)


def made_again(s: Sizes, layer: int) -> int:
    """Bytes, in the format of exact sums, of what a compiled block computes again of its first maps' outputs,
    times magnitudes."""
    maps = _first_maps(s, layer)
    return s.width.exact * sum(_layer_output(s, each) for each in maps if not _keeps_rescaled(s, each))


def recomputed_with_adapters(s: Sizes, layer: int) -> int:
    """Bytes beyond those of a block without recomputation, where the forward that recomputes it has added
    adapters to the first maps of its feed-forward layer.

    There are the gradient of the block's output, in the format of exact sums, too, where the last map has
    magnitudes, and outputs of its products that were saved.
    """
    maps = _first_maps(s, layer)
    if s.spec.recompute.policy == "none" or not maps:
        return 0
    if s.compiled:
        return _recomputed_by_compiled(s, layer, maps)
    down = _named(s, layer, "mlp.down")
    gradients = s.stream + sum(_rescaled(s, each) for each in down)
    saved = (1 + len(down)) * s.stream if _saves_products(s) else 0
    return s.width.compute * (gradients + saved + _at_sums(s, layer, maps))


def _recomputed_by_compiled(s: Sizes, layer: int, maps: Sequence[Parameter]) -> int:
    """`recomputed_with_adapters` of a compiled block, whose fullest moment is in the backward of its last
    map, as `dryrun` runs the programs that torch 2.13's compiler makes.

    A kernel adds the products of a map and of its adapter as it reads them, so that both are kept in the
    place of their sum, and what is read of them again later is computed again. The activation and two
    gradients of it, of the last map and of its adapter, are there beside them. Magnitudes add one of these
    gradients in the format of exact sums, and what they multiply is kept as both products, too.
    """
    outputs = sum(_layer_output(s, each) for each in maps)
    saved = _saves_products(s)
    held = outputs + (1 + adapts_down(s, layer)) * s.inner(layer)
    rescaled = [each for each, _ in _adapted(s, layer) if _has_magnitudes(each)]
    if not rescaled:
        return s.width.compute * (held + (1 if saved else 2) * s.stream)
    held += _rescaled(s, maps[-1]) - _layer_output(s, maps[-1])
    held += sum(_layer_output(s, each) for each in maps if not _keeps_rescaled(s, each))
    attention = sum(_layer_output(s, each) for each in rescaled if ".mlp." not in each.name)
    alone = s.spec.layout.tp == 1
    return s.width.compute * (held + (0 if saved and alone else 2 * s.stream + attention))


def forward_with_adapters(s: Sizes, layer: int) -> int:
    """Bytes beyond those that a block keeps under the run's policy, at the fullest moment of its forward in
    the feed-forward layer, if its first maps have adapters.

    Where products are saved it is after the activation: there are the sums of the maps and their adapters,
    the activation, and the streams that attention returned, that follow from it, and that the feed-forward
    layer reads; what the last map and its adapters keep is not there yet.
    """
    maps = _first_maps(s, layer)
    if not maps or s.compiled or not (_saves_products(s) or s.spec.recompute.policy == "none"):
        return 0  # a backward is fuller
    if s.spec.recompute.policy == "none":
        return s.width.compute * _at_sums(s, layer, maps)
    outputs = [_layer_output(s, each) for each in maps]
    last = 1 + adapts_down(s, layer)
    activation = max(s.inner(layer), outputs[-1] + _rescaled(s, maps[-1]))
    return s.width.compute * (sum(outputs) + activation + (3 - last) * s.stream)


def _at_sums(s: Sizes, layer: int, maps: Sequence[Parameter]) -> int:
    """Elements beyond those that a block keeps without recomputation, where adapters are added to the first
    maps of its feed-forward layer: outputs of both, their sums, and what attention returned."""
    outputs = [_layer_output(s, each) for each in maps]
    # Without functions of their own, one layer is applied after the other.
    held = 3 * sum(outputs) if adds_gradients(s.spec) else sum(outputs) + 2 * outputs[-1]
    held += _rescaled(s, maps[-1])
    # What is kept of them, the last map's input, and what its magnitudes multiply.
    later = (s.gates + adapts_down(s, layer)) * s.inner(layer)
    later += sum(_layer_output(s, each) for each in _named(s, layer, "mlp.down") if _has_magnitudes(each))
    return s.stream + held - later


def _rescaled(s: Sizes, weight: Parameter) -> int:
    """Elements of the products of a layer's outputs with the quotients of its magnitudes, which are in the
    format of exact sums; 0 where the layer computes in it, or has none."""
    if not _has_magnitudes(weight) or s.width.exact == s.width.compute:
        return 0
    return _layer_output(s, weight) * s.width.exact // s.width.compute


def _keeps_rescaled(s: Sizes, weight: Parameter) -> bool:
    """True if what a layer's magnitudes multiply is kept.

    A compiled block computes that of its last map again, and those of the feed-forward layer's first maps,
    where few pieces of their rows are between them (`squares_of_rows` of `model/lora.py`): torch's compiler
    keeps what is read far from where it was made. Up to two pieces are few, as fitted on dry runs of
    blocks of Llama 3.2 1B (1 piece), of Llama 3 8B on two tensor ranks (2) and on one (4).
    """
    if not s.compiled or not _has_magnitudes(weight):
        return _has_magnitudes(weight)
    return ".mlp." not in weight.name or (not weight.dim and _far_apart(s, weight))


def _far_apart(s: Sizes, weight: Parameter) -> bool:
    """True if more than two pieces of a layer's rows are taken for their lengths, one after another."""
    rows = max(1, Tiling.row_elements // weight.shape[1])
    return weight.shape[0] // s.spec.layout.tp > 2 * rows


def _has_magnitudes(weight: Parameter) -> bool:
    """True if the rows of a weight with adapters have magnitudes (DoRA)."""
    return len(weight.adapters) > 2


def _saves_products(s: Sizes) -> bool:
    """True if outputs of products are saved, and the rest is recomputed."""
    return isinstance(s.spec.recompute, SelectiveRecompute) and "matmul" in s.spec.recompute.save


def _first_maps(s: Sizes, layer: int) -> list[Parameter]:
    """The maps that a block's feed-forward layer begins with, where they have adapters."""
    return _named(s, layer, "mlp.gate", "mlp.up")


def _named(s: Sizes, layer: int, *names: str) -> list[Parameter]:
    """The weights of a block's layers of these names that have adapters."""
    ends = tuple(f"{name}.weight" for name in names)
    return [each for each, _ in _adapted(s, layer) if each.name.endswith(ends)]


def _not_kept(s: Sizes, layer: int) -> int:
    """Elements of inputs that layers keep elsewhere, and do not where they are given what is left of them."""
    rescaled = [each for each, _ in _adapted(s, layer) if _has_magnitudes(each)]
    shared = {
        each.name.rsplit(".", 2)[0]: each.shape[1] for each in rescaled if not each.dim or not each.split
    }
    return s.own * sum(shared.values())


def _keys(s: Sizes, layer: int) -> int:
    """Bytes of the keys of the experts' rows, by which their adapters drop numbers."""
    lora, moe = s.spec.lora, s.spec.model.moe
    if lora is None or moe is None or not lora.dropout:
        return 0
    return ROW_KEY * routed_rows(s.spec, moe) if adapts_experts(s, layer) else 0


def adapts_experts(s: Sizes, layer: int) -> bool:
    """True if routed experts of a block have adapters."""
    return any(each.expert and each.adapters for each in run_parameters(s.spec)[f"blocks.{layer}"])


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
