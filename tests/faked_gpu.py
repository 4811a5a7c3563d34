"""A small run, and its steps on a GPU that is faked."""

from __future__ import annotations

from meshwright.spec import RunSpec, load

TINY: dict[str, object] = {
    "model.preset": "tiny", "model.layers": 2, "data.corpus": "synthetic", "data.seq_len": 128,
    "train.batch_tokens": 512, "layout.micro_batch": 2, "layout.dp": 2, "layout.zero": 3,
    "precision.compute": "bf16",
}  # fmt: skip


def tiny(**flags: object) -> RunSpec:
    keys = TINY | {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in keys.items()])
