"""A process whose torch has had the faked device since it was imported, for functions that need it.

Warnings there are warnings here, so that they are shown, or not, as this process shows its own.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from meshwright.fake_cuda import library
from meshwright.spec import UserError

T = TypeVar("T")
_PROGRAM = "import sys; sys.path[:] = {path!r}; from meshwright.fake_cuda.process import serve; serve()"


class _Told(NamedTuple):
    """A warning, by plain values."""

    message: str
    category: type[Warning]
    file: str
    line: int


class FakeCudaProcess:
    """The process, for one function after another. Raises `UserError` if a device cannot be faked."""

    def __init__(self) -> None:
        library.check()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> FakeCudaProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with suppress(BrokenPipeError):  # of what was not sent
            self._process.communicate()

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of a function of a module, called there; its error is raised here."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests and replies
        try:
            with suppress(BrokenPipeError):  # then it has said why it ended
                pickle.dump((function, args, kwargs), requests)
                requests.flush()
            result, error, told = pickle.load(replies)
        except (EOFError, pickle.UnpicklingError) as broken:
            code = self._process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise UserError(
                f"--device: is cuda; the process in which a GPU is faked ended {how}, perhaps for want of "
                "memory; run it again with more memory, or give cpu"
            ) from broken
        for each in told:
            warnings.warn_explicit(each.message, each.category, each.file, each.line)
        if error is not None:
            raise error
        return result


def serve() -> None:
    """Answer requests on the standard input until it ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may come between the replies
    try:
        library.load()
        from meshwright.fake_cuda.runtime import install  # it imports torch

        install()
    except UserError as error:
        pickle.dump((None, error, []), replies)
        return
    with suppress(EOFError):
        while True:
            function, args, kwargs = pickle.load(sys.stdin.buffer)
            with warnings.catch_warnings(record=True) as caught:
                outcome = _outcome(function, args, kwargs)
            pickle.dump((*outcome, [_told(each) for each in caught]), replies)
            replies.flush()


def _told(caught: warnings.WarningMessage) -> _Told:
    """A warning for another process, in which torch's own kinds of warnings may not be known."""
    known = caught.category.__module__ == "builtins"
    category = caught.category if known else UserWarning
    return _Told(str(caught.message), category, caught.filename, caught.lineno)


def _outcome(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
    """The result of a function, or the error that it ended in."""
    try:
        return function(*args, **kwargs), None
    except UserError as error:
        return None, error
    except Exception as error:
        return None, RuntimeError("".join(traceback.format_exception(error)))
