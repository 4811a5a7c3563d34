"""A small copy of a run with the same structure, for checks in float64 that a laptop can make."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import cycle
from math import lcm
from typing import Any

from meshwright.spec import Layout, MlaSpec, ModelSpec, MoeSpec, RunSpec
from meshwright.spec.architecture import RANDOM
from meshwright.spec.batch_warmup import one_step_each
from meshwright.spec.layers import LayerType, LongRope
from meshwright.spec.lora import ALL_LINEAR, BLOCK, LoraSpec, adapters_of, is_adaptable
from meshwright.spec.parameters import Parameter, parameters
from meshwright.spec.stages import stages

MOST_WORK = 2e9
"""Parameters x tokens of a step that are checked as they are; about a second a step in float64."""

MOST_WORK_OF_A_SWEEP = 3e8
"""Parameters x tokens of a step that are checked as they are for each layout of a sweep."""

_MOST_RANKS = 64
"""Widths keep their remainder by up to so many ranks of ZeRO: with more, the copy would grow with them."""


def narrow(spec: RunSpec, most_work: float = MOST_WORK, least_tokens: int = 0) -> tuple[RunSpec, str | None]:
    """Return `spec`, or its narrowed copy with a sentence that says so.

    Kept: every switch of the model and the layout; whether stages, ranks of ZeRO, the tensor and the context
    axis divide what they share, by the remainder; a stage's place in the order of stages by their blocks;
    every kind of layers; several of whatever the run has several of (layers, microbatches and their rows,
    key-value heads of a rank and their queries, experts of a rank); a window that cuts. Made smaller:
    layers, widths, the number of experts, the vocabulary, the sequence, the microbatch, and the experts'
    capacity to an even share, so that some overflow. Microbatches are so large that a step has `least_tokens`
    tokens, where the run's are. Stages of a warm-up of the batch have a step each.
    """
    if spec.model.parameters * spec.train.batch_tokens <= most_work:
        return spec, None
    layout = spec.layout
    count = layout.pp * layout.chunks
    if count == 1 or layout.stages == "even":  # by the number of layers, since a wrong cut must stay wrong
        base, rest = divmod(spec.model.layers, count)
        cut = _narrow_cut([base + (stage < rest) for stage in range(count)])
    else:
        cut = _narrow_cut([len(stage.blocks) for stage in stages(spec.model, layout, spec.data.seq_len)])
    unit, early = 2 * layout.cp * layout.tp * spec.precision.side_block, spec.train.batch_stages[:-1]
    seq_len = _reduced(spec.data.seq_len, max(128, 16 * layout.cp), unit)
    counts = _growing([spec.at_step(stage.steps_before + 1).microbatches for stage in early], layout.pp)
    least = max(4, 2 * layout.pp, 1 + max(counts, default=0))
    microbatches = _reduced(spec.microbatches, least, layout.pp)
    rows = -(-least_tokens // (seq_len * microbatches * layout.data_ranks))
    micro = min(spec.micro_batch, max(3, rows))
    tree = spec.to_json()
    tree["model"] = _narrow_model(spec, layout, sum(cut), seq_len)
    tree["data"]["seq_len"] = seq_len
    tree["layout"]["micro_batch"] = micro
    if layout.pp > 1 and layout.stages != "even":
        tree["layout"]["stages"] = cut  # the run's, since a balanced one of the copy would be another
    of_microbatches = seq_len * micro * layout.data_ranks
    tree["train"]["batch_tokens"] = of_microbatches * microbatches
    tree["train"]["batch_warmup"] = one_step_each([of_microbatches * count for count in counts])
    _drop_patterns(tree)
    small = RunSpec.model_validate(tree)
    return small, _note(small, spec)


def narrow_for_all(spec: RunSpec, ranks: int) -> tuple[RunSpec, str | None]:
    """Return `spec` on one rank, or its copy that is narrowed for all layouts of `ranks` ranks at a time.

    An axis of such a layout divides `ranks`, so what axes divide keeps its remainder by `ranks`. Several
    things that a layout shares out are left for each rank, where the run has several, of all layouts.
    """
    tree = spec.to_json()
    kept = ("order", "expert_parts", "expert_buffer_factor")
    tree["layout"] |= Layout(**{key: getattr(spec.layout, key) for key in kept}).model_dump()
    tree["layout"]["stages"] = spec.layout.stages if isinstance(spec.layout.stages, str) else "even"
    alone = RunSpec.model_validate(tree)
    if spec.model.parameters * spec.train.batch_tokens <= MOST_WORK_OF_A_SWEEP:
        return alone, None
    folded = ranks if spec.model.moe is not None else 1
    widest = Layout(dp=ranks, tp=ranks, ep=folded, etp=folded)  # what divides by its axes does so by all
    seq_len = _reduced(spec.data.seq_len, 8 * ranks, 2 * ranks * spec.precision.side_block)
    layers = _reduced(spec.model.layers, max(2 * ranks, len(spec.model.kinds)), ranks)
    tree["model"] = _narrow_model(spec, widest, layers, seq_len)
    tree["data"]["seq_len"] = seq_len
    early = _growing([size // spec.data.seq_len for size, _ in spec.train.batch_warmup[:1]], ranks)
    sequences = _reduced(spec.batch_sequences, max(2 * ranks, 1 + max(early, default=0)), ranks)
    tree["train"]["batch_tokens"] = seq_len * sequences
    tree["train"]["batch_warmup"] = one_step_each([seq_len * size for size in early])
    _drop_patterns(tree)
    small = RunSpec.model_validate(tree)
    return small, _note(small, spec)


def _drop_patterns(tree: dict[str, Any]) -> None:
    """Remove patterns of `[train]` and `[lora]` that match none of the parameters that are left."""
    units = parameters(ModelSpec.model_validate(tree["model"])).values()
    every = [parameter for unit in units for parameter in unit]
    names = [parameter.name for parameter in every]
    if tree["lora"] is not None:
        names += _narrow_adapters(tree["lora"], every)
    frozen = [p for p in tree["train"]["frozen"] if any(fnmatchcase(n, p) for n in names)]
    while all(any(fnmatchcase(n, p) for p in frozen) for n in names):  # of blocks that are left out
        frozen.pop()
    tree["train"]["frozen"] = frozen
    trained = [n for n in names if not any(fnmatchcase(n, p) for p in frozen)]
    for key in ("lr_factors", "weight_decays"):
        table = tree["train"][key].items()
        tree["train"][key] = {p: value for p, value in table if any(fnmatchcase(n, p) for n in trained)}


def _narrow_adapters(lora: dict[str, Any], every: Sequence[Parameter]) -> list[str]:
    """Leave out targets that match nothing, and lower the rank to what narrow matrices have; returns the
    names of the adapters."""
    lora["weights"] = RANDOM
    linear = [parameter for parameter in every if is_adaptable(parameter)]
    lora["targets"] = [
        target for target in lora["targets"] if any(LoraSpec(targets=(target,)).adapts(p) for p in linear)
    ] or [ALL_LINEAR]
    adapted = [parameter for parameter in linear if LoraSpec.model_validate(lora).adapts(parameter)]
    lora["rank"] = min(lora["rank"], *(size for each in adapted for size in each.shape[-2:]))
    narrowed = LoraSpec.model_validate(lora)
    return [each.name for parameter in adapted for each in adapters_of(parameter, narrowed)]


def _note(small: RunSpec, spec: RunSpec) -> str:
    return (
        f"checked on a narrowed copy: {small.model.parameters:,} of {spec.model.parameters:,} parameters "
        f"({small.model.layers} layers, hidden {small.model.hidden}, vocabulary {small.model.vocab_size}), "
        f"{small.train.batch_tokens:,} of {spec.train.batch_tokens:,} tokens a step"
    )


def _reduced(size: int, least: int, unit: int) -> int:
    """The smallest number from `least` on that leaves the remainder of `size` by `unit`; at most `size`."""
    return min(size, least + (size - least) % unit)


def _growing(sizes: Sequence[int], unit: int) -> list[int]:
    """Return small numbers that grow as `sizes` do, and leave the same remainders by `unit`."""
    found: list[int] = []
    for size in sizes:
        found.append(_reduced(size, max(found, default=0) + 1, unit))
    return found


def _narrow_cut(blocks: Sequence[int]) -> list[int]:
    """Fewer blocks for each stage: equal numbers stay equal, larger ones larger, and none stays none.

    The smallest other number is 2, or 1 with more than 4 stages; there are 4 in all where there were so many.
    """
    kinds = sorted({*blocks} - {0})
    for least in range(min(kinds[0], 2 if len(blocks) <= 4 else 1), kinds[0] + 1):
        numbers = {0: 0} | {kind: least + place for place, kind in enumerate(kinds)}
        cut = [numbers[each] for each in blocks]
        if sum(cut) >= 4:
            break
    return cut


def _block_of_sides(spec: RunSpec) -> int:
    """The number that divides the sides of matrices: of the products' recipe, or of a quantised base."""
    base = BLOCK if spec.lora is not None and spec.lora.base_format is not None else 1
    return max(spec.precision.side_block, base)


