"""Exceptions for users' mistakes and signals, and the suggestions in their messages."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that a sentence can mend: which key, which value, why, and what would work.

    The command line prints it as one line and exits with `code`; it never shows a traceback.
    Subclasses are made of one sentence too. `gravity` decides which of several ranks' errors is shown, the
    least first; a bug counts as 0.
    """

    gravity = 1
    code = 2
    restart = False
    """True if a start of the ranks from what was saved may mend it."""
    of_another_run = False
    """True if another run goes on in the same folder, and its status is not this one's."""


class StorageError(UserError):
    """A disk or file system failed a run that was well: full, read-only, an input or output error."""

    gravity = 2
    code = 76


class DataError(UserError):
    """Training data that was good when the run began is not any more: changed, truncated, damaged."""

    gravity = 2
    code = 77


class NumericalError(UserError):
    """The numbers of a run went wrong: gradients that are not finite, a loss that does not come back."""

    code = 78


class CorruptionError(NumericalError):
    """Ranks that must hold the same numbers do not: a fault of memory or arithmetic that raised no error.

    What was saved before is good; to go on from there, preferably on other machines, mends it.
    """

    restart = True


class CollectiveError(UserError):
    """Ranks that must make the same collective calls do not, or one of them does not come: a bug."""

    code = 70


class UnhealthyHostError(UserError):
    """A host failed its health probe before its ranks were started again; on others the run can go on."""

    code = 80
    restart = True


ECHOES = ("onnection reset by peer", "onnection closed by peer", "roken pipe", "remote process exited")
"""Words of gloo's and NCCL's errors on a rank whose peer is gone, or has given up waiting."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to save and end: Ctrl-C, a scheduler's, a lost terminal's, Slurm's `--signal`."""
CRASH_LOOP = 79
"""Exit code of a run whose ranks fail again and again, and get no further."""
REQUEUE = 75
"""Exit code of a run that was stopped and has saved: start it again (EX_TEMPFAIL of sysexits.h)."""

JOB_ENDS = "the end of the job"
"""Reason, in the place of a signal's name, of a run that stops before its scheduler ends the job."""


class Stopped(KeyboardInterrupt):
    """A run ended early because a signal asked it to.

    `code` is the exit code: 130 for Ctrl-C, else `REQUEUE` if the run has saved, and 128 + the signal if not.
    `signal` is the signal's name where the run tells of it itself.
    """

    of_another_run = False
    """True if others go on with the run, whose status this is not."""

    def __init__(self, sentence: str, code: int, signal: str | None = None) -> None:
        super().__init__(sentence)
        self.code, self.signal = code, signal


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
