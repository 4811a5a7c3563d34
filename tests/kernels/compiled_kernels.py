"""The Triton kernels that torch's compiler writes for a run's blocks, in a process with a faked GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from cubins import Resources, resources
from torch._inductor.runtime import triton_helpers

from meshwright.dryrun.rank_step import rehearse
from meshwright.dryrun.trace import Trace
from meshwright.fake_cuda import inductor
from meshwright.fake_cuda.runtime import set_capability
from meshwright.kernels.triton.specialisation import Specialisation
from meshwright.spec import RunSpec

MOST_CONFIGURATIONS = 4
"""Those of a kernel that are compiled at most: its autotuner takes the fastest."""


def kernels_of(spec: RunSpec, capability: tuple[int, int]) -> dict[str, str]:
    """Name -> source of each kernel of a step."""
    set_capability(capability)
    found: list[inductor.CompiledCode] = []
    before = inductor.CompiledCode.__init__

    def noted(code: inductor.CompiledCode, launched: inductor.Launched) -> None:
        before(code, launched)
        found.append(code)

    inductor.CompiledCode.__init__ = noted  # type: ignore[method-assign]
    try:
        device = torch.device("cuda", 0)
        rehearse(spec, 0, device, Trace(device))
    finally:
        inductor.CompiledCode.__init__ = before  # type: ignore[method-assign]
    return found[0].kernels


def least_spilled(spec: RunSpec, capability: tuple[int, int], folder: Path) -> dict[str, Resources]:
    """Resources of each kernel in the first of its configurations that spills least."""
    return {
        name: _least(_module(name, source, folder), name, capability, folder)
        for name, source in kernels_of(spec, capability).items()
    }


def _module(name: str, source: str, folder: Path) -> ModuleType:
    triton_helpers.set_driver_to_gpu = lambda: None  # the faked one's is there
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _least(module: ModuleType, name: str, capability: tuple[int, int], folder: Path) -> Resources:
    tuner: Any = getattr(module, name)
    least: Resources | None = None
    for configuration in tuner.configs[:MOST_CONFIGURATIONS]:
        found = resources(_specialisation(tuner, configuration), 10 * capability[0], folder)
        if least is None or found.spilled < least.spilled:
            least = found
        if not least.spilled:
            break
    assert least is not None
    return least


def _specialisation(tuner: Any, configuration: Any) -> Specialisation:
    """A kernel with the types that inductor gives it, and the constants of one configuration."""
    names, meta = tuner.fn.arg_names, tuner.triton_meta
    constants = {**meta.get("constants", {}), **configuration.kwargs}
    (aligned,) = meta["configs"]
    return Specialisation(
        tuner.fn,
        {key: value for key, value in meta["signature"].items() if value != "constexpr"},
        {name: constants[name] for name in names if name in constants},
        configuration.num_warps,
        configuration.num_stages,
        tuple(names[place[0]] for place in aligned),
    )
