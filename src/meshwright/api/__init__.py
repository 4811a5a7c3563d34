"""The Python interface: the functions that the command line calls.

from meshwright import api
from meshwright.spec import load

result = api.train(load(Path("run.toml")), nproc=2, out=Path("runs/first"))
print(api.generate(Path("runs/first"), "def "))

Ranks: `ranks` calls a function on all of them, for every verb; `options` are those of functions and
verbs.
Training: `pretrained_runs` are those of a trained model and rows in memory. `runs` trains, on each rank by
`train_rank`, after `start_checks`, and `run_status` says how that ended; `island_runs` trains step groups
that are worlds of their own, `source` says what keys a run from a model has, `initial_weights` what a run
starts from, `folders` names its folder, `chaos_runs` trains under faults.
Jobs of schedulers: `launches`, with `launch_options`.
Checks: `verify_runs` compares one layout with one device, `sweeps` many; `diagnosis` examines hosts.
Trained models: `generation` with `prompt_files` and `prompt_remarks`, `chats`, `evaluation`, `quantisation`,
`distillation` of a teacher's answers, `weights` for means and merges, and `models` for checkpoints,
exports and imports.
Predictions: `planning`, `cluster_plans`, `fitting` and `dry_runs`. Pages of runs: `reports`.
Loops of others: `engine` (`meshwright.Engine`), whose run is of `engine_spec`, with `engine_arguments`,
`engine_callbacks` and `engine_checkpoints`; `verl_engine` is verl's interface to it.
Run files for what somebody has: `run_files`. What a run reads: `training_samples`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api.chaos_runs import chaos
    from meshwright.api.cluster_plans import plan_clusters
    from meshwright.api.diagnosis import doctor
    from meshwright.api.distillation import distil
    from meshwright.api.dry_runs import dryrun
    from meshwright.api.evaluation import evaluate
    from meshwright.api.fitting import fit
    from meshwright.api.generation import generate
    from meshwright.api.launches import follow, launch, logs, status, stop
    from meshwright.api.models import (
        checkpoint_list,
        checkpoint_verify,
        data_verify,
        export,
        import_hf,
        load_hf,
        load_run,
        tokenize,
    )
    from meshwright.api.planning import explain, goodput, plan, presets, profile, simulate, validate
    from meshwright.api.pretrained_runs import run_from
    from meshwright.api.quantisation import compare_quantisation, quantise
    from meshwright.api.reports import report
    from meshwright.api.run_files.new_run_file import init
    from meshwright.api.runs import train
    from meshwright.api.sweeps import sweep
    from meshwright.api.training_samples import data_show
    from meshwright.api.verify_runs import verify
    from meshwright.api.weights import average, merge

__all__ = [
    "average", "chaos", "checkpoint_list", "checkpoint_verify", "compare_quantisation", "data_show",
    "data_verify", "distil", "doctor", "dryrun", "evaluate", "explain", "export", "fit", "follow",
    "generate", "goodput", "import_hf", "init", "launch", "load_hf", "load_run", "logs", "merge", "plan",
    "plan_clusters",
    "presets", "profile", "quantise", "report", "run_from", "simulate", "status", "stop", "sweep", "tokenize",
    "train", "validate", "verify",
]  # fmt: skip

_MODULES = {
    "chaos_runs": ("chaos",),
    "cluster_plans": ("plan_clusters",),
    "diagnosis": ("doctor",),
    "distillation": ("distil",),
    "dry_runs": ("dryrun",),
    "evaluation": ("evaluate",),
    "fitting": ("fit",),
    "generation": ("generate",),
    "launches": ("follow", "launch", "logs", "status", "stop"),
    "models": (
        "checkpoint_list", "checkpoint_verify", "data_verify", "export", "import_hf", "load_hf", "load_run",
        "tokenize",
    ),
    "planning": ("explain", "goodput", "plan", "presets", "profile", "simulate", "validate"),
    "pretrained_runs": ("run_from",),
    "quantisation": ("compare_quantisation", "quantise"),
    "reports": ("report",),
    "run_files.new_run_file": ("init",),
    "runs": ("train",),
    "sweeps": ("sweep",),
    "training_samples": ("data_show",),
    "verify_runs": ("verify",),
    "weights": ("average", "merge"),
}  # fmt: skip
"""The functions of each module, which is imported when one of them is first used: a verb needs few."""

if not TYPE_CHECKING:  # else every name would be one of the package's

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
                return globals()[name]
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
