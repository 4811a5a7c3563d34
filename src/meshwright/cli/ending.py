"""How a run ended: the object that `train --json` and `chaos --json` print last, and what people are told."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.exchange.hf_config import export_remark
from meshwright.rank.failure import RanksFailed, exit_code
from meshwright.runs.record import RUN, read_run
from meshwright.spec import RunSpec, UserError
from meshwright.spec.errors import Stopped
from meshwright.spec.hf.chat_template_files import chat_template_files
from meshwright.spec.parameter_groups import trains_adapters

NO_READER = 141
"""Exit code where the reader of standard output has closed it: 128 + SIGPIPE, as of `yes | head`."""


@contextmanager
def stopped_without_reader() -> Iterator[None]:
    """Block that prints as a rank: it raises `Stopped` with `NO_READER` where nobody reads any more."""
    try:
        yield
    except BrokenPipeError as error:
        raise Stopped("the reader of standard output has closed it", NO_READER) from error


@dataclass
class Ending:
    """A command's run, as far as it is known yet: its folder, and the directory of its checkpoints."""

    out: Path | None = None
    checkpoints: Path | None = None

    def described(self, status: str, code: int, reason: str = "") -> dict[str, Any]:
        """Return the object of a run that is "finished", "stopped" by a signal, or "failed".

        `step` is the last completed one of the run's record, and `checkpoint` the step of the newest
        checkpoint; both are None where there is none, or the disk does not tell.
        """
        step = checkpoint = None
        with suppress(UserError):  # the record or the disk is damaged: `reason` says what ended the run
            if self.out is not None and (self.out / RUN).exists():
                step = _last_step(self.out)
        with suppress(UserError):
            if self.checkpoints is not None and self.checkpoints.is_dir():
                from meshwright.checkpoint.directory import latest_step

                checkpoint = latest_step(self.checkpoints)
        out = None if self.out is None else str(self.out)
        ended = {"status": status, "exit_code": code, "reason": reason, "out": out}
        return {**ended, "step": step, "checkpoint": checkpoint}


@contextmanager
def errors_as_json(shown: bool) -> Iterator[Ending]:
    """Yield the run of a command; an error or a signal that ends the block is printed as JSON if `shown`."""
    run = Ending()
    try:
        yield run
    except (Exception, KeyboardInterrupt) as error:
        if shown:
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            with suppress(OSError):  # without a reader the exit code must still tell of the run
                print(json.dumps(run.described(status, exit_code(error), _reason(error))), flush=True)
        raise


def shown_at_end(ending: Ending, spec: RunSpec) -> Iterator[str]:
    """Yield lines with what a finished run has left, and the commands that use its model, to be pasted."""
    if ending.out is None:
        return
    for name, file in (("report", ending.out / "report.html"), ("figures", ending.out / "result.json")):
        if file.is_file():
            yield f"{name:<10}  {file}"
    step = ending.described("finished", 0)["checkpoint"]
    if step is None or ending.checkpoints is None:
        return
    from meshwright.checkpoint.disk import step_name

    yield f"{'checkpoint':<10}  {ending.checkpoints / step_name(step)}"
    run = shlex.quote(str(ending.out))
    commands = [f"meshwright export {run} {shlex.quote(f'{ending.out}-hf')}"]
    if chat_template_files(ending.out, "--out"):
        commands.insert(0, f"meshwright generate {run} --chat")
    elif spec.data.corpus != "synthetic":  # whose tokens are no text
        prompt = "def " if spec.data.corpus == "stdlib" else "The "
        commands.insert(0, f'meshwright generate {run} --prompt "{prompt}"')
    if trains_adapters(spec):
        commands.append(f"meshwright export {run} {shlex.quote(f'{ending.out}-adapter')} --adapter")
    if export_remark(spec.model):
        commands = [command for command in commands if not command.startswith("meshwright export")]
    for place, command in enumerate(commands):
        yield f"{'' if place else 'next':<10}  {command}"


def _reason(error: BaseException) -> str:
    if isinstance(error, (UserError, RanksFailed, Stopped)):
        return str(error)
    return "stopped by SIGINT" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


def _last_step(out: Path) -> int | None:
    """Return the last completed step in the record of the run in folder `out`; None before the first."""
    run, step = read_run(out), 0
    for row in (*run.events, *run.metrics):
        if type(done := row.get("step")) is int:  # steps after the one that a run goes on from are lost
            step = done if row.get("kind") in ("resumed", "rollback") else max(step, done)
    return step or None
