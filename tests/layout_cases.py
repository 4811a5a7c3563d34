"""Layouts of every axis but pipelines and experts, for a small dense model."""

from __future__ import annotations

import random
from itertools import product

from ranks import RANKS

BASE = {
    "model.heads": 8,
    "model.hidden": 32,
    "model.head_dim": 4,
    "model.vocab_size": 61,  # prime: no axis divides it
    "data.seq_len": 32,
    "train.batch_tokens": 6 * 32,
    "train.steps": 3,
    "train.warmup_steps": 1,
}
AXES = [
    (tp, cp, dp)
    for tp, cp, dp in product((1, 2, 4), (1, 2, 4), (1, 2))
    if tp * cp > 1 and tp * cp * dp <= RANKS
]


def drawn(name: str, tp: int, cp: int) -> dict[str, object]:
    """A choice of the rest that goes with `tp` and `cp`."""
    choose = random.Random(name).choice
    flags: dict[str, object] = {
        "model__kv_heads": choose([1, 2, 8]),
        "model__tied": choose(["true", "false"]),
        "model__qk_norm": choose(["true", "false"]),
        "model__sliding_window": choose(["none", "none", 7]),
        "layout__sequence_parallel": choose(["true", "false"]),
        "layout__micro_batch": choose([1, 3]),
        "recompute__policy": choose(["none", "full", "selective"]),
        "data__pack": choose(["true", "true", "false"]),
        "data__document_mask": choose(["true", "true", "false"]),
    }
    modes = ["ring", "gather", "ring+ulysses"]
    if max(1, int(str(flags["model__kv_heads"])) // tp) % cp == 0:
        modes.append("ulysses")
    return {**flags, "layout__context_mode": choose(modes)}


CASES: list[dict[str, object]] = [
    {"layout__tp": tp, "layout__cp": cp, "layout__dp": dp, "layout__zero": zero}
    | drawn(f"{tp}-{cp}-{dp}-{zero}", tp, cp)
    for (tp, cp, dp), zero in product(AXES, (0, 1, 2, 3))
]
