"""The cases of the comparison: which model is trained, in which precision and layout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.spec import RunSpec, load

SEQ_LEN, SEQUENCES = 512, 8
MODELS = ("small", "base", "moe-small")


class CaseLayout(NamedTuple):
    """A title, the number of processes, and the run's keys."""

    title: str
    processes: int
    layout: dict[str, int]


CASES = {
    "one-thread": CaseLayout("one process on one core", 1, {"layout.micro_batch": 8}),
    "one": CaseLayout("one process on all cores", 1, {"layout.micro_batch": 8}),
    "replicate": CaseLayout(
        "two processes, each with the whole model",
        2,
        {"layout.dp": 2, "layout.zero": 0, "layout.micro_batch": 4},
    ),
    "zero3": CaseLayout(
        "two processes, ZeRO-3", 2, {"layout.dp": 2, "layout.zero": 3, "layout.micro_batch": 4}
    ),
    "tp2": CaseLayout("two processes, tensor parallel", 2, {"layout.tp": 2, "layout.micro_batch": 8}),
    "pp2": CaseLayout("two processes, pipeline parallel", 2, {"layout.pp": 2, "layout.micro_batch": 2}),
}


@dataclass(frozen=True)
class Case:
    """A model in a precision and a layout."""

    model: str
    precision: str
    name: str

    @property
    def processes(self) -> int:
        return CASES[self.name].processes

    @property
    def layout(self) -> dict[str, int]:
        """The run's keys that are of the case."""
        return CASES[self.name].layout

    @property
    def cores(self) -> list[int]:
        """The cores that the case has."""
        cores = sorted(os.sched_getaffinity(0))
        return cores[:1] if self.name == "one-thread" else cores

    def keys(self, steps: int) -> dict[str, object]:
        """The run's keys."""
        return {
            "model.preset": self.model,
            "data.corpus": "synthetic",
            "data.seq_len": SEQ_LEN,
            "data.document_mask": "false",
            "train.batch_tokens": SEQ_LEN * SEQUENCES,
            "train.steps": steps,
            "train.log_every": 1,
            "precision.compute": self.precision,
            **self.layout,
        }

    def spec(self, steps: int) -> RunSpec:
        return load(None, [(key, str(value)) for key, value in self.keys(steps).items()])

    def words(self, steps: int, others: Mapping[str, object] | None = None) -> list[str]:
        """The words by which a command gets the run's keys, with `others` in place of the same ones."""
        keys = self.keys(steps) | dict(others or {})
        return [word for key, value in keys.items() for word in (f"--{key}", str(value))]
