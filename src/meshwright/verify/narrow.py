"""A small copy of a run with the same structure, for checks in float64 that a laptop can make."""

from __future__ import annotations

from math import lcm

from meshwright.spec import Layout, MlaSpec, ModelSpec, MoeSpec, RunSpec

MOST_WORK = 3e10
"""Parameters x tokens of a step that are checked as they are; about ten seconds a step in float64."""


def narrow(spec: RunSpec) -> tuple[RunSpec, str | None]:
    """Return `spec`, or its narrowed copy with a sentence that says so.

    Kept: every switch of the model, the layout, the number of microbatches up to 4 (or twice the pipeline's
    ranks), a layer for each stage, how tokens choose their experts, the ratio of query to key-value heads,
    the vocabulary's remainder by 64 (so one that an axis does not divide stays so). Made smaller: layers,
    widths, the number of experts, the vocabulary, the sequence, the microbatch.
    """
    if spec.model.parameters * spec.train.batch_tokens <= MOST_WORK:
        return spec, None
    layout = spec.layout
    model = _narrow_model(spec.model, layout)
    unit = 2 * layout.cp * layout.tp
    seq_len = min(spec.data.seq_len, -(-64 // unit) * unit)
    micro, count = min(spec.micro_batch, 2), min(spec.microbatches, max(4, 2 * layout.pp))
    tree = spec.to_json()
    tree["model"] = model
    tree["data"]["seq_len"] = seq_len
    tree["layout"]["micro_batch"] = micro
    tree["train"]["batch_tokens"] = seq_len * micro * count * spec.layout.data_ranks
    small = RunSpec.model_validate(tree)
    note = (
        f"checked on a narrowed copy: {small.model.parameters:,} of {spec.model.parameters:,} parameters "
        f"({small.model.layers} layers, hidden {small.model.hidden}, vocabulary {small.model.vocab_size}), "
        f"{small.train.batch_tokens:,} of {spec.train.batch_tokens:,} tokens a step"
    )
    return small, note


def _narrow_model(model: ModelSpec, layout: Layout) -> dict[str, object]:
    group = model.heads // model.kv_heads
    kv_heads = min(model.kv_heads, 8)
    while kv_heads > 1 and kv_heads * group > 16:
        kv_heads = max(1, kv_heads // 2)
    heads = kv_heads * group
    tp, dealt = layout.tp, layout.cp if layout.context_mode == "ulysses" else 1
    if heads % tp or (kv_heads % tp and tp % kv_heads) or layout.local_kv_heads(kv_heads) % dealt:
        heads, kv_heads = model.heads, model.kv_heads
    head_dim = min(model.head_dim, 8)
    hidden = max(16, min(model.hidden, heads * head_dim))
    share = 8 * tp
    ffn = max(share, round(hidden * model.ffn / model.hidden / share) * share)
    layers = min(model.layers, max(4, layout.pp * layout.chunks))
    if not isinstance(layout.stages, str):
        layers = model.layers  # a cut by hand counts them
    return {
        **model.model_dump(mode="json"),
        "layers": layers,
        "hidden": hidden,
        "ffn": ffn,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mla": None if model.mla is None else _narrow_latents(model.mla, model.head_dim),
        "moe": None if model.moe is None else _narrow_experts(model.moe, layout, layers),
        "vocab_size": min(model.vocab_size, 256 + model.vocab_size % 64),
        "preset": None,
        "hf": None,
    }


def _narrow_experts(moe: MoeSpec, layout: Layout, layers: int) -> dict[str, object]:
    """As few experts as their groups, the expert ranks and each token's choice leave, with few channels."""
    unit = lcm(moe.groups, layout.ep)
    needed = max(2 * moe.top_k, moe.groups * -(-moe.top_k // moe.top_groups))
    fewest = -(-needed // unit) * unit
    return {
        **moe.model_dump(mode="json"),
        "experts": fewest if fewest <= moe.experts else moe.experts,
        "ffn": 8 * layout.etp,
        "shared_ffn": 8 * layout.tp if moe.shared_ffn else 0,
        "dense_first": min(moe.dense_first, layers // 2),
        "every": min(moe.every, layers // 2),
    }


def _narrow_latents(mla: MlaSpec, head_dim: int) -> dict[str, object]:
    """For heads of 8 channels, or of `head_dim` where that is less; values stay narrower where they are."""
    widest = min(head_dim, 8) - (2 if mla.v_dim < head_dim else 0)
    return {
        "q_rank": mla.q_rank and min(mla.q_rank, 16),
        "kv_rank": min(mla.kv_rank, 8),
        "rope_dim": min(mla.rope_dim, 4),
        "v_dim": min(mla.v_dim, widest),
    }
