"""Programs of schedulers, such as sbatch and kubectl: run, with what went wrong in a sentence."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from meshwright.spec import UserError

ANSWER_S = 120.0
"""Seconds that a scheduler has to answer."""


def output_of(words: Sequence[str]) -> str:
    """Return what a program prints. Raises `UserError` where it fails, or is not installed."""
    done = _run(words)
    if done.returncode:
        raise UserError(
            f"{words[0]}: `{shlex.join(words)}` ended with {done.returncode}: {_last_lines(done)}; mend "
            f"what it says, or see with --dry-run what would be submitted"
        )
    return done.stdout


def answer_of(words: Sequence[str], unknown: str) -> str | None:
    """Return what a program prints; None where its error has the words `unknown`, as it has forgotten a job.

    Raises `UserError` where it fails otherwise, or is not installed.
    """
    done = _run(words)
    if done.returncode and unknown.lower() in done.stderr.lower():
        return None
    if done.returncode:
        raise UserError(
            f"{words[0]}: `{shlex.join(words)}` ended with {done.returncode}: {_last_lines(done)}; "
            f"ask again once it answers"
        )
    return done.stdout


def lines_of(log: Path | list[str]) -> list[str]:
    """The lines of a log: of a file, or those that a command prints. Raises `UserError`."""
    if not isinstance(log, Path):
        return output_of(log).splitlines()
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise UserError(f"{log}: is not there yet; the job has printed nothing, or has not begun") from None
    except OSError as error:
        raise UserError(f"{log}: cannot be read ({error.strerror}); ask its owner") from None


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except FileNotFoundError:
        raise UserError(
            f"{words[0]}: is not installed here, where the job is submitted; install it, or take what "
            f"--dry-run prints to a machine that has it"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{words[0]}: `{shlex.join(words)}` has not answered for {ANSWER_S:.0f} s; try again later"
        ) from None


def _last_lines(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return "; ".join(line.strip() for line in lines[-3:]) or "without a word"
