"""The faked device as a shared library, which torch must find when it is imported."""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from meshwright.cpp_library import SWITCH, CppLibrary, NoLibraryError
from meshwright.host import is_switched_on
from meshwright.spec import UserError

SEEN = ("2.13",)
"""Versions of torch that this was seen to work with; it stands in for parts that differ between them."""
NAMES = {(8, 0): "NVIDIA A100-SXM4-80GB", (9, 0): "NVIDIA H100 80GB HBM3", (10, 0): "NVIDIA B200"}
"""Compute capability -> the GPU that is faked."""
_GIVE = "or give --device cpu"


class TorchBuild(NamedTuple):
    """The torch that is installed, as it is known before it is imported."""

    folder: Path
    version: str
    toolkit: str | None
    """The version of CUDA or ROCm that it was built for; None for a build for CPUs."""


@cache
def torch_build() -> TorchBuild:
    """The torch of this process."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None  # a dependency
    folder = Path(spec.origin).parent
    facts = runpy.run_path(str(folder / "version.py"))
    return TorchBuild(folder, facts["__version__"], facts.get("cuda") or facts.get("hip"))


def device_library() -> CppLibrary:
    """The sources of the device, with what they are linked to."""
    folder, version, _ = torch_build()
    return CppLibrary(
        "fake_cuda",
        (Path(__file__).with_name("device.cpp"),),
        options=("-O0", f"-I{folder / 'include'}"),  # it computes nothing
        linked=(f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}", "-ltorch_cpu", "-lc10"),
        built_for=version,
    )


def check() -> None:
    """Raise `UserError` if the device cannot be faked with the torch of this process."""
    _, version, toolkit = torch_build()
    if toolkit is not None:
        raise UserError(
            f"--device: is cuda; torch {version} is built for GPUs and finds none here, and one can be faked "
            f"for its build for CPUs only; install that in an environment of its own, {_GIVE}"
        )
    no_gpu = "--device: is cuda; this machine has no GPU, and one is faked"
    if not any(version.startswith(f"{each}.") for each in SEEN):
        raise UserError(
            f"{no_gpu} for torch {' and '.join(SEEN)} only, while {version} is installed; install torch "
            f"{SEEN[-1]}, {_GIVE}"
        )
    if sys.platform != "linux":
        raise UserError(f"{no_gpu} on Linux only; give --device cpu")
    if is_switched_on(SWITCH):
        raise UserError(f"{no_gpu} by C++ code, which {SWITCH} switches off; unset it, {_GIVE}")


@cache
def load() -> ctypes.CDLL:
    """Put the device where torch looks for it. Raises `UserError`; torch must not have been imported."""
    check()
    assert "torch" not in sys.modules
    try:
        library = device_library().loaded(ctypes.RTLD_GLOBAL)
    except NoLibraryError as error:
        raise UserError(
            "--device: is cuda; this machine has no GPU, and the code that fakes one cannot be compiled: "
            f"{error}, {_GIVE}"
        ) from error
    library.meshwright_fake_cuda.restype = ctypes.c_bool
    return library


def is_needed() -> bool:
    """True if torch is a build for CPUs, so that a GPU has to be faked, and this process has none yet."""
    return torch_build().toolkit is None and not is_loaded()


def is_loaded() -> bool:
    """True if this process has the faked device."""
    return load.cache_info().currsize > 0
