"""The job of a scheduler that this process runs in: its number, how often it was started, and its end.

Slurm tells the first two in variables, and the end by `scontrol`, as a job's limit may be changed while it
runs. Any other scheduler's script may say the end itself, in MESHWRIGHT_JOB_END.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from meshwright.spec import UserError

JOB_END = "MESHWRIGHT_JOB_END"
"""The end of the job in seconds since 1970, set by whoever starts the ranks."""
ANSWER_S = 20.0
"""Seconds that Slurm's controller has to answer."""


def job(environment: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """The scheduler, the job's number and how often it was restarted, for a record; None outside of one."""
    given = os.environ if environment is None else environment
    if "SLURM_JOB_ID" not in given:
        return None
    restarts = given.get("SLURM_RESTART_COUNT", "0")
    found = {"scheduler": "slurm", "job": given["SLURM_JOB_ID"], "restarts": int(restarts)}
    if "SLURM_ARRAY_TASK_ID" in given:
        found |= {"array": given.get("SLURM_ARRAY_JOB_ID"), "task": given["SLURM_ARRAY_TASK_ID"]}
    return found


def deadly_signal(environment: Mapping[str, str] | None = None) -> str | None:
    """A warning in a scheduler's job whose torchrun the signal of its end would kill; None where none would.

    The agent ends by a signal that it does not handle, and its ranks with it, before they have saved.
    """
    given = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in given or job(given) is None:
        return None
    agent = os.getppid()
    with suppress(OSError):
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{agent}/status").read_text(), re.MULTILINE)
        if found is not None and not int(found[1], 16) & 1 << signal.SIGUSR1 - 1:
            return (
                f"torchrun (process {agent}) does not handle SIGUSR1, by which a scheduler tells that a job "
                f"ends soon: it would die of it, and the run with it, without a checkpoint; start it with "
                f"--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
            )
    return None


def job_end(environment: Mapping[str, str] | None = None) -> float | None:
    """When the scheduler ends this job, in seconds since 1970; None where it has no limit or is no job.

    Raises OSError or subprocess.SubprocessError where Slurm does not say it, and `UserError` for a
    MESHWRIGHT_JOB_END that is no number.
    """
    given = os.environ if environment is None else environment
    if (text := given.get(JOB_END)) is not None:
        if not re.fullmatch(r"\d+(\.\d*)?", text):
            raise UserError(
                f"{JOB_END}: {text!r} is not a time in seconds since 1970; give one, as of date +%s, or "
                f"unset it"
            )
        return float(text)
    if "SLURM_JOB_ID" not in given:
        return None
    command = ["scontrol", "show", "job", "--oneliner", given["SLURM_JOB_ID"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", done.stdout)
    return None if found is None else datetime.fromisoformat(found[1]).timestamp()
