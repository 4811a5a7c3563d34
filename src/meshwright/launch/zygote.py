"""The zygote: a process that has imported the trainer and forks the ranks of this host from itself.

A rank that is forked starts in milliseconds, where a new interpreter imports for seconds. The zygote runs no
threads, touches no device and joins no group, so that a fork of it is a clean process. It ends when its
supervisor kills it or dies, whose temporary folders it then removes, and its ranks die with it (Linux;
elsewhere when they next write).

Both sides exchange JSON lines: the supervisor asks for ranks, the zygote reports their pids and ends.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from meshwright.profile.machine import has_gpu_driver
from meshwright.rank.child import run_rank, tie_to_parent
from meshwright.rank.env import with_own_modules, without_small_caches
from meshwright.rank.processes import kill_session, process_state, send_signal
from meshwright.rank.scratch import remove_folders_of
from meshwright.spec.errors import STOP_SIGNALS
from meshwright.spec.schema import known_keys


@dataclass(frozen=True)
class RankProcess:
    """A rank to be forked: `python -m module argv...` in `environment`.

    SIGUSR2 makes it write the stacks of its threads into the file `stacks`.
    """

    number: int
    module: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    stacks: str
    logs: str | None = None
    """A folder for stdout.log and stderr.log; None leaves the terminal to it."""


@dataclass(frozen=True)
class Started:
    """Rank `number` runs as process `pid`."""

    number: int
    pid: int


@dataclass(frozen=True)
class Ended:
    """Rank `number` has ended with an exit code, or with minus the number of a signal."""

    number: int
    pid: int
    code: int


class ZygoteLostError(RuntimeError):
    """The zygote ended by itself, and its ranks with it."""


class Zygote:
    """The supervisor's side: starts the process, asks it for ranks, and receives what becomes of them.

    `preload` are modules to import before the first fork; ranks inherit `descriptors` under their numbers.
    """

    def __init__(self, preload: Sequence[str] = (), descriptors: Sequence[int] = ()) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()), *preload],
                pass_fds=(theirs.fileno(), *descriptors),
                env=with_own_modules(os.environ if has_gpu_driver() else without_small_caches(os.environ)),
                start_new_session=True,  # a Ctrl-C at the terminal reaches the supervisor alone
            )
        self._connection = ours
        self._buffer = b""
        self._stopped_since: float | None = None

    @property
    def pid(self) -> int:
        """The zygote's process."""
        return self._process.pid

    def fork(self, rank: RankProcess) -> None:
        """Ask for a rank; `receive` tells its pid. Raises `ZygoteLostError`."""
        try:
            self._connection.sendall(json.dumps(asdict(rank)).encode() + b"\n")
        except OSError as error:
            raise ZygoteLostError(self._how_it_ended()) from error

    def receive(self, seconds: float) -> list[Started | Ended]:
        """Return what has been reported, after at most so many seconds. Raises `ZygoteLostError`."""
        if not select.select([self._connection], [], [], seconds)[0]:
            return []
        try:
            received = self._connection.recv(1 << 16)
        except ConnectionResetError:
            received = b""
        if not received:
            raise ZygoteLostError(self._how_it_ended())
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        reports = [json.loads(line) for line in lines]
        return [Ended(**report) if "code" in report else Started(**report) for report in reports]

    def stopped_seconds(self, now: float) -> float:
        """Return for how long the process has been seen stopped (SIGSTOP), at `now` (`time.monotonic`)."""
        state = process_state(self.pid)
        if state is None or state.letter != "T":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        return 0.0 if self._stopped_since is None else now - self._stopped_since

    def wake(self) -> None:
        """Let a process that is stopped go on."""
        self._stopped_since = None
        send_signal(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the zygote, and with it every rank that is left."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"the process that forks ranks ended with {how}"


def main(arguments: Sequence[str]) -> None:
    """Serve as the zygote: `arguments` = [supervisor's pid, descriptor of the connection, module...]."""
    supervisor, descriptor, *preload = int(arguments[0]), *arguments[1:]
    ranks: dict[int, int] = {}
    zygote = os.getpid()

    def wake_up(_number: int, _frame: object) -> None:
        if os.getpid() == zygote:  # and not a rank that has just been forked
            _end_if_orphaned(supervisor, ranks)

    signal.signal(signal.SIGCONT, wake_up)  # as a zygote that is stopped must end with its supervisor, too
    tie_to_parent(supervisor, signal.SIGCONT)
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    # Whoever signals all processes means the ranks, which inherit the handlers that were there before.
    handlers: dict[int, Any] = {
        number: signal.signal(number, signal.SIG_IGN) for number in (*STOP_SIGNALS, signal.SIGQUIT)
    }
    for module in preload:
        importlib.import_module(module)
    known_keys()  # each rank reads its run by them, and they take a quarter of a second
    gc.freeze()  # modules live as long as a rank: its collections need not look through them
    wake, wakened = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakened)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    with suppress(ConnectionError):
        _serve(connection, wake, ranks, handlers)
    while True:  # the supervisor is about to kill this process, or is being killed
        _end_if_orphaned(supervisor, ranks)
        time.sleep(0.01)


