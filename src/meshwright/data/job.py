"""Requests to an object, here or in another process. Imports little, as processes start with it."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import traceback
from typing import Any


def outcome(worker: Any, request: tuple[Any, ...]) -> tuple[str, Any]:
    """Return ("done", result) of a request (name of a method, arguments...) to `worker`.

    Or ("refused", text) of an error of the tokenizers library, which raises bare `Exception`, and where its
    Rust code panics a `PanicException` without a name to catch it by. Other errors are raised.
    """
    try:
        return "done", getattr(worker, request[0])(*request[1:])
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        return "refused", str(error) or type(error).__name__


def serve() -> None:
    """Answer requests to the object that comes through standard input, until that ends.

    Outcomes go to standard output, ("failed", traceback) for a mistake of the program among them, and
    whatever else is printed to standard error.
    """
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    gc.disable()  # many small objects are kept, none in cycles
    try:
        worker = pickle.load(sys.stdin.buffer)
        while True:
            request = pickle.load(sys.stdin.buffer)
            try:
                found = outcome(worker, request)
            except Exception:
                found = "failed", traceback.format_exc()
            pickle.dump(found, replies, pickle.HIGHEST_PROTOCOL)
            replies.flush()
    except (EOFError, BrokenPipeError):  # the process that asks is done, or gone
        os._exit(0)
