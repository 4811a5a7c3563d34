"""Rows of fused queries, keys and values that files have by group of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.spec import ModelSpec


def by_kind(rows: Tensor, spec: ModelSpec) -> Tensor:
    """Return the rows of a fused projection as all queries, all keys, all values.

    In files those of a group are consecutive: its heads of queries, its key, its value.
    """
    per_group = spec.heads // spec.kv_heads
    grouped = rows.unflatten(0, (spec.kv_heads, per_group + 2, spec.head_dim))
    parts = grouped.split([per_group, 1, 1], 1)
    return torch.cat([part.flatten(0, 2) for part in parts])
