"""Meshwright plans, trains and checks large language models on any mesh of devices.

Who asks: `cli` is the command line and `api` the Python interface. `Engine` is for programs with a loop of
their own, and `testing` compares their modules.
A run: `spec` says what it is, `submit` makes it a job of a scheduler, `launch` starts and watches its ranks,
`rank` is one of them, `train` is its loop and step, `runs` its record, `report` its pages, and `chaos` the
faults that are injected into it.
A step: `data` makes batches, `model` is the decoder on `kernels`, `parallel` splits it over the mesh of
`comm`, by the pipelines of `schedule`; `optim` updates it, `islands` and `distil` are parts of a step.
What becomes of a model: `checkpoint` stores it, `weights` loads, averages and rounds it, `exchange` reads
and writes formats of others, `infer` generates and evaluates.
What checks and predicts: `verify` compares with one device, `doctor` examines hosts, `dryrun` runs one rank
without the others, on a GPU of `fake_cuda` where there is none, `planner` finds layouts, for clusters of
`hardware` that `profile` measures, with failures by `reliability`.
Small: `storage` opens files wherever they are kept, `cpp_library` compiles C++, `atomic` replaces files,
`host` knows the processors, `units` formats, `version` says the commit.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api.engine import Engine as Engine
    from meshwright.api.engine_callbacks import EngineCallback as EngineCallback

__version__ = "0.7.0"

_MODULES = {"Engine": "meshwright.api.engine", "EngineCallback": "meshwright.api.engine_callbacks"}
"""Where a name is, whose module imports torch, which most of the package does without."""

if not TYPE_CHECKING:  # else every name would be one of the package's

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            globals()[name] = getattr(import_module(_MODULES[name]), name)
            return globals()[name]
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
