"""What the cells of a table of runs may say; what they may not, in words."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite

FROM_ONE = ("gpus", "seq_len", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "global_batch_seqs")
"""Columns of whole numbers of at least 1."""
FROM_ZERO = ("experts", "top_k", "tp", "cp", "pp", "vp", "ep", "dp", "zero", "micro_batch")
"""Columns of whole numbers where 0 says that there is none."""
MOST: Mapping[str, float] = {
    "layers": 10_000,
    "hidden": 1e7,
    "ffn": 1e8,
    "heads": 1e6,
    "kv_heads": 1e6,
    "vocab": 1e8,
    "seq_len": 1e8,
    "experts": 1e6,
    "gpus": 10e6,
    "vp": 10_000,
    "zero": 3,
    "micro_batch": 1e6,
    "global_batch_seqs": 1e6,
    "params_b": 1e6,
}
"""Far beyond what has been trained: larger numbers are slips, and would take too long."""
FORMATS = ("fp8", "bf16", "fp16", "fp32")
"""Number formats that a word of `precision` may hold, as amp_bf16 does."""
POLICIES = ("none", "full", "selective")
"""Of `recompute`."""
_SHOWN = 30


def number(name: str, text: str) -> tuple[float, str]:
    """The number of a cell, and what is wrong with it, or nothing."""
    try:
        value = float(text)
    except ValueError:
        return 0.0, f"the cell '{name}' is no number: '{short(text)}'"
    return value, _wrong(name, short(text), value)


def _wrong(name: str, text: str, value: float) -> str:
    whole = name in FROM_ONE or name in FROM_ZERO
    said = f"the cell '{name}' is '{text}'"
    if not whole and not (isfinite(value) and value > 0):
        return f"{said}, which is no measurement; give a number above 0, or leave it empty"
    least = 0 if name in FROM_ZERO else 1
    if whole and not (isfinite(value) and value >= least and value == value // 1):
        return f"{said}, which is no whole number of at least {least}"
    most = MOST.get(name, inf)
    return f"{said}, which cannot be meant; give at most {most:,.0f}" if value > most else ""


def unknown_word(words: Mapping[str, str]) -> str:
    """Which word of a row is none that is known, or nothing."""
    format, policy, shared = (words[name].lower() for name in ("precision", "recompute", "sequence_parallel"))
    known: tuple[str, ...]
    if format and not any(each in format for each in FORMATS):
        name, known = "precision", FORMATS
    elif policy and policy not in POLICIES:
        name, known = "recompute", POLICIES
    elif shared and shared not in ("yes", "no"):
        name, known = "sequence_parallel", ("yes", "no")
    else:
        return ""
    return f"the {name} '{short(words[name])}' is not one of {', '.join(known)}"


def short(text: str) -> str:
    """A cell as a sentence quotes it: on one line, and not all of a long one."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
