"""Tiles so small that a step and a checkpoint have several wherever there are tiles (`spec/tiling.py`)."""

from __future__ import annotations

from dataclasses import asdict

from meshwright.spec import RunSpec
from meshwright.spec.parameters import parameters
from meshwright.spec.tiling import Tiling


def small_tiles(spec: RunSpec) -> Tiling:
    """Return sizes by which what a rank computes in a microbatch takes several tiles, the last one smaller,
    and so does what it saves of the largest parameter.

    A bug in the second chunk of a loss, or in what is left for the last, is not to be found in a run that
    takes one. No size is above the usual one.
    """
    model, layout, length = spec.model, spec.layout, spec.data.seq_len
    kv_heads, exchanging = layout.local_kv_heads(model.kv_heads), layout.ulysses(model.kv_heads)
    group = model.heads // layout.tp // kv_heads
    chunk, block = _several(spec.micro_batch * length // layout.cp), _several(length)
    rows = -(-model.vocab_size // layout.tp)
    together = length // layout.cp * exchanging
    # With a ring the keys come in parts, and half of these tokens are consecutive.
    queries, keys = (_several(together),) * 2
    if exchanging < layout.cp:
        queries, keys = _two(together // 2), _two(together)
    largest = max(each.size for unit in parameters(model).values() for each in unit)
    of_rank = largest // (layout.tp * layout.shard_ranks)
    piece = _several(8 * of_rank)  # in float64
    small = Tiling(
        logits=chunk * rows,
        logits_cpu=chunk * rows,
        kernel_logits=chunk * rows,
        loss_logits=_several(chunk) * rows,
        loss_logits_cpu=_several(chunk) * rows,
        least_loss_rows=1,
        least_query_rows=block,
        most_query_rows=block,
        part_scores=group * queries * keys * _several(spec.micro_batch * kv_heads // exchanging),
        least_part_queries=_several(queries),
        part_queries=queries,
        part_keys=keys,
        part_rows_summed=_several(group * queries),
        norm_weight_rows=_several(chunk // layout.tp),
        norm_row=32,
        base_elements=_several(of_rank),
        row_elements=_several(of_rank),
        init_elements=_several(of_rank),
        moment_elements=_several(of_rank),
        offload_bytes=1,
        piece_bytes=piece,
        image_bytes=3 * piece,
        write_bytes=piece,
        read_bytes=_several(piece),
        manifest_ranks=_several(layout.world_size),
        shard_bytes=_several(8 * model.parameters),
    )
    return Tiling(**{name: min(size, asdict(small)[name]) for name, size in asdict(Tiling()).items()})


def _several(size: int) -> int:
    """The size of pieces of `size`: two or three, the last of which is smaller where that can be."""
    return size // 3 + 1


def _two(size: int) -> int:
    """The size of two pieces of `size`, the last of which is smaller where that can be.

    Attention to a part of the keys has a tile for each piece of its queries, keys and heads, in each part.
    """
    return size // 2 + (size > 2 or size == 1)
