"""A teacher's answers about samples in a folder: its likeliest tokens with their log-probabilities.

    answers.json          the teacher, the data, `top_k`, `temperature`, and hashes of the files
    ids.npy               (S,) numbers of the samples in the training split, ascending
    log_probabilities.npy (S, T, K + 1) in float32: of the K likeliest tokens, and of all others together
    tokens.npy            (S, T, K) in int32: which tokens these are

So 8 K + 4 bytes a token. Samples are found by number: any layout, order and number of epochs reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, Strict
from typing_extensions import TypedDict

from meshwright import atomic
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import Corpus
from meshwright.data.loader import Batch
from meshwright.data.permutation import I64
from meshwright.model.soft_targets import SoftTargets
from meshwright.parallel.context_parallel import share, zigzag
from meshwright.spec import RunSpec, UserError
from meshwright.spec.files import MAX_JSON, parse_json, read_text
from meshwright.spec.records import read

RECORD = "answers.json"
FILES = ("ids.npy", "log_probabilities.npy", "tokens.npy")

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Text = Annotated[str, Strict()]


class TeacherState(TypedDict):
    """Which teacher a run has."""

    step: Count
    sha256: Text
    tokenizer_sha256: Text | None


class AnswersRecord(TypedDict):
    """The record of a folder of answers."""

    teacher: TeacherState
    data_digest: Text
    samples: Count
    seq_len: Count
    top_k: Count
    temperature: float
    files: dict[str, Text]


def check_tokenizer(teacher: Path, sha256: str | None, corpus: Corpus) -> None:
    """Raise `UserError` unless the tokenizer of a teacher is that of the data; numbers stand for no text."""
    if not corpus.has_text:
        return
    own = corpus.tokenizer.content_sha256
    if sha256 is None:
        raise UserError(
            f"distil.teacher: {teacher} has no tokenizer to compare with that of the data ({own[:12]}); give "
            f"a run that was trained on text, or an HF folder with its tokenizer.json"
        )
    if sha256 != own:
        raise UserError(
            f"distil.teacher: {teacher} has another tokenizer (SHA-256 {sha256[:12]}) than the data "
            f"({own[:12]}), so the same number would be another token; give the teacher's tokenizer.json in "
            f"data.tokenizer"
        )


class AnswerFiles:
    """The files of a folder that is being written."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        assert spec.distil is not None and spec.distil.top_k is not None
        self.folder, self.how = folder, spec.distil
        self.top_k, self.length = spec.distil.top_k, spec.data.seq_len

    def create(self, ids: I64) -> None:
        """Make the files, for these samples. Raises `UserError` where the disk has no room for them."""
        shapes = {FILES[1]: (self.top_k + 1, "float32"), FILES[2]: (self.top_k, "int32")}
        np.save(self.folder / FILES[0], ids)
        for name, (width, dtype) in shapes.items():
            whole = (len(ids), self.length, width)
            np.lib.format.open_memmap(self.folder / name, "w+", dtype=dtype, shape=whole)

    def open(self) -> None:
        """Map the files, after they were made."""
        self._ids = np.load(self.folder / FILES[0])
        self._log_p, self._tokens = (np.load(self.folder / name, mmap_mode="r+") for name in FILES[1:])

    def write(self, ids: I64, soft_targets: SoftTargets | None, mesh: Mesh) -> None:
        """Write this rank's answers about the samples `ids`, unless another tensor rank does."""
        if soft_targets is None or soft_targets.indices is None or mesh.tensor.rank > 0:
            return
        rows = np.searchsorted(self._ids, ids)[:, None]
        places = zigzag(self.length, mesh.context.size, mesh.context.rank).numpy()
        self._log_p[rows, places] = soft_targets.log_p.cpu().numpy()
        self._tokens[rows, places] = soft_targets.indices.cpu().numpy()

    def flush(self) -> None:
        """See that what was written is on the disk."""
        for file in (self._log_p, self._tokens):
            file.flush()

    def finish(self, teacher: Mapping[str, Any], data_digest: str) -> dict[str, Any]:
        """Write the record, and return it."""
        record = {
            "teacher": dict(teacher),
            "data_digest": data_digest,
            "samples": len(self._ids),
            "seq_len": self.length,
            "top_k": self.top_k,
            "temperature": self.how.temperature,
            "files": {name: _sha256(self.folder / name) for name in FILES},
        }
        atomic.write(self.folder / RECORD, json.dumps(record))
        return record


