"""An object that works on several cores: processes that each have a copy, and answer requests through pipes.

The processes are started as new programs, not forked: this one may have threads, and a script that calls it
need not guard its main module. They end when their pipe does, so none outlives this process, however it ends;
signals of the terminal do not reach them.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain, cycle, islice
from typing import Any, Self

from meshwright.data.job import outcome
from meshwright.host import cores
from meshwright.spec.errors import UserError

ALONE = 8
"""Requests that are answered in this process: so few are not worth the start of others."""
MOST = 32
"""Processes at most: this one, which sends the requests, keeps no more of them busy."""
_PROGRAM = "import sys; sys.path[:] = {path!r}; from meshwright.data.job import serve; serve()"

Request = tuple[Any, ...]
"""Name of a method, and its arguments."""


class WorkError(Exception):
    """An error of the tokenizers library at a request, in its words."""


class Processes:
    """Copies of `worker`, one for each core, or `worker` itself where there is little to do.

    Raises `UserError` if a process is ended from outside, `WorkError` where the tokenizers library refuses a
    request, and RuntimeError with its traceback for any other error in another process.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._stack = ExitStack()
        self._copies: list[_Here] | list[_Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def number(self) -> int:
        """How many there are so far."""
        return len(self._copies)

    def each(self, requests: Iterable[tuple[int | None, Request]]) -> Iterator[tuple[int, Any]]:
        """Yield (number of the process, result) of each request, in order; None lets any process answer it.

        The first call decides how many processes there are. At most three requests a process are under way,
        so memory is bounded.
        """
        requests = iter(requests)
        first = list(islice(requests, ALONE + 1))
        if not self._copies:
            self._start(min(cores(), MOST) if len(first) > ALONE else 1)
        turns = cycle(range(len(self._copies)))
        waiting: deque[tuple[int, Callable[[], Any]]] = deque()
        for given, request in chain(first, requests):
            number = next(turns) if given is None else given
            waiting.append((number, self._copies[number].ask(request)))
            if len(waiting) >= 3 * len(self._copies):
                number, result = waiting.popleft()
                yield number, result()
        yield from ((number, result()) for number, result in waiting)

    def everyone(self, request: Request) -> list[Any]:
        """Return the results of a request to each process."""
        return [result() for result in [copy.ask(request) for copy in self._copies]]

    def _start(self, number: int) -> None:
        if number == 1 or not sys.executable:
            self._copies = [_Here(self._worker)]
        else:
            self._copies = [self._stack.enter_context(_Process(self._worker)) for _ in range(number)]


class _Here:
    """The worker in this process."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def ask(self, request: Request) -> Callable[[], Any]:
        """Return a function that returns the result of a request."""
        found = outcome(self._worker, request)
        return lambda: _result(*found)


class _Process:
    """A process with a copy of the worker, and a thread that waits for it."""

    def __init__(self, worker: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # each process has one core
            start_new_session=True,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="process")
        self._first = pickle.dumps(worker)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._thread.shutdown(cancel_futures=True)
        with suppress(BrokenPipeError):  # of what was not sent
            self._process.communicate()

    def ask(self, request: Request) -> Callable[[], Any]:
        """Return a function that waits for the result of a request and returns it."""
        return self._thread.submit(self._ask, request).result

    def _ask(self, request: Request) -> Any:
        requests, replies = self._process.stdin, self._process.stdout
        assert requests and replies
        try:
            requests.write(self._first)
            self._first = b""
            pickle.dump(request, requests, pickle.HIGHEST_PROTOCOL)
            requests.flush()
            found = pickle.load(replies)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise UserError(
                f"data.corpus: one of the processes that tokenize it ended {how} before its work was done, "
                "perhaps for want of memory; run it again with more memory, or on fewer cores (taskset)"
            ) from error
        return _result(*found)


def _result(how: str, result: Any) -> Any:
    if how == "refused":
        raise WorkError(result)
    if how == "failed":
        raise RuntimeError(f"an error in a process that tokenizes:\n{result}")
    return result
