"""The Python interface: the functions that the command line calls.

from meshwright import api
from meshwright.spec import load

result = api.train(load(Path("run.toml")), nproc=2, out=Path("runs/first"))
print(api.generate(Path("runs/first"), "def "))
"""

from __future__ import annotations

from meshwright.api.models import (
    checkpoint_list,
    checkpoint_verify,
    checkpoints_of,
    data_verify,
    export,
    generate,
    import_hf,
    load_hf,
    load_run,
    tokenize,
)
from meshwright.api.planning import (
    dryrun,
    explain,
    goodput,
    plan,
    profile,
    profile_worker,
    simulate,
    validate,
)
from meshwright.api.runs import default_out, train, train_worker, verify, verify_worker, write_verdict
from meshwright.planner.plan import Plan, Plans, estimate

__all__ = [
    "Plan",
    "Plans",
    "checkpoint_list",
    "checkpoint_verify",
    "checkpoints_of",
    "data_verify",
    "default_out",
    "dryrun",
    "estimate",
    "explain",
    "export",
    "generate",
    "goodput",
    "import_hf",
    "load_hf",
    "load_run",
    "plan",
    "profile",
    "profile_worker",
    "simulate",
    "tokenize",
    "train",
    "train_worker",
    "validate",
    "verify",
    "verify_worker",
    "write_verdict",
]
