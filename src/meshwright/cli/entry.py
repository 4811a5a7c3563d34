"""The console script: it lists the verbs before anything that takes time is imported."""

from __future__ import annotations

import sys
from contextlib import suppress

from meshwright import __version__
from meshwright.cli.overview import program


def run() -> None:
    """Print the list of verbs if nothing else is asked for, or run the verb; see `main.run`."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        with suppress(OSError):  # `main` prints it once more, and tells what is wrong
            print(program(__version__), flush=True)
            return
    from meshwright.cli import main

    main.run()
