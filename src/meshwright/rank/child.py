"""Main program of a rank that a launcher started: how it runs, and how it ends.

It dies with its parent, runs a module as `__main__`, and leaves an uncaught error in a file for the launcher
instead of printing it.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import runpy
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from meshwright.rank.failure import exit_code, record
from meshwright.spec.load import one_line

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def tie_to_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Die with the launcher, also when it is killed (Linux; elsewhere a killed launcher leaves its ranks).

    Its death sends the signal `number`; another one than SIGKILL needs a handler. The parent may have died
    before the tie was made, hence the look at it afterwards.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise SystemExit(f"the launcher {parent} is gone")


def set_up_output() -> None:
    """Show each warning in one line, as often as it comes, and escape characters that stdout cannot print."""
    warnings.formatwarning = lambda message, *_args, **_kwargs: (
        f"meshwright: warning: {one_line(str(message))}\n"
    )
    if not sys.warnoptions:  # Python's own choice shows a warning once, and a failure may come twice
        warnings.filterwarnings("always", category=UserWarning, module="meshwright")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of terminals without Unicode


def run_rank(module: str, argv: Sequence[str]) -> NoReturn:
    """Run `python -m module argv...` in this process, as a rank of a launcher, and end the process."""
    sys.argv = [module, *argv]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):  # Python prints it, too
            print(end.code, file=sys.stderr)
    except BaseException as error:
        record(error)
        code = exit_code(error)
    end_process(code)


def leave(code: int) -> NoReturn:
    """End this program by `sys.exit`, or by `end_process` where it may have used process groups."""
    if "torch.distributed" not in sys.modules:
        sys.exit(code)
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End a process that may have used process groups, without taking the interpreter apart.

    Threads of a process group can outlive it, and one that drops its last tensor while the interpreter goes
    down ends the process by SIGABRT. So what must still happen happens here: other threads' work, exit
    functions, output. Threads are waited for as the interpreter does it, which first ends those of executors:
    torch.compile leaves some that wait for work for ever.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # a full disk, a closed stream: what was done is done
            stream.flush()
    os._exit(code)
