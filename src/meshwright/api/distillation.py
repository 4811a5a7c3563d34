"""A teacher's answers about a run's samples, written to a folder for `distil.logits`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from meshwright.api.options import Option, folder_name
from meshwright.api.ranks import Result, run_on_ranks
from meshwright.api.start_checks import check_other_models
from meshwright.rank.env import worker
from meshwright.spec import RunSpec, UserError
from meshwright.spec.rules import ranks_match

MODULES = ("meshwright.infer.soft_target_source",)
"""Modules that ranks need."""


def distil(
    spec: RunSpec,
    out: Annotated[Path, Option("folder to write", "DIR", folder_name)],
    *,
    nproc: int | None = None,
    told: Callable[[int, int], None] | None = None,
) -> Result:
    """Ask the run's teacher about every sample of the run's steps, and write its answers to the folder `out`.

    Runs with `distil.logits` read them there, whatever their layout and student. Returns what the folder says
    of itself: `teacher`, `samples`, `top_k`, `temperature` and more. The first rank tells `told`, a function
    of a module, how many samples are done, and of how many. Raises `UserError`.
    """
    ranks, out = spec.layout.world_size if nproc is None else nproc, Path(out)
    if worker() is None:  # else the ranks check together
        ranks_match(spec, ranks)
        check_asked(spec, out)
    return run_on_ranks(partial(distil_worker, spec, out, told=told), ranks, spec=spec, modules=MODULES)


def check_asked(spec: RunSpec, out: Path) -> None:
    """Raise `UserError` unless there is a teacher to ask, and a new folder for what it answers."""
    if spec.distil is None or spec.distil.teacher is None:
        raise UserError("distil.teacher: is missing; give the folder of the teacher to ask")
    if spec.distil.top_k is None:
        raise UserError(
            "distil.top_k: is missing; give how many of the teacher's likeliest tokens to keep, such as 32"
        )
    if spec.distil.hidden:
        raise UserError(
            f"distil.hidden: {spec.distil.hidden} needs the teacher itself while the student is trained; "
            f"give 0 to write log-probabilities"
        )
    check_other_models(spec)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out: {out} exists and is not an empty folder; give another --out")


def distil_worker(spec: RunSpec, out: Path, *, told: Callable[[int, int], None] | None = None) -> Result:
    """Ask and write as one rank of the world of torchrun, or alone; every rank returns the result."""
    from meshwright.data.corpus import open_corpus
    from meshwright.infer.soft_target_source import write_answers
    from meshwright.rank.world import mesh_of, once_per_host

    def silent(done: int, of: int) -> None:
        """Say nothing."""

    with mesh_of(spec) as mesh:
        mesh.control.on_first(lambda: check_asked(spec, out))
        once_per_host(mesh.control, lambda: open_corpus(spec))
        corpus = mesh.control.together(lambda: open_corpus(spec, "lazy"))
        tell = told if told is not None and mesh.rank == 0 else silent
        try:
            return write_answers(spec, mesh, corpus, out, tell)
        except OSError as error:
            raise UserError(
                f"--out: {out} cannot be written ({error.strerror}); give another --out"
            ) from error
