"""Rank 0 alone compresses held-out text at the end of a run, while the others wait."""

from __future__ import annotations

import dataclasses
import lzma
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import small
from meshwright.api.train_rank import train_worker
from meshwright.comm.control import Control
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from ranks import Ranks

LIMIT_S = 2.0


def trained(mesh: Mesh, spec: RunSpec, out: Path) -> dict[str, Any]:
    """The result of a run whose ranks wait for each other at most LIMIT_S, and whose xz takes longer."""
    store = dist.PrefixStore("end of run", _get_default_store())
    control = Control("short", mesh.rank, 2, lambda: store, timedelta(seconds=LIMIT_S))
    compress = lzma.compress

    def slowly(*arguments: Any, **options: Any) -> bytes:
        time.sleep(1.5 * LIMIT_S)
        return compress(*arguments, **options)

    @contextmanager
    def mesh_of(_spec: RunSpec, **_given: object) -> Iterator[Mesh]:
        yield dataclasses.replace(mesh, control=control)

    with patch("meshwright.rank.world.mesh_of", mesh_of), patch.object(lzma, "compress", slowly):
        return train_worker(spec, out=out, quiet=True)


@pytest.mark.full
def test_slow_compression_of_the_held_out_text_fails_no_run(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(f"document {n} of many" for n in range(60)))
    base = {
        "model.vocab_size": 300,
        "data.corpus": tmp_path / "text.txt",
        "data.tokenizer": "byte",
        "data.seq_len": 16,
        "data.val_fraction": 0.2,
        "data.cache": tmp_path / "cache",
        "train.batch_tokens": 8 * 16,
        "train.steps": 1,
        "layout.dp": 2,
    }
    spec = small.spec_of(base)
    first, second = ranks.run(spec.layout, trained, spec, tmp_path / "out")
    assert first["xz_bits_per_byte"] > 0 and 0 < first["xz_bytes"] < 1000
    assert second["steps"] == first["steps"] == 1
