"""The Triton kernels of a compiled block of llama3-8b compile for GPUs, and spill no registers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no package for this platform")

from compiled_kernels import least_spilled

from faked_gpu import large
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess

pytestmark = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)


@pytest.mark.full
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_kernels_of_a_block_spill_no_registers(capability: tuple[int, int], tmp_path: Path) -> None:
    with FakeCudaProcess() as process:
        found = process.call(least_spilled, large(train__compile="true"), capability, tmp_path)
    assert len(found) >= 12 and {name: each.spilled for name, each in found.items()} == dict.fromkeys(
        found, 0
    )
