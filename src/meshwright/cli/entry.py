"""The console script: it lists the verbs, or says its version, before what takes time is imported."""

from __future__ import annotations

import sys
from contextlib import suppress

from meshwright import __version__
from meshwright.cli.overview import program


def run() -> None:
    """Print the list of verbs or the version if that is all that is asked for; otherwise see `main.run`."""
    asked = sys.argv[1:]
    if asked in ([], ["-h"], ["--help"], ["--version"]):
        with suppress(OSError):  # `main` prints it once more, and tells what is wrong
            print(_version() if asked == ["--version"] else program(__version__), flush=True)
            return
    from meshwright.cli import main

    main.run()


def _version() -> str:
    from meshwright.version import full_version

    return f"meshwright {full_version()}"
