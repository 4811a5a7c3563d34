"""A small run, and its steps on a GPU that is faked."""

from __future__ import annotations

from meshwright.spec import RunSpec, load

TINY: dict[str, object] = {
    "model.preset": "tiny", "model.layers": 2, "data.corpus": "synthetic", "data.seq_len": 128,
    "train.batch_tokens": 512, "layout.micro_batch": 2, "layout.dp": 2, "layout.zero": 3,
    "precision.compute": "bf16",
}  # fmt: skip

LARGE: dict[str, object] = {
    "model.preset": "llama3-8b", "model.layers": 2, "data.corpus": "synthetic", "data.seq_len": 8192,
    "train.batch_tokens": 65536, "layout.micro_batch": 1, "precision.compute": "bf16", "layout.dp": 8,
    "layout.zero": 3,
}  # fmt: skip


def tiny(**flags: object) -> RunSpec:
    return _run(TINY, flags)


def large(**flags: object) -> RunSpec:
    """Two blocks of llama3-8b, on 8,192 tokens."""
    return _run(LARGE, flags)


def _run(keys: dict[str, object], flags: dict[str, object]) -> RunSpec:
    given = keys | {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in given.items()])
