"""The Python interface: the functions that the command line calls.

from meshwright import api
from meshwright.spec import load

result = api.train(load(Path("run.toml")), nproc=2, out=Path("runs/first"))
print(api.generate(Path("runs/first"), "def "))

Ranks: `ranks` calls a function on all of them, for every verb; `options` are those of functions and
verbs.
Training: `runs` trains, on each rank by `train_rank`, after `start_checks`; `island_runs` trains step groups
that are worlds of their own, `source` says what keys a run from a model has, `initial_weights` what a
run starts from, `folders` names its folder,
`chaos_runs` trains under faults.
Checks: `verify_runs` compares one layout with one device, `sweeps` many.
Trained models: `generation` with `prompt_files` and `prompt_remarks`, `evaluation`, `quantisation`,
`distillation` of a teacher's answers, `weights` for means and merges, and `models` for checkpoints,
exports and imports.
Predictions: `planning`.
Run files for what somebody has: `run_files`.
"""

from __future__ import annotations

from meshwright.api.chaos_runs import chaos
from meshwright.api.distillation import distil
from meshwright.api.evaluation import evaluate
from meshwright.api.generation import generate
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
from meshwright.api.planning import dryrun, explain, goodput, plan, profile, simulate, validate
from meshwright.api.quantisation import compare_quantisation, quantise
from meshwright.api.run_files.new_run_file import init
from meshwright.api.runs import train
from meshwright.api.sweeps import sweep
from meshwright.api.verify_runs import verify
from meshwright.api.weights import average, merge

__all__ = [
    "average", "chaos", "checkpoint_list", "checkpoint_verify", "compare_quantisation", "data_verify",
    "distil", "dryrun", "evaluate", "explain", "export", "generate", "goodput", "import_hf", "init",
    "load_hf", "load_run", "merge", "plan", "profile", "quantise", "simulate", "sweep", "tokenize", "train",
    "validate", "verify",
]  # fmt: skip
