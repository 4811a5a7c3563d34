"""The process group of the tests on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from meshwright.rank.process_group import process_group


@pytest.fixture(scope="module")
def world() -> Iterator[dist.ProcessGroup]:
    """A group of one rank over NCCL."""
    with process_group(None, "cuda") as group:
        yield group