def _serve(connection: socket.socket, wake: int, ranks: dict[int, int], handlers: Mapping[int, Any]) -> None:
    """Fork the ranks that the supervisor asks for and report their ends, until it closes the connection."""
    zygote, buffer = os.getpid(), b""
    while True:
        ready, _, _ = select.select([connection.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 1 << 12)
            _report_ends(connection, ranks)
        if connection.fileno() in ready:
            received = connection.recv(1 << 16)
            if not received:
                return
            *lines, buffer = (buffer + received).split(b"\n")
            for line in lines:
                rank = RankProcess(**json.loads(line))
                pid = os.fork()
                if pid == 0:
                    for own in (connection.detach(), wake, signal.set_wakeup_fd(-1)):
                        os.close(own)
                    _become(rank, zygote, handlers)
                ranks[pid] = rank.number
                _send(connection, Started(rank.number, pid))


def _end_if_orphaned(supervisor: int, ranks: Collection[int]) -> None:
    """End this process and its ranks if the supervisor is gone; remove the temporary folders that it left."""
    if os.getppid() == supervisor:
        return
    signal.signal(signal.SIGCONT, signal.SIG_IGN)  # another would end this process while it removes them
    for pid in ranks:
        kill_session(pid)
    for pid in ranks:
        with suppress(ChildProcessError):  # it was just reaped
            os.waitpid(pid, 0)
    remove_folders_of(supervisor)
    os._exit(1)


def _report_ends(connection: socket.socket, ranks: dict[int, int]) -> None:
    """Reap the ranks that have ended with what they have started, such as a compiler, and report them."""
    for pid, number in list(ranks.items()):
        if sys.platform == "linux":
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_session(pid)  # before it is reaped, when its number may become another process's
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del ranks[pid]
            _send(connection, Ended(number, pid, os.waitstatus_to_exitcode(status)))


def _send(connection: socket.socket, report: Started | Ended) -> None:
    connection.sendall(json.dumps(asdict(report)).encode() + b"\n")


def _become(rank: RankProcess, zygote: int, handlers: Mapping[int, Any]) -> NoReturn:
    """Turn this fork of the zygote into a rank with these signal handlers; does not return."""
    tie_to_parent(zygote)
    os.setsid()  # signals to its process group reach what it starts, and nothing else
    for number, handler in {
        **handlers,
        signal.SIGCHLD: signal.SIG_DFL,
        signal.SIGCONT: signal.SIG_DFL,
    }.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(rank.environment)
    new_file = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    if rank.logs is not None:
        for name, descriptor in (("stdout.log", 1), ("stderr.log", 2)):
            file = os.open(Path(rank.logs) / name, new_file, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
    faulthandler.register(signal.SIGUSR2, os.open(rank.stacks, new_file, 0o600), all_threads=True)
    run_rank(rank.module, rank.argv)


if __name__ == "__main__":
    main(sys.argv[1:])
