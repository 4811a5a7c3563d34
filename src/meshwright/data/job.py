"""Requests to an object, here or in another process. Imports little, as processes start with it."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from typing import Any


def outcome(worker: Any, request: tuple[Any, ...]) -> tuple[str, Any]:
    """Return (error, result) of a request (name of a method, arguments...) to `worker`."""
    try:
        return "", getattr(worker, request[0])(*request[1:])
    except BaseException as error:  # where the Rust code of tokenizers panics, it is a bare BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return str(error) or type(error).__name__, None


def serve() -> None:
    """Answer requests to the object that comes through standard input, until that ends.

    Outcomes go to standard output, and whatever else is printed to standard error.
    """
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    gc.disable()  # many small objects are kept, none in cycles
    try:
        worker = pickle.load(sys.stdin.buffer)
        while True:
            found = outcome(worker, pickle.load(sys.stdin.buffer))
            pickle.dump(found, replies, pickle.HIGHEST_PROTOCOL)
            replies.flush()
    except (EOFError, BrokenPipeError):  # the process that asks is done, or gone
        os._exit(0)
