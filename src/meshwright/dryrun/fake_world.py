"""The world of a rank that is alone: groups that send nothing, moments and samples without values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.comm.process_groups import Groups, Row
from meshwright.data.loader import Batch
from meshwright.fake_cuda.runtime import DEVICES_A_HOST
from meshwright.hardware.attention_backend import holds_documents
from meshwright.optim.offload import MomentMemory
from meshwright.spec import RunSpec


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """A default group of `size` ranks of which only this one is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class FakeGroups(Groups):
    """Groups that send nothing. Like NCCL's they keep the order of posting, so each lane has its own."""

    @property
    def in_order(self) -> bool:
        return True

    def are_peers(self, row: Row) -> bool:
        """True for the ranks of a host, on which all GPUs are peers."""
        return row[0] // DEVICES_A_HOST == row[-1] // DEVICES_A_HOST

    def _make(self, rows: list[Row], own: Row | None, purpose: str) -> dist.ProcessGroup | None:
        return None if own is None else dist.new_group(list(own), backend="fake")


class FakeMoments(MomentMemory):
    """Moments on the faked device wherever the run has them; a rehearsal says where that is."""

    bounces = False

    def zeros(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(size, dtype=dtype, device=self._device) for size in sizes]


DOCUMENTS = 2
"""Documents of a packed sample, so that attention needs to tell them."""


def fake_batch(spec: RunSpec) -> Batch:
    """A rank's samples of a step; packed ones, and those of pairs, are of `DOCUMENTS`."""
    count, length = spec.rank_sequences, spec.data.seq_len
    tokens = torch.zeros(1, length, dtype=torch.int64).expand(count, length)
    positions = torch.arange(length).expand(count, length)
    each = length // DOCUMENTS
    numbers = (torch.arange(length) // max(1, each)).clamp(max=DOCUMENTS - 1)
    documents = numbers if holds_documents(spec) else tokens[0]
    ids = torch.arange(count)
    return Batch(tokens, tokens, positions, documents.expand(count, length), ids, ids)
