"""How far the runs of a job are, by what each has written in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.runs.record import RUN, read_metrics, read_object
from meshwright.runs.status import read_status
from meshwright.submit.scheduler import State


def progress(out: Path) -> dict[str, Any]:
    """The status of the run in `out`, its step and the last one, its loss, and how often it was started.

    What is not known yet is None.
    """
    status, info = read_status(out), read_object(out / RUN) or {}
    rows = [row for row in read_metrics(out) if "loss" in row]
    starts = [start for start in info.get("starts") or [] if isinstance(start, dict)]
    return {
        "out": str(out),
        "status": None if status is None else status[0],
        "reason": None if status is None else status[1] or None,
        "step": rows[-1].get("step") if rows else None,
        "last_step": starts[-1].get("last_step") if starts else None,
        "loss": rows[-1]["loss"] if rows else None,
        "starts": len(starts),
    }


def told_state(state: State, status: str | None) -> State:
    """The state of a run's job by the scheduler; one that was told to stop ends with an error's exit code."""
    return "stopped" if state == "failed" and status == "stopped" else state


def in_words(found: dict[str, Any]) -> str:
    """Progress in a few words: step 120/300, loss 4.027."""
    if found["step"] is None:
        return "no step yet"
    last = "" if found["last_step"] is None else f"/{found['last_step']}"
    loss = "" if found["loss"] is None else f", loss {found['loss']:.4g}"
    return f"step {found['step']}{last}{loss}"