def _narrow_model(spec: RunSpec, layout: Layout, layers: int, seq_len: int) -> dict[str, object]:
    model, block = spec.model, _block_of_sides(spec)
    kv_heads = _narrow_kv_heads(model, layout)
    heads = model.heads // model.kv_heads * kv_heads
    shared = kv_heads if spec.precision.side_block > 1 else heads  # a base has blocks of inputs alone
    head_dim = min(model.head_dim, 8)
    if block > 1 and model.mla is not None:
        head_dim = model.head_dim
    elif block > 1:
        head_dim = next(d for d in range(8, model.head_dim + 1, 2) if shared * d // layout.tp % block == 0)
    ranks, experts = _kept_by(layout.shard_ranks), _kept_by(layout.expert_data_ranks) if model.moe else 1
    slices = layout.etp if model.moe and model.moe.expert_bias else 1
    hidden = _reduced(model.hidden, min(64, max(16, heads * head_dim)), lcm(ranks, experts, block, slices))
    ffn = max(8 * layout.tp, hidden * model.ffn // model.hidden)
    window = model.sliding_window
    if window is not None and window < spec.data.seq_len:
        window = min(window, max(1, seq_len // 4))
    moe = None if model.moe is None else _narrow_experts(spec, model.moe, layout, layers)
    return {
        **model.model_dump(mode="json"),
        "layers": layers,
        "hidden": hidden,
        "mup_base_hidden": model.mup_base_hidden and max(1, hidden * model.mup_base_hidden // model.hidden),
        "ffn": _reduced(model.ffn, ffn, layout.tp * lcm(ranks, block)),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mla": None if model.mla is None else _narrow_latents(model.mla, model.head_dim, block),
        "moe": moe and moe.model_dump(mode="json"),
        "sliding_window": window,
        "rope_dim": model.rope_dim and _narrow_rope_dim(model, head_dim),
        "rope_scaling": _narrow_scaling(spec, head_dim, seq_len),
        **_narrow_types(model, moe, layers),
        # Each of tp ranks has rows, however few are left for the last one, from tp^2 on.
        "vocab_size": _reduced(model.vocab_size, max(256, layout.tp**2), lcm(64, layout.tp)),
        "preset": None,
        "hf": None,
        "weights": RANDOM,
    }


def _narrow_scaling(spec: RunSpec, head_dim: int, seq_len: int) -> dict[str, object] | None:
    """The scaling of positions for fewer channels and tokens: LongRoPE's factors are those of the run."""
    model, scaling = spec.model, spec.model.rope_scaling
    if not isinstance(scaling, LongRope):
        return None if scaling is None else scaling.model_dump(mode="json")
    pairs = _narrow_rope_dim(model, head_dim) // 2
    original = scaling.original_max_seq_len
    if spec.data.seq_len > original:
        original = max(2, min(original, seq_len - 1))
    return {
        **scaling.model_dump(mode="json"),
        "original_max_seq_len": original,
        "short_factors": _spread(scaling.short_factors, pairs),
        "long_factors": _spread(scaling.long_factors, pairs),
    }


def _narrow_rope_dim(model: ModelSpec, head_dim: int) -> int:
    """Channels of a head of `head_dim` that turn."""
    turning = model.rope_dim or model.head_dim
    return head_dim if turning == model.head_dim else max(2, head_dim * turning // model.head_dim // 2 * 2)


def _spread(factors: Sequence[float], count: int) -> list[float]:
    """Some of the factors, from first to last."""
    return [factors[place * len(factors) // count] for place in range(count)]


def _narrow_types(model: ModelSpec, moe: MoeSpec | None, layers: int) -> dict[str, object]:
    """The types of fewer layers: those without experts, and those with them, take the model's in turn."""
    types, rotary = model.layer_types, model.rope_layers
    if layers == model.layers or (types is None and rotary is None):
        return {}
    found: dict[bool, dict[tuple[LayerType | None, bool], None]] = {}
    for layer in range(model.layers):
        kind = types[layer % len(types)] if types else None
        own = kind, not rotary or rotary[layer % len(rotary)]
        found.setdefault(model.has_experts(layer), {})[own] = None
    turns = {routed: cycle(each) for routed, each in found.items()}
    chosen = [next(turns[moe is not None and moe.has_experts(layer)]) for layer in range(layers)]
    return {
        "layer_types": types and [each for each, _ in chosen],
        "rope_layers": rotary and [each for _, each in chosen],
    }


def _kept_by(ranks: int) -> int:
    """The number by which widths keep their remainder, where ZeRO shards their rows over `ranks`."""
    return ranks if ranks <= _MOST_RANKS else 1


def _narrow_kv_heads(model: ModelSpec, layout: Layout) -> int:
    """The fewest key-value heads that are dealt out to ranks as the model's are.

    Each head is on as many tensor ranks, as many context ranks exchange heads, and a rank has several heads,
    before and after the exchange, where it had several.
    """
    if model.kv_heads <= layout.tp:
        return model.kv_heads
    every, exchanging = layout.local_kv_heads(model.kv_heads), layout.ulysses(model.kv_heads)
    group = model.heads // model.kv_heads
    return layout.tp * next(
        local
        for local in range(min(2, every // exchanging) * exchanging, every + 1)
        if local % exchanging == 0
        and layout.ulysses(local * layout.tp) == exchanging
        and local * layout.tp * group >= min(8, model.heads)
    )


def _narrow_experts(spec: RunSpec, moe: MoeSpec, layout: Layout, layers: int) -> MoeSpec:
    """As few experts as their groups, the expert ranks and each token's choice leave, with few channels."""
    model, block = spec.model, _block_of_sides(spec)
    unit = lcm(moe.groups, layout.ep)
    needed = max(2 * moe.top_k, moe.groups * -(-moe.top_k // moe.top_groups), 2 * moe.groups, 2 * layout.ep)
    fewest = -(-needed // unit) * unit
    places: dict[str, object] = {}
    if layers < model.layers:
        places = {"dense_first": min(moe.dense_first, 1), "every": max(1, min(moe.every, layers // 2))}
        if len(model.kinds) > 2:  # some windows, some experts
            places = {"dense_first": sum(not kind.has_experts for kind in model.kinds), "every": 1}
    narrowed = {
        "experts": fewest if fewest <= moe.experts else moe.experts,
        "ffn": _reduced(moe.ffn, 8 * layout.etp, layout.etp * lcm(_kept_by(layout.expert_data_ranks), block)),
        "shared_ffn": _reduced(
            moe.shared_ffn, 8 * layout.tp, layout.tp * lcm(_kept_by(layout.shard_ranks), block)
        ),
        "capacity_factor": None if moe.capacity_factor is None else min(1.0, moe.capacity_factor),
        **places,
    }
    return moe.model_copy(update=narrowed)


def _narrow_latents(mla: MlaSpec, head_dim: int, block: int) -> dict[str, object]:
    """For heads of 8 channels, or of `head_dim` where that is less; values stay narrower where they are.

    They stay as they are where sides of matrices are multiples of a block.
    """
    if block > 1:
        return mla.model_dump(mode="json")
    widest = min(head_dim, 8) - (2 if mla.v_dim < head_dim else 0)
    return {
        "q_rank": mla.q_rank and min(mla.q_rank, 16),
        "kv_rank": min(mla.kv_rank, 8),
        "rope_dim": min(mla.rope_dim, 4),
        "v_dim": min(mla.v_dim, widest),
    }
