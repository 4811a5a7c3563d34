"""The git commit that the program's own source is of."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_FOLDER = Path(__file__).parent
_SECONDS = 10


def commit() -> str | None:
    """Return the commit of the checkout that this program runs from: 12 digits, `+` where its files differ.

    None for a package that is installed without a checkout, and where git does not answer.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:  # a repository around the package
        return None
    found, changes = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", ".")
    return None if found is None else found.strip() + "+" * bool(changes)


def _git(*words: str) -> str | None:
    """Return what git prints in the package's folder; None where it fails, or there is none."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(_FOLDER), *words]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 else None
