"""Inductor's programs for the faked device: generated as for a GPU, and run on tensors without memory.

A compiled block is a program of its own. Its wrapper in Python allocates tensors, calls products and other
operators, and launches Triton kernels, one after another. The wrapper runs here as it is. Of the kernels
inductor writes the source, as ever, which Triton need not compile: a launch is told, with the tensors that
it reads and writes and the bytes that inductor counts for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.fake_cuda.runtime import RUNTIME

Launched = Callable[[str, Sequence[Tensor], Sequence[Tensor], int], None]
"""Hears of a launch of a kernel: its name, the tensors that it reads, those that it writes, and bytes."""
_GB = re.compile(r"'kernel_num_gb': ([0-9.e+-]+)")
_SIGNATURE = re.compile(r"^def \w+\(([^)]*)\):", re.M)


class CompiledCode:
    """The code that inductor has written since a context began, and who hears of its launches."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self.kernels: dict[str, str] = {}
        """Name -> source of each kernel."""

    @property
    def graphs(self) -> int:
        """Graphs that were compiled; a second one of the same function is a recompilation."""
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]


_listening: list[CompiledCode] = []
"""Whose contexts this process is in, the innermost last."""


class CompiledKernel:
    """A Triton kernel, by its name and its source."""

    def __init__(self, name: str, source: str) -> None:
        bytes_moved, parameters = _GB.search(source), _SIGNATURE.search(source)
        assert bytes_moved and parameters, source
        self.name = name
        self.bytes = round(float(bytes_moved[1]) * 1e9)
        self._parameters = [each.partition(":")[0].strip() for each in parameters[1].split(",")]

    def run(self, *given: Any, **_: Any) -> None:
        """Launch it."""
        tensors = [pair for pair in zip(self._parameters, given, strict=False) if isinstance(pair[1], Tensor)]
        reads = [x for name, x in tensors if not name.startswith("out_ptr")]
        writes = [x for name, x in tensors if not name.startswith("in_ptr")]
        _listening[-1].launched(self.name, reads, writes, self.bytes)


@contextmanager
def compiled_code(launched: Launched) -> Iterator[CompiledCode]:
    """Context in which inductor compiles for the faked device, and `launched` hears of compiled kernels.

    What was compiled before is forgotten. Triton has to be installed, since inductor asks it about its code.
    """
    _install()
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._dynamo.device_interface import caching_worker_device_properties
    from torch._dynamo.utils import counters
    from torch._inductor.runtime.hints import DeviceProperties

    torch.compiler.reset()
    counters.clear()
    caching_worker_device_properties.clear()
    DeviceProperties.create.cache_clear()
    with ExitStack() as stack:
        # Code for a faked device is not for the cache, which may be that of a GPU's runs. Nothing is computed
        # on it: no times are taken, by which products of unaligned shapes may be padded, and no constants
        # are made.
        stack.enter_context(
            inductor.patch(
                fx_graph_cache=False, compile_threads=1, profile_bandwidth=True, shape_padding=False,
                joint_graph_constant_folding=False,
            )
        )  # fmt: skip
        stack.enter_context(
            functorch.patch(enable_autograd_cache=False, check_custom_op_aliasing=False)  # by values
        )
        stack.enter_context(dynamo.patch(fail_on_recompile_limit_hit=True))
        code = CompiledCode(launched)
        _listening.append(code)
        try:
            yield code
        finally:
            _listening.remove(code)
            torch.compiler.reset()


class _Driver:
    """Triton's driver, as far as inductor asks it."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = RUNTIME.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@cache
def _install() -> None:
    """Put what compiled code calls beneath torch's dispatcher in the place of what needs a device."""
    import torch._inductor.async_compile as async_compile
    import torch._inductor.compile_fx as compile_fx
    import triton

    class Kernels(async_compile.AsyncCompile):
        def triton(self, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
            _listening[-1].kernels[kernel_name] = source_code
            return CompiledKernel(kernel_name, source_code)

    async_compile.AsyncCompile = Kernels  # type: ignore[misc]
    compile_fx.get_input_idxs_to_check = lambda inputs, static_input_idxs: ()  # of addresses
    triton.runtime.driver.set_active(_Driver())
    made: Any = torch._C._dynamo.guards
    made._empty_strided_cuda = _empty_strided
    made._reinterpret_tensor = _reinterpret
    made.assert_alignment = lambda *_: None
    raw: Any = torch._C
    raw._cuda_getCurrentRawStream = lambda device: RUNTIME.stream


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=torch.device("cuda", 0))


def _reinterpret(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    """A view that costs the host next to nothing, and that no mode hears of."""
    with _disable_current_modes():
        return torch.as_strided(x, size, stride, int(x.storage_offset()) + offset)
