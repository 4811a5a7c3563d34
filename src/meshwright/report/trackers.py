"""Optional trackers: TensorBoard, Weights & Biases and Trackio get the rows of the run's own record.

Each package is imported when its tracker is made, before training starts.
"""

from __future__ import annotations

import importlib
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from meshwright.report.format import is_number
from meshwright.runs.record import read_object, write_atomically
from meshwright.spec import UserError
from meshwright.train.callbacks import Observer

PROJECT = "meshwright"
_IDS = "trackers.json"


def scalars(row: dict[str, Any], group: str) -> dict[str, float]:
    """Return the finite numbers of a row by `group/key`, without its step."""
    return {f"{group}/{key}": value for key, value in row.items() if key != "step" and is_number(value)}


class _Tracker(ABC):
    """Base of the trackers: which values of which step they log, for the run `run_name` in folder `out`."""

    name: ClassVar[str]
    module: ClassVar[str]
    """Module of the package."""

    def __init__(self, out: Path, run_name: str, spec_json: dict[str, Any]) -> None:
        self._package = self.package()
        self.out, self.run_name, self.spec_json = out, run_name, spec_json
        self.step = 0
        self._run: Any = None

    @classmethod
    def package(cls) -> Any:
        """Import the package. Raises `UserError` if that fails."""
        try:
            return importlib.import_module(cls.module)
        except ImportError as error:
            raise UserError(
                f"train.trackers: '{cls.name}' cannot be imported ({error}); "
                "run pip install 'meshwright[trackers]', or remove it"
            ) from error

    @abstractmethod
    def start(self) -> Any:
        """Return the package's object that logs the run, which goes on after `self.step`."""

    def identity(self) -> str:
        """Return the id that the run has with the package, which no other run has.

        It is kept in the run's folder, so that a resumed run continues its curves; one that begins anew has a
        new one.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / _IDS
        kept = read_object(path) or {}
        if not self.step or self.name not in kept:
            kept[self.name] = uuid.uuid4().hex[:12]
            write_atomically(path, json.dumps(kept) + "\n")
        return str(kept[self.name])

    @abstractmethod
    def log(self, step: int, values: dict[str, float]) -> None:
        """Log named numbers of one step."""

    def finish(self) -> None:
        """End the package's run."""
        self._run.finish()

    def on_start(self, info: dict[str, Any]) -> None:
        self.step = int(info.get("step", 0))
        self._run = self.start()

    def on_step(self, row: dict[str, Any], group: str = "train") -> None:
        self.step = int(row["step"])
        self.log(self.step, scalars(row, group))

    def on_eval(self, row: dict[str, Any]) -> None:
        self.on_step(row, "validation")

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        step = int(fields.get("step", self.step))
        self.log(step, {f"event/{kind}": 1.0, **scalars(fields, f"event/{kind}")})

    def on_end(self, result: dict[str, Any]) -> None:
        self.log(self.step, scalars(result, "result"))
        self.close()

    def close(self) -> None:
        """End the run if it was started; may be called twice."""
        if self._run is not None:
            self.finish()
            self._run = None


class TensorBoardTracker(_Tracker):
    """Event files in `tensorboard/` of the run's folder.

    A resume, and a rollback, hide the points of lost steps: those of later steps in earlier files.
    """

    name, module = "tensorboard", "torch.utils.tensorboard"

    def start(self) -> Any:
        folder = str(self.out / "tensorboard")
        writer = self._package.SummaryWriter(log_dir=folder, purge_step=self.step + 1)
        writer.add_text("spec", f"```json\n{json.dumps(self.spec_json, indent=2)}\n```", self.step)
        return writer

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "rollback":
            self.finish()
            self.on_start(fields)
        super().on_event(kind, fields)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._run.add_scalar(name, value, step)

    def finish(self) -> None:
        self._run.close()


class WandbTracker(_Tracker):
    """A Weights & Biases run; wandb itself reads `WANDB_MODE=offline` and its other variables.

    The step is a metric of its own (`step`), since wandb ignores values of a step that it has already seen.
    It has no way to remove rows: after a resume or a rollback, lost steps appear twice. A run that is closed
    before its end is marked as failed.
    """

    name = module = "wandb"

    def start(self) -> Any:
        run = self._package.init(
            project=PROJECT,
            name=self.run_name,
            dir=str(self.out),
            config=self.spec_json,
            id=self.identity(),
            resume="allow" if self.step else None,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def on_end(self, result: dict[str, Any]) -> None:
        self._run.summary.update({key: value for key, value in result.items() if is_number(value)})
        self._run.finish()
        self._run = None

    def finish(self) -> None:
        self._run.finish(exit_code=1)


class TrackioTracker(_Tracker):
    """A Trackio run, in Trackio's own folder (`TRACKIO_DIR`).

    Trackio resumes the newest run of a name, so the name ends with the run's id. It has no way to remove
    rows: after a resume or a rollback, lost steps appear twice.
    """

    name = module = "trackio"

    def start(self) -> Any:
        resume = "allow" if self.step else "never"
        name = f"{self.run_name}-{self.identity()}"
        return self._package.init(
            project=PROJECT, name=name, config=self.spec_json, resume=resume, embed=False
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)


_KINDS = {kind.name: kind for kind in (TensorBoardTracker, WandbTracker, TrackioTracker)}


def check_trackers(names: Sequence[str]) -> None:
    """Raise `UserError` for an unknown name, or a package that is not installed."""
    unknown = [name for name in names if name not in _KINDS]
    if unknown:
        raise UserError(f"train.trackers: {unknown[0]!r} is unknown; known are {', '.join(_KINDS)}")
    for name in names:
        _KINDS[name].package()


def make_trackers(
    names: Sequence[str], out: Path, run_name: str, spec_json: dict[str, Any]
) -> list[Observer]:
    """Return the trackers of `train.trackers`, not started. Raises `UserError` as `check_trackers` does."""
    check_trackers(names)
    return [_KINDS[name](out, run_name, spec_json) for name in names]
