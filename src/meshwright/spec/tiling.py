"""Sizes of the pieces that large results are computed, saved and exported in.

They decide how much memory a result takes and how fast it is made, and not its value. So `verify` makes them
small, in order that a small model has several of each (`verify/tiles.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Tiling:
    """Sizes of the pieces of whatever has pieces; the defaults are what is fastest."""

    logits: int = 2**28
    """Logits that one product of the head makes: its weight's gradient, as large as the weight, is added up
    once for each."""
    logits_cpu: int = 2**25
    kernel_logits: int = 2**30
    """Logits of such a product where one kernel takes their loss and its gradient in their place: all of most
    microbatches, whose gradient of the weight is then one product, in its own format. In bf16 they are 2 GiB;
    sums in fp32 for several products take as much for a vocabulary of 131,072 and 4,096 channels."""
    loss_logits: int = 2**25
    """Logits whose softmax is taken at one time, in fp32: what fills a device."""
    loss_logits_cpu: int = 2**21
    """On a CPU what its cache holds (8 MiB)."""
    least_loss_rows: int = 64
    """Tokens of either at least."""
    score_bytes: int = 4 * 2**20
    """Bytes of one block's attention scores on a CPU, so that they stay in the cache between its matmuls."""
    least_query_rows: int = 32
    most_query_rows: int = 256
    """Queries of such a block at least, and at most."""
    part_scores: int = 2**20
    """Scores of one tile of a part of the keys, so that they stay in the cache between its matmuls."""
    least_part_queries: int = 32
    part_queries: int = 256
    """Queries of such a tile at least, where there are so many, and at most."""
    part_keys: int = 2048
    """Keys of such a tile at most."""
    part_rows_summed: int = 64
    """Rows of such a tile that are converted at a time to be summed."""
    norm_weight_rows: int = 128
    """Rows whose gradients of a norm's weight a thread of a CPU sums first."""
    norm_row: int = 1024
    """Elements of a gradient whose norm is taken in their own format."""
    base_elements: int = 2**22
    """Elements of a quantised base that are converted at a time, with 12 bytes of temporaries each."""
    row_elements: int = 2**24
    """Elements of a weight whose rows' lengths are taken at a time, with 8 bytes of temporaries each."""
    init_elements: int = 2**18
    """Elements of a parameter taken at a time: drawn, with about 10 MiB of temporaries."""
    moment_elements: int = 2**24
    """Elements of a moment that come to a device at a time from where they are offloaded to."""
    offload_bytes: int = 2**20
    """Bytes of a storage of activations at least that is worth its way to the host's memory and back."""
    piece_bytes: int = 64 * 2**20
    """Bytes of one piece of a tensor in a checkpoint, which has a hash of its own."""
    image_bytes: int = 2**30
    """Bytes of one block of host memory that a rank's pieces are copied to before they are written."""
    write_bytes: int = 16 * 2**20
    """Bytes of a checkpoint that one call writes: enough for the bandwidth of parallel file systems."""
    read_bytes: int = 16 * 2**20
    """Bytes of a checkpoint that one call reads."""
    manifest_ranks: int = 64
    """Ranks whose pieces one part of a checkpoint's manifest lists at least."""
    shard_bytes: int = 5 * 10**9
    """Bytes of one file of weights in an HF folder."""


_entered = [Tiling()]
"""The sizes of each `tiled` that has not ended. The process has one list: the backward on a device runs in
a thread of its own, which would not see a context variable."""


def tiling() -> Tiling:
    """Return the sizes to compute with: those of the innermost `tiled`, or the defaults."""
    return _entered[-1]


@contextmanager
def tiled(sizes: Tiling) -> Iterator[None]:
    """Let this process compute with other sizes until the context ends."""
    _entered.append(sizes)
    try:
        yield
    finally:
        _entered.pop()


SEEN_PER_QUERY = 2
"""A block of queries computes about half its square in vain: it is small beside the keys that it sees."""

ALIGN = 16
"""Rows that each expert's are a multiple of."""


def loss_rows(vocabulary: int, cpu: bool, by_kernel: bool) -> tuple[int, int]:
    """Tokens whose logits over `vocabulary` columns are there at one time, and those of them whose softmax is
    taken at one time: all of them where that is done `by_kernel` in the place of the logits."""
    sizes = tiling()
    if by_kernel:
        return (max(sizes.least_loss_rows, sizes.kernel_logits // vocabulary),) * 2
    logits, loss = (sizes.logits_cpu, sizes.loss_logits_cpu) if cpu else (sizes.logits, sizes.loss_logits)
    piece = max(sizes.least_loss_rows, loss // vocabulary)
    return max(piece, logits // vocabulary), piece


def loss_pieces(tokens: int, vocabulary: int, cpu: bool, by_kernel: bool) -> Counter[int]:
    """Tokens of a piece of the loss -> pieces of so many, of a microbatch of `tokens`."""
    chunk, piece = loss_rows(vocabulary, cpu, by_kernel)
    found: Counter[int] = Counter()
    for size, chunks in ((chunk, tokens // chunk), (tokens % chunk, 1)):
        found[piece] += chunks * (size // piece)
        found[size % piece] += chunks
    return Counter({size: count for size, count in found.items() if size and count})


def query_rows(batch: int, heads: int, keys: int, element_bytes: int) -> int:
    """Queries of a sequence whose scores on `keys` keys are there at one time on a CPU: a power of two within
    bounds."""
    sizes = tiling()
    power = 2 ** max(0, (sizes.score_bytes // (batch * heads * keys * element_bytes)).bit_length() - 1)
    return max(sizes.least_query_rows, min(sizes.most_query_rows, power))


def part_tile(keys: int, run: int, groups: int, group: int) -> tuple[int, int]:
    """(queries, scores) of the largest tile of runs of `run` consecutive queries on a part of `keys` keys.

    There are `groups` key heads, over all sequences, each of `group` query heads.
    """
    sizes = tiling()
    rows = sizes.part_queries
    while rows > sizes.least_part_queries and SEEN_PER_QUERY * rows > keys:
        rows //= 2
    rows = min(rows, run)
    one = group * rows * min(sizes.part_keys, keys)
    return rows, one * min(groups, max(1, sizes.part_scores // one))
