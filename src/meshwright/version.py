"""The version of this program, with the commit that it is of."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
COMMIT = "commit.txt"
"""File of the package that a wheel or an sdist has its commit in (`hatch_build.py`)."""


def commit() -> str | None:
    """The commit that the package was built of, or that git describes its checkout by; None where neither
    says.

    A checkout with changes ends in "-dirty".
    """
    if (PACKAGE / COMMIT).is_file():
        return (PACKAGE / COMMIT).read_text(encoding="ascii").strip()
    root = PACKAGE.parent.parent
    if not (root / ".git").exists():  # no checkout; git would find another one that the environment lies in
        return None
    import subprocess  # takes time, and packages need none of it

    described = ["describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    # Both folders are given, since variables of a git hook would name others.
    git = [
        "git",
        "--no-optional-locks",
        "-C",
        str(root),
        f"--git-dir={root / '.git'}",
        f"--work-tree={root}",
        *described,
    ]
    try:
        said = subprocess.run(git, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # without git, or on a disk that does not answer
        return None
    return said.stdout.strip() or None


def full_version() -> str:
    """The version as people read it, such as "0.7.0 (commit 19a8abce0c1d)"."""
    from meshwright import __version__  # builds load this file alone, without the package

    return __version__ if (found := commit()) is None else f"{__version__} (commit {found})"