class StoredAnswers:
    """The answers of a folder, about this rank's tokens."""

    flops_per_token = 0.0

    def __init__(self, folder: Path, spec: RunSpec, mesh: Mesh, corpus: Corpus) -> None:
        """Raises `UserError` unless the folder is whole, and answers what the run asks."""
        assert spec.distil is not None
        self._how, self._mesh, self._folder = spec.distil, mesh, folder
        record = check_answers(folder, spec)
        if record["data_digest"] != corpus.digest:
            raise UserError(
                f"distil.logits: {folder} is about other data (digest {record['data_digest'][:12]}, now "
                f"{corpus.digest[:12]}); give the corpus, tokenizer, data.seq_len, data.pack, "
                f"data.document_mask and data.val_fraction that it was written with, or write it anew"
            )
        self.identity: Mapping[str, Any] = dict(record["teacher"])
        if mesh.rank == 0:
            _check_files(folder, record)
        try:
            self._ids: I64 = np.load(folder / FILES[0])
            self._log_p, self._tokens = (np.load(folder / name, mmap_mode="r") for name in FILES[1:])
        except (OSError, ValueError) as error:
            raise UserError(f"distil.logits: {folder} cannot be read ({error}); write it anew") from None

    def __call__(self, batch: Batch) -> SoftTargets | None:
        rows = self.check(batch.ids.numpy())
        log_p, tokens = (
            share(torch.from_numpy(file[rows]), self._mesh.context).to(self._mesh.device, non_blocking=True)
            for file in (self._log_p, self._tokens)
        )
        return SoftTargets(self._how, log_p, tokens.long())

    def check(self, ids: I64) -> NDArray[np.intp]:
        """Return the rows of samples with these numbers. Raises `UserError` for one without an answer."""
        rows = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        missing = ids[self._ids[rows] != ids]
        if len(missing):
            raise UserError(
                f"distil.logits: {self._folder} has no answer about sample {missing[0]}, as it was written "
                f"for fewer steps or another train.seed; write it for this run"
            )
        return rows


def check_answers(folder: Path, spec: RunSpec) -> AnswersRecord:
    """Return the record of a folder. Raises `UserError` unless it answers as `spec` asks."""
    assert spec.distil is not None
    try:
        record: AnswersRecord = read(
            AnswersRecord, parse_json(read_text(folder / RECORD, MAX_JSON)), str(folder / RECORD)
        )
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"distil.logits: {folder} was not written by `meshwright distil`: its {RECORD} cannot be read "
            f"({error}); give a folder that was"
        ) from None
    asked = {"top_k": spec.distil.top_k, "temperature": spec.distil.temperature}
    for key, value in asked.items():
        if record[key] != value:  # type: ignore[literal-required]
            was = record[key]  # type: ignore[literal-required]
            raise UserError(
                f"distil.{key}: {value} is not that of distil.logits = {folder}, {was}; give {was}, or write "
                f"answers anew"
            )
    return record


def _check_files(folder: Path, record: AnswersRecord) -> None:
    for name in FILES:
        try:
            whole = _sha256(folder / name) == record["files"].get(name)
        except OSError as error:
            raise UserError(
                f"distil.logits: {folder / name} cannot be read ({error.strerror}); write the answers anew"
            ) from None
        if not whole:
            raise UserError(
                f"distil.logits: {folder / name} is damaged: it does not have the SHA-256 of {RECORD}; write "
                f"the answers anew"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
