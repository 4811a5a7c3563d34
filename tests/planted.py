"""The program of ranks as tests run it: with a deed, if PLANTED names one, at a step of one rank."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from meshwright.data.loader import Batch
from meshwright.launch import call
from meshwright.spec import UserError
from meshwright.train.loop import TrainingRun
from meshwright.train.step import Trainer
from small import measure_peak_quickly

ENVIRONMENT = "PLANTED"


def main() -> None:
    """Make the launcher's call; with PLANTED, a JSON object of `deed`, `rank` and `step`, the deed too."""
    measure_peak_quickly()
    plan: dict[str, Any] = json.loads(os.environ.get(ENVIRONMENT, "{}"))
    if plan and plan["rank"] == int(os.environ["RANK"]):
        generations = plan.get("generations", [0])
        if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) in generations:
            _plant(plan["deed"], plan["step"])
    call.main()


def _plant(deed: str, step: int) -> None:
    """Do the deed before the forward of a step (from 1), or before the first for step 0.

    From its step on, `slow` sleeps for half as long as each forward and backward takes.
    """

    def planted_sleep() -> None:
        time.sleep(3600)

    def planted_error() -> None:
        raise ValueError(f"planted at step {step}")

    def planted_mistake() -> None:
        raise UserError(f"planted: step {step} is a mistake")

    def planted_exit() -> None:
        os._exit(7)

    def planted_kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    deeds: dict[str, Callable[[], None]] = {
        "sleep": planted_sleep,
        "raise": planted_error,
        "mistake": planted_mistake,
        "exit": planted_exit,
        "kill": planted_kill,
    }
    gradients, begin = Trainer.gradients, TrainingRun._start
    done = 0

    def gradients_with_a_deed(self: Trainer, batch: Batch) -> Any:
        nonlocal done
        done = self.mesh.heartbeat._step + 1
        if done == step and deed in deeds:
            deeds[deed]()
        begun = time.monotonic()
        result = gradients(self, batch)
        if deed == "slow" and done >= step:
            time.sleep(0.5 * (time.monotonic() - begun))
        return result

    def start_with_a_deed(self: TrainingRun, resume: str | None) -> None:
        if step == 0:
            deeds[deed]()
        begin(self, resume)

    Trainer.gradients = gradients_with_a_deed  # type: ignore[method-assign]
    TrainingRun._start = start_with_a_deed  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
