"""Start the ranks of this machine under torchrun's elastic agent, and end with them.

The rendezvous and every group listen on the loopback interface only.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.launch.failure import Outcome, last_words, outcome
from meshwright.spec import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousHandler

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that the agent takes over and hands on to the ranks."""


def launch(
    argv: Sequence[str], nproc: int, *, log_dir: Path | None = None, module: str = "meshwright"
) -> int:
    """Run `python -m module argv...` as `nproc` ranks; show a failure on stderr; return the exit code.

    Rank 0 has the terminal; what the others print goes to files under `log_dir`, which are dropped with a
    temporary folder when it is None. The first failure is shown once, and its exit code is returned (128 +
    the signal for a rank that a signal ended). SIGINT, SIGTERM, SIGHUP and SIGQUIT are handed to the ranks.
    """
    result = run_ranks(argv, nproc, log_dir=log_dir, module=module)
    if result.details:
        sys.stderr.write(result.details.rstrip() + "\n")
    if result.sentence:
        sys.stderr.write(f"meshwright: {'' if result.stopped else 'error: '}{result.sentence}\n")
    return result.code


def run_ranks(
    argv: Sequence[str], nproc: int, *, log_dir: Path | None = None, module: str = "meshwright"
) -> Outcome:
    """As `launch`, but hand the outcome back instead of showing it."""
    from torch.distributed.elastic.multiprocessing import SignalException

    if nproc < 1:
        raise UserError(f"--nproc: {nproc} is not a number of processes; give 1 or more")
    with ExitStack() as stack:
        folder = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshwright-")))
        stack.enter_context(_own_signals())
        stack.enter_context(_quiet_agent())
        agent = _agent(argv, nproc, folder, module)
        try:
            result = agent.run()
        except SignalException as stop:
            _kill_rest(agent)
            said = last_words(folder) or f"stopped by {signal.Signals(stop.sigval).name}"
            return Outcome(128 + stop.sigval, said, stopped=True)
        if not result.is_failed():
            return Outcome()
        run = agent.get_worker_group().spec.rdzv_handler.get_run_id()
        stderrs = {int(file.parent.name): file for file in folder.glob(f"{run}_*/attempt_0/*/stderr.log")}
        return outcome(result.failures, nproc, stderrs)


def _agent(argv: Sequence[str], nproc: int, log_dir: Path, module: str) -> LocalElasticAgent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    log_dir.mkdir(parents=True, exist_ok=True)
    quiet = {rank: Std.NONE if rank == 0 else Std.ALL for rank in range(nproc)}
    # The agent fills in ${local_rank} in arguments; a user's own '$' must stay one.
    arguments = [argument.replace("$", "$$") for argument in argv]
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=("-m", "meshwright.launch.child", str(os.getpid()), module, *arguments),
        rdzv_handler=_loopback_rendezvous(),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(log_dir), redirects=quiet))


def _loopback_rendezvous() -> RendezvousHandler:
    """A rendezvous of one agent, whose store the ranks use too.

    torch's own rendezvous listens on every interface. Here the listening socket is bound first, to 127.0.0.1
    and a port of the system's choice, and then given to the store.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class Loopback(RendezvousHandler):
        use_agent_store = True

        def __init__(self) -> None:
            self._run_id = secrets.token_hex(8)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self._port = listener.getsockname()[1]
                self._store = TCPStore(
                    "127.0.0.1",
                    self._port,
                    is_master=True,
                    timeout=timedelta(minutes=5),
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )

        def get_backend(self) -> str:
            return "loopback"

        def next_rendezvous(self) -> RendezvousInfo:
            store = PrefixStore(self._run_id, self._store)
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", self._port))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            return None

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return self._run_id

        def shutdown(self) -> bool:
            return True

    return Loopback()


def _kill_rest(agent: LocalElasticAgent) -> None:
    """Kill ranks that still run after the agent gave up: a second signal cuts its patience short."""
    for rank in agent.get_worker_group().workers:
        if not isinstance(rank.id, int):
            continue
        with suppress(ChildProcessError, ProcessLookupError):  # it has ended
            if os.waitpid(rank.id, os.WNOHANG) == (0, 0):
                os.killpg(rank.id, signal.SIGKILL)
                os.waitpid(rank.id, 0)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Put back the handlers that the agent replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's own log lines off the terminal: what they say is in the outcome."""
    import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401 - creates the loggers

    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
