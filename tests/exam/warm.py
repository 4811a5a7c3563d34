"""Commands of any copy of the package, run in forks of a process that has imported torch, and no copy.

Of the processor time of a small `meshwright verify`, importing torch twice takes more than half: in the
command itself, and in the process that it starts to fork its ranks from. Here both are forks, and what they
run are the entry points of `python -m`.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

# What a rank of `verify` needs besides the package; making an optimiser imports Dynamo.
PRELOADED = ("torch._dynamo", "torch.distributed.tensor", "numpy", "pydantic")


def preload() -> None:
    """Import what does not come from a copy of the package."""
    for module in PRELOADED:
        importlib.import_module(module)
    if any(name.split(".")[0] == "meshwright" for name in sys.modules):
        raise RuntimeError("a copy of the package is imported already; forks would run that one")


def run(argv: Sequence[str], folder: Path, seconds: float) -> tuple[int | None, str, str]:
    """Exit code, output and errors of `python -m meshwright argv...` with the package that lies in `folder`.

    The code is minus the number of a signal, and None where the command did not end in time.
    """
    texts = folder / "out.txt", folder / "err.txt"
    sys.stdout.flush()  # or a fork prints it again
    process = _Fork(lambda: _become_command(argv, folder, texts))
    until = time.monotonic() + seconds
    while (code := process.poll()) is None and time.monotonic() < until:
        time.sleep(0.02)
    if code is None:
        process.kill()  # and with it, since they are tied to it, its ranks
        process.wait()
    out, err = (text.read_text(encoding="utf-8", errors="replace") for text in texts)
    return code, out, err


class _Fork:
    """A fork of this process that calls `become`, as a `subprocess.Popen`."""

    def __init__(self, become: Callable[[], object]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                become()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _become_command(argv: Sequence[str], folder: Path, texts: Sequence[Path]) -> NoReturn:
    os.setsid()
    for text, descriptor in zip(texts, (1, 2), strict=True):
        os.dup2(os.open(text, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    zygote = importlib.import_module("meshwright.launch.zygote")
    assert zygote.__file__ is not None and Path(zygote.__file__).is_relative_to(folder)
    zygote.__dict__["subprocess"] = SimpleNamespace(Popen=_popen)
    sys.argv = ["meshwright", *argv]
    runpy.run_module("meshwright", run_name="__main__", alter_sys=True)
    raise SystemExit(0)


def _popen(
    command: Sequence[str],
    *,
    pass_fds: Sequence[int],
    start_new_session: bool,
    env: Mapping[str, str] | None = None,
) -> _Fork:
    """A fork in the place of `python -m MODULE WORDS...`, with `pass_fds` and no other descriptors."""
    _, option, module, *words = command
    assert option == "-m" and start_new_session

    def become() -> None:
        os.setsid()
        os.environ.update(env or {})
        kept = sorted({0, 1, 2, *pass_fds})
        for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(before + 1, after)
        importlib.import_module(module).main(words)

    return _Fork(become)
