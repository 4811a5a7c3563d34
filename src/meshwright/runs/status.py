"""The status of a run: a file of one word, which a job's script reads where a launcher hides exit codes.

running   ranks train, or were killed before they could say more
done      the run came to its last step
requeue   a signal or the end of the job stopped it, or ranks or hosts were lost: start it again with
          --resume auto
stopped   somebody pressed Ctrl-C, or told its job to stop
failed    no new start can mend it, and the second line says why
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Literal

from meshwright import atomic
from meshwright.runs.record import read_object
from meshwright.spec import UserError

STATUS, JOB = "status", "job.json"
"""Files of a run's folder: this status, and the record of the job that a scheduler was given."""
Word = Literal["running", "done", "requeue", "stopped", "failed"]


def write_status(out: Path, word: Word, sentence: str = "") -> bool:
    """Write the status of the run in `out`, if its folder is there and takes it; returns whether it has.

    What a disk lacks other errors tell.
    """
    with suppress(OSError):
        if out.is_dir():
            atomic.write(out / STATUS, f"{word}\n{sentence}\n" if sentence else f"{word}\n")
            return True
    return False


def read_status(out: Path) -> tuple[str, str] | None:
    """Return the word and the sentence; None where no run has written them."""
    with suppress(OSError):
        word, _, sentence = (out / STATUS).read_text(encoding="utf-8").strip().partition("\n")
        return word, sentence
    return None


def going_on(out: Path) -> str:
    """The command that goes on with the run in `out`: by the scheduler that has had it, else on this host."""
    for folder in (out, out.parent):  # that of a sweep has the job of all its runs
        with suppress(
            UserError, KeyError, TypeError
        ):  # a damaged record: what it says of the job is not known
            if (found := read_object(folder / JOB)) is not None:
                job = found["job"]
                words = ["meshwright", "launch", job["run"], "--on", found["scheduler"], "--out", job["out"]]
                return f"{shlex.join(words)} and the options that it had"
    return f"meshwright train {out} --resume auto"
