"""How a run has ended, as its status says (`runs/status.py`)."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.rank.failure import RanksFailed
from meshwright.runs.status import Word, read_status, write_status
from meshwright.spec import UserError
from meshwright.spec.errors import ECHOES, Stopped


@contextmanager
def status_at_end(out: Path, checkpoints: Path, resumes: bool, first: bool = True) -> Iterator[None]:
    """Block that trains the run in `out`, whose status says afterwards how the block has ended.

    A start that does not resume has no say on a run that is there already, which it must leave alone, nor has
    one that is refused on a run that was done, stopped or failed before. Of several ranks that make such a
    block only the `first` says that the run is done.
    """
    if not resumes and read_status(out) is not None:
        yield
        return
    before = newest_checkpoint(checkpoints)
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, (UserError, Stopped)) and error.of_another_run):
            try:
                _write_end(out, error, newest_checkpoint(checkpoints) > before)
            except KeyboardInterrupt:  # a launcher ends the ranks that are left when one is lost
                _write_end(out, error, newest_checkpoint(checkpoints) > before)
        raise
    if first:
        write_status(out, "done")


def _write_end(out: Path, error: BaseException, progress: bool) -> None:
    """Write how a run that goes on has ended with an error, and note that on it."""
    word = word_of(error, progress)
    sentence = next(iter(str(error).splitlines()), type(error).__name__)
    goes_on = (read_status(out) or ("running",))[0] in ("running", "requeue")
    if goes_on and write_status(out, word, sentence):
        error.add_note(f"status: {word}")


def word_of(error: BaseException, progress: bool) -> Word:
    """The status of a run that ended with an error, after `progress` if it has saved a further checkpoint.

    An unknown error without progress would come again, unless it is the echo of a lost rank or host.
    """
    if isinstance(error, KeyboardInterrupt):
        code = error.code if isinstance(error, Stopped) else 128 + signal.SIGINT
        return "stopped" if code == 128 + signal.SIGINT else "requeue"
    if isinstance(error, UserError):
        return "requeue" if error.restart else "failed"
    if isinstance(error, RanksFailed):  # its supervisor has started the ranks again, in vain
        return "failed"
    return "requeue" if progress or any(words in str(error) for words in ECHOES) else "failed"


def newest_checkpoint(folder: Path) -> int:
    """The largest step in the names of a folder's checkpoints; -1 without any."""
    with suppress(OSError):
        names = (each.name for each in folder.iterdir())
        return max((int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name)), default=-1)
    return -1
