"""The status of a run: a file of one word, which a job's script reads where a launcher hides exit codes.

running   ranks train, or were killed before they could say more
done      the run came to its last step
requeue   a signal or the end of the job stopped it, or ranks or hosts were lost: start it again with
          --resume auto
stopped   somebody pressed Ctrl-C
failed    no new start can mend it, and the second line says why
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

from meshwright import atomic

STATUS = "status"
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
