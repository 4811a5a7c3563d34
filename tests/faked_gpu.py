"""A small run, and its steps on a GPU that is faked."""

from __future__ import annotations

from typing import Any

from meshwright import api
from meshwright.fake_cuda.process import FakeCudaProcess
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


def dryrun_on(process: FakeCudaProcess, spec: RunSpec, **options: Any) -> dict[str, Any]:
    return process.call(api.dryrun, spec, device="cuda", **options)


def work_of(process: FakeCudaProcess, spec: RunSpec, **options: object) -> dict[str, Any]:
    """The work of the device of rank 0 in a step."""
    (row,) = dryrun_on(process, spec, **options)["ranks"]
    work: dict[str, Any] = row["device_work"]
    return work


def kernels(work: dict[str, Any]) -> dict[str, int]:
    """The numbers of kernels by their names without namespace."""
    return {row["name"].partition("::")[2]: row["count"] for row in work["kernels"]}
