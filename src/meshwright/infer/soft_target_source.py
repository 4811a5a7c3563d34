"""The teacher of a run out of its folder, on the run's ranks, and its answers on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from meshwright import atomic
from meshwright.checkpoint.identity import newest
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import Corpus
from meshwright.data.loader import Loader
from meshwright.distil.stored_answers import AnswerFiles, StoredAnswers, check_tokenizer
from meshwright.distil.teacher import Teacher
from meshwright.model.soft_targets import SoftTargetSource
from meshwright.spec import RunSpec, UserError
from meshwright.spec.files import user_path
from meshwright.spec.load import load
from meshwright.spec.other_models import is_hf, teacher_of
from meshwright.weights.load import import_run, load_tensors

IMPORTED = "teacher"
"""Folder, in that of a run, of what was imported from a teacher's HF folder."""


def soft_targets_of(spec: RunSpec, mesh: Mesh, corpus: Corpus, out: Path) -> SoftTargetSource | None:
    """Return what answers about the samples of a run in the folder `out`; None without distillation.

    All ranks call this. Raises `UserError` for a teacher with another tokenizer than the run's, and for
    answers about other data.
    """
    if spec.distil is None:
        return None
    if spec.distil.logits is not None:
        folder = user_path(spec.distil.logits, "distil.logits")
        return mesh.control.together(lambda: _stored(folder, spec, mesh, corpus))
    return load_teacher(spec, mesh, corpus, out / IMPORTED)


def _stored(folder: Path, spec: RunSpec, mesh: Mesh, corpus: Corpus) -> StoredAnswers:
    """Open the answers in a folder, which must know the samples of the run's first and last step."""
    found = StoredAnswers(folder, spec, mesh, corpus)
    spec = spec.counted(corpus.train.samples)
    loader = Loader(corpus, spec, mesh.data_rank, spec.layout.data_ranks)
    for step in (0, spec.train.last_step - 1):
        found.check(loader.ids(step))
    loader.close()
    return found


def load_teacher(spec: RunSpec, mesh: Mesh, corpus: Corpus, imported: Path) -> Teacher:
    """Return the teacher with the weights of its newest checkpoint; an HF folder becomes `imported`."""
    assert spec.distil is not None and spec.distil.teacher is not None
    given = folder = user_path(spec.distil.teacher, "distil.teacher")
    if is_hf(given):
        mesh.control.on_first(lambda: _import(given, imported, corpus))
        folder = imported
        spec = spec.model_copy(update={"distil": spec.distil.model_copy(update={"teacher": str(imported)})})
    own, trained = teacher_of(spec), load(folder)
    assert own is not None

    def identity() -> dict[str, Any]:
        found = newest(trained.checkpoint.folder(folder))
        sha256 = found.state.get("tokenizer_sha256")
        check_tokenizer(given, sha256, corpus)
        return {"step": found.step, "sha256": found.sha256, "tokenizer_sha256": sha256}

    if not trained.checkpoint.folder(folder).is_dir():
        raise UserError(f"distil.teacher: {folder} has no checkpoint yet; train it first")
    known = mesh.control.on_first(identity)
    teacher = Teacher(spec, own, mesh)
    teacher.identity = known
    tensors = dict(teacher.states.parameters()), dict(teacher.balance.biases())
    load_tensors(folder, trained, *tensors, False, mesh.control, known["step"])
    for unit in teacher.states.units:
        unit.expire()
    return teacher


def _import(folder: Path, out: Path, corpus: Corpus) -> None:
    """Make a run of an HF folder, unless it was made before. Raises `UserError`."""
    if not (out / "run.json").is_file():
        if not (folder / "tokenizer.json").is_file():  # before a copy is made that would lack it, too
            check_tokenizer(folder, None, corpus)
        import_run(folder, out)
        return
    before = json.loads((out / "run.json").read_text(encoding="utf-8")).get("imported")
    if before != str(folder):
        raise UserError(
            f"distil.teacher: {folder} is not the folder that {out} was imported from, {before}; give that "
            f"one, or another --out"
        )


def write_answers(
    spec: RunSpec, mesh: Mesh, corpus: Corpus, out: Path, told: Callable[[int, int], None]
) -> dict[str, Any]:
    """Write the teacher's answers about all samples of a run's steps to the folder `out`, in one step.

    All ranks call this; `told` hears after each step how many samples are done, of how many. Returns what the
    folder says of itself. Raises `UserError`.
    """
    loader = Loader(corpus, spec, mesh.data_rank, spec.layout.data_ranks)
    control = mesh.control
    steps = range(spec.train.total_steps)
    listed = [loader.ids(step) for step in steps]
    every = np.unique(np.concatenate(listed))
    with atomic.folder(out) if control.rank == 0 else nullcontext(out) as own:
        unfinished = Path(control.broadcast(str(own)))
        teacher = load_teacher(spec, mesh, corpus, unfinished / IMPORTED)
        files = AnswerFiles(unfinished, spec)
        control.on_first(lambda: files.create(every))
        files.open()
        seen = np.zeros(len(every), dtype=bool)
        for step, ids in zip(steps, listed, strict=True):
            rows = np.searchsorted(every, ids)
            if not seen[rows].all():
                batch = loader.step(step)
                files.write(batch.ids.numpy(), teacher(batch), mesh)
                seen[rows] = True
                told(int(seen.sum()), len(every))
        loader.close()
        control.together(files.flush)
        found: dict[str, Any] = control.on_first(lambda: files.finish(teacher.identity, corpus.digest))
    control.together(lambda: None)  # the folder is there on all ranks' return
    return found
