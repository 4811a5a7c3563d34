"""Sizes of the pieces that large results are computed in: the model takes them, the planner counts them."""

from __future__ import annotations

LOGITS, LOGITS_CPU = 2**26, 2**21
"""Logits of one chunk of the loss: on a CPU what its cache holds (4 MiB in bf16), elsewhere what fills it."""

_SCORE_BYTES = 4 * 2**20
"""Bytes of one block's attention scores on a CPU, so that they stay in the cache between its matmuls."""
_LEAST_ROWS, _MOST_ROWS = 32, 256

PART_SCORES = 2**20
"""Scores of one tile of a part of the keys, so that they stay in the cache between its matmuls."""
PART_QUERIES, PART_KEYS = 256, 2048
"""At most so many queries and keys in such a tile."""
LEAST_PART_QUERIES, SEEN_PER_QUERY = 32, 2
"""A block of queries computes about half its square in vain: it is small beside the keys that it sees."""

ALIGN = 16
"""Rows that each expert's are a multiple of."""


def loss_rows(vocabulary: int, cpu: bool) -> int:
    """Tokens whose logits over `vocabulary` columns are there at one time."""
    return max(64, (LOGITS_CPU if cpu else LOGITS) // vocabulary)


def query_rows(batch: int, heads: int, keys: int, element_bytes: int) -> int:
    """Queries of a sequence whose scores on `keys` keys are there at one time on a CPU: a power of two."""
    row = batch * heads * keys * element_bytes
    return max(_LEAST_ROWS, min(_MOST_ROWS, 2 ** max(0, (_SCORE_BYTES // row).bit_length() - 1)))


def part_tile(keys: int, run: int, groups: int, group: int) -> tuple[int, int]:
    """(queries, scores) of the largest tile of runs of `run` consecutive queries on a part of `keys` keys.

    There are `groups` key heads, over all sequences, each of `group` query heads.
    """
    rows = PART_QUERIES
    while rows > LEAST_PART_QUERIES and SEEN_PER_QUERY * rows > keys:
        rows //= 2
    rows = min(rows, run)
    one = group * rows * min(PART_KEYS, keys)
    return rows, one * min(groups, max(1, PART_SCORES // one))
