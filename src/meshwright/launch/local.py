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
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.launch.failure import Outcome, last_words, outcome
from meshwright.spec import UserError
from meshwright.spec.errors import STOP_SIGNALS

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousHandler

_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)
"""The signals that the agent takes over and hands on to the ranks, unless this process ignores them."""


def run_ranks(argv: Sequence[str], nproc: int, *, module: str = "meshwright") -> Outcome:
    """Run `python -m module argv...` as `nproc` ranks, and return how they ended.

    Rank 0 has the terminal; the output of the others goes to files in a temporary folder. The outcome is that
    of the first failure (128 + the signal for a rank that a signal ended). SIGINT, SIGTERM, SIGHUP, SIGUSR1
    and SIGQUIT are handed to the ranks.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    if nproc < 1:
        raise UserError(f"--nproc: {nproc} is not a number of processes; give 1 or more")
    with tempfile.TemporaryDirectory(prefix="meshwright-") as logs, _contained_agent():
        folder = Path(logs)
        agent = _agent(argv, nproc, folder, module)
        try:
            result = agent.run()
        except SignalException as stop:
            _kill_rest(agent)
            name = signal.Signals(stop.sigval).name
            sentence, code = last_words(folder) or (f"stopped by {name}", 128 + stop.sigval)
            return Outcome(code, sentence, stopped=True)
        if not result.is_failed():
            return Outcome()
        stderrs = {int(file.parent.name): file for file in folder.glob("*/attempt_0/*/stderr.log")}
        return outcome(result.failures, nproc, stderrs)


def _agent(argv: Sequence[str], nproc: int, log_dir: Path, module: str) -> LocalElasticAgent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    redirects = {rank: Std.NONE if rank == 0 else Std.ALL for rank in range(nproc)}
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
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(log_dir), redirects=redirects))


def _loopback_rendezvous() -> RendezvousHandler:
    """Return a rendezvous of one agent, whose store the ranks use too.

    torch's own store listens on every interface. Here the listening socket is bound first, to 127.0.0.1 and a
    port of the system's choice, and then given to the store.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    host, limit = "127.0.0.1", timedelta(minutes=5)
    with socket.create_server((host, 0)) as listener:
        port, descriptor = listener.getsockname()[1], listener.detach()
    store = TCPStore(
        host, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=descriptor
    )

    class Loopback(StaticTCPRendezvous):
        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(PrefixStore(self.run_id, store), 0, 1, RendezvousStoreInfo(host, port))

    return Loopback(host, port, rank=0, world_size=1, run_id=secrets.token_hex(8), timeout=limit.seconds)


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
def _contained_agent() -> Iterator[None]:
    """Keep the agent's log lines off the terminal, as the outcome says the same.

    Afterwards signal handlers, and the variable in which the agent looks for its signals, are as before.
    """
    import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401 - creates the loggers

    in_main = threading.current_thread() is threading.main_thread()  # only there the agent sets handlers
    handlers = {number: signal.getsignal(number) for number in _SIGNALS if in_main}
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    handed_on = [number.name for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    given = os.environ.get(_SIGNALS_VARIABLE)
    os.environ[_SIGNALS_VARIABLE] = ",".join(handed_on)
    try:
        yield
    finally:
        if given is None:
            del os.environ[_SIGNALS_VARIABLE]
        else:
            os.environ[_SIGNALS_VARIABLE] = given
        for logger, level in levels.items():
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
