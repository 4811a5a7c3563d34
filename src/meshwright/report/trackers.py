"""Optional trackers: TensorBoard, Weights & Biases and Trackio get the rows of the run's own record.

Each package is imported when its tracker is made, before training starts.
"""

from __future__ import annotations

import importlib
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.report.format import is_number
from meshwright.report.record import write_atomically
from meshwright.spec import UserError
from meshwright.train.callbacks import Observer

PROJECT = "meshwright"
_IDS = "trackers.json"


def _import(tracker: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"train.trackers: '{tracker}' cannot be imported ({error}); "
            "run pip install 'meshwright[trackers]', or remove it"
        ) from error


def scalars(row: dict[str, Any], group: str) -> dict[str, float]:
    """Return the finite numbers of a row by `group/key`, without its step."""
    return {f"{group}/{key}": value for key, value in row.items() if key != "step" and is_number(value)}


class _Tracker(ABC):
    """Base of the trackers: which values of which step they log, for the run `run_name` in folder `out`."""

    def __init__(self, out: Path, run_name: str, spec_json: dict[str, Any]) -> None:
        self.out, self.run_name, self.spec_json = out, run_name, spec_json
        self.step = 0

    @abstractmethod
    def log(self, step: int, values: dict[str, float]) -> None:
        """Log named numbers of one step."""

    def on_step(self, row: dict[str, Any]) -> None:
        self.step = int(row["step"])
        self.log(self.step, scalars(row, "train"))

    def on_eval(self, row: dict[str, Any]) -> None:
        self.step = int(row["step"])
        self.log(self.step, scalars(row, "validation"))

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        step = int(fields.get("step", self.step))
        self.log(step, {f"event/{kind}": 1.0, **scalars(fields, f"event/{kind}")})


class TensorBoardTracker(_Tracker):
    """Event files in `tensorboard/` of the run's folder; a resume hides the points of lost steps."""

    def __init__(self, out: Path, run_name: str, spec_json: dict[str, Any]) -> None:
        super().__init__(out, run_name, spec_json)
        self._package = _import("tensorboard", "torch.utils.tensorboard")
        self._writer: Any = None

    def on_start(self, info: dict[str, Any]) -> None:
        self.step = int(info.get("step", 0))
        purge = self.step + 1 if self.step else None
        self._writer = self._package.SummaryWriter(log_dir=str(self.out / "tensorboard"), purge_step=purge)
        self._writer.add_text("spec", f"```json\n{json.dumps(self.spec_json, indent=2)}\n```", self.step)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def on_end(self, result: dict[str, Any]) -> None:
        self.log(self.step, scalars(result, "result"))
        self.close()

    def close(self) -> None:
        """Flush and close the event file; may be called twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbTracker(_Tracker):
    """A Weights & Biases run; wandb itself reads `WANDB_MODE=offline` and its other variables.

    The run's id is kept in `trackers.json`, so that a resumed run continues its curves. The step is a metric
    of its own (`step`), since wandb ignores values of a step that it has already seen.
    """

    def __init__(self, out: Path, run_name: str, spec_json: dict[str, Any]) -> None:
        super().__init__(out, run_name, spec_json)
        self._package = _import("wandb", "wandb")
        self._run: Any = None

    def _id(self, resumed: bool) -> str:
        path = self.out / _IDS
        if resumed and path.is_file():
            return str(json.loads(path.read_text(encoding="utf-8"))["wandb"])
        fresh = uuid.uuid4().hex[:12]
        write_atomically(path, json.dumps({"wandb": fresh}) + "\n")
        return fresh

    def on_start(self, info: dict[str, Any]) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.step = int(info.get("step", 0))
        resumed = self.step > 0
        self._run = self._package.init(
            project=PROJECT,
            name=self.run_name,
            dir=str(self.out),
            config=self.spec_json,
            id=self._id(resumed),
            resume="allow" if resumed else None,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def on_end(self, result: dict[str, Any]) -> None:
        self._run.summary.update({key: value for key, value in result.items() if is_number(value)})
        self._run.finish()
        self._run = None

    def close(self) -> None:
        """Mark a run that did not reach its end as failed; may be called twice."""
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None


class TrackioTracker(_Tracker):
    """A Trackio run, in Trackio's own folder (`TRACKIO_DIR`).

    Trackio has no way to remove rows: after a resume, lost steps appear twice.
    """

    def __init__(self, out: Path, run_name: str, spec_json: dict[str, Any]) -> None:
        super().__init__(out, run_name, spec_json)
        self._package = _import("trackio", "trackio")
        self._run: Any = None

    def on_start(self, info: dict[str, Any]) -> None:
        self.step = int(info.get("step", 0))
        resume = "allow" if self.step else "never"
        self._run = self._package.init(
            project=PROJECT, name=self.run_name, config=self.spec_json, resume=resume, embed=False
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def on_end(self, result: dict[str, Any]) -> None:
        self.log(self.step, scalars(result, "result"))
        self.close()

    def close(self) -> None:
        """Finish the run; may be called twice."""
        if self._run is not None:
            self._run.finish()
            self._run = None


_KINDS: dict[str, Callable[[Path, str, dict[str, Any]], Observer]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}


def make_trackers(
    names: Sequence[str], out: Path, run_name: str, spec_json: dict[str, Any]
) -> list[Observer]:
    """Return the trackers of `train.trackers`, not started.

    Raises `UserError` for an unknown name, or a package that is not installed.
    """
    unknown = [name for name in names if name not in _KINDS]
    if unknown:
        raise UserError(f"train.trackers: {unknown[0]!r} is unknown; known are {', '.join(_KINDS)}")
    return [_KINDS[name](out, run_name, spec_json) for name in names]
