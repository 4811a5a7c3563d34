"""Process groups under NCCL's rules, so that what would hang on GPUs hangs on processors too.

gloo forgives three things that NCCL does not. Here, as on one NCCL communicator:

- The operations of a group run one after the other in the order in which a rank issues them, collectives and
  unbatched sends and receives alike. Nothing starts before the one before it is done.
- A send is done when its receive is, and messages are matched by their order: tags are ignored.
- All ranks of a group must issue the same collective with the same sizes. NCCL hangs or corrupts where they
  do not; here both operations are named in an error.

Messages between two ranks, and large tensors, travel by gloo; smaller ones of collectives go through memory
that the ranks share, which takes a tenth of the time.

`batch_isend_irecv` is one turn, in which all its operations run together. A wait of the host that lasts
longer than the group's timeout raises an error that lists what every group of this rank is stuck on.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from meshwright.comm.process_groups import Groups, Row
from rank_exchange import Exchange

BACKEND = "in_order"
LIMIT = timedelta(seconds=30)
"""How long a host waits for another rank by default: longer than a test computes on a busy machine."""
DATA, ACKNOWLEDGEMENT = 0, 1
REDUCTIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class _Turn:
    """One operation, or one batch, in the order of its group."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.name, self.run = name, run
        self.done = threading.Event()
        self.error: Exception | None = None


class _Work(dist.Work):
    def __init__(self, turn: _Turn, group: InOrderGroup) -> None:
        super().__init__()
        self._turn, self._group = turn, group

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = self._group.limit.total_seconds()
        if not self._turn.done.wait(limit):
            raise TimeoutError(f"'{self._turn.name}' is not done after {limit:g} s. {stuck()}")
        if self._turn.error is not None:
            raise RuntimeError(f"{self._group.label}: {self._turn.error}") from self._turn.error
        return True

    def is_completed(self) -> bool:
        return self._turn.done.is_set()


_groups: WeakSet[InOrderGroup] = WeakSet()


def stuck() -> str:
    """Pending operations of each group of this rank."""
    listed = [(group, group.waiting()) for group in _groups]
    lines = [
        f"group '{group.label}', rank {group.rank()}: {names[0]}"
        + (f", then {', '.join(names[1:4])}" if names[1:] else "")
        for group, names in listed
        if names
    ]
    return "Stuck on this rank: " + "; ".join(sorted(lines))


class InOrderGroup(dist.ProcessGroup):
    """Wraps a gloo group; `label` names it in errors."""

    def __init__(
        self, gloo: Any, exchange: Exchange, rank: int, size: int, limit: timedelta, name: str
    ) -> None:
        super().__init__(rank, size)
        self._gloo, self._exchange, self.limit, self._name, self.label = gloo, exchange, limit, name, name
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._waiting: deque[_Turn] = deque()
        self._worker: threading.Thread | None = None
        _groups.add(self)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    def waiting(self) -> list[str]:
        """Names of the operations that are not done, in order."""
        return [turn.name for turn in list(self._waiting)]

    def close(self) -> None:
        """End the worker after what was issued."""
        self._turns.put(None)

    # Turns ------------------------------------------------------------------------------------------

    def _issue(self, name: str, run: Callable[[], None]) -> _Work:
        turn = _Turn(name, run)
        self._waiting.append(turn)
        self._turns.put(turn)
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, daemon=True)
            self._worker.start()
        return _Work(turn, self)

    def _work(self) -> None:
        broken: Exception | None = None
        while (turn := self._turns.get()) is not None:
            try:
                if broken is not None:
                    raise broken
                with torch.no_grad():
                    turn.run()
            except Exception as error:  # it is raised where the host waits, as NCCL's is
                broken = turn.error = error
            self._waiting.popleft()
            turn.done.set()

    def _collective(
        self,
        name: str,
        own: Tensor,
        sizes: object,
        finish: Callable[[list[Tensor]], Any],
        run: Callable[[], Any],
    ) -> _Work:
        """Issue a collective whose `sizes` are equal on all ranks, of which each brings `own`.

        `finish` makes the results of what all ranks bring; where that is too large to show, gloo's `run`.
        """
        text = f"{name} of {sizes} {str(own.dtype).removeprefix('torch.')}"

        def checked() -> None:
            small = own.nbytes <= Exchange.SLOT_BYTES
            self._same(text, own if small else None)
            if small:
                finish(self._exchange.shown([own.numel()] * self.size(), own.dtype))
            else:
                run().wait()

        return self._issue(text, checked)

    def _same(self, text: str, shown: Tensor | None = None, numbers: Sequence[int] = ()) -> list[list[int]]:
        """The `numbers` of each rank; raise where another rank issues another collective at this turn."""
        every = self._exchange.gather([text, *numbers], shown)
        if any(theirs != text for theirs, *_ in every):
            listed = "; ".join(f"rank {rank} issues {theirs}" for rank, (theirs, *_) in enumerate(every))
            raise RuntimeError(f"the ranks issue different collectives: {listed}")
        return [theirs for _, *theirs in every]

    # Collectives ------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        (tensor,) = tensors
        opts = opts or dist.AllreduceOptions()
        operation = opts.reduceOp.op
        return self._collective(
            f"all_reduce {operation.name}",
            tensor,
            tensor.numel(),
            lambda every: tensor.copy_(reduce(REDUCTIONS[operation], every).view_as(tensor)),
            lambda: self._gloo.allreduce(tensors, opts),
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        own = dist.AllreduceOptions()
        own.reduceOp = opts.reduceOp
        works = [self.allreduce([tensor], own) for tensor in tensors]
        return works[-1]

    def all_gather_single(self, whole: Tensor, part: Tensor, opts: Any = None) -> _Work:
        return self._collective(
            "all_gather",
            part,
            f"{part.numel()} into {whole.numel()}",
            lambda every: whole.copy_(torch.cat(every).view_as(whole)),
            lambda: self._gloo._allgather_base(whole, part),
        )

    def all_gather_single_coalesced(
        self, wholes: list[Tensor], parts: list[Tensor], opts: Any = None
    ) -> _Work:
        works = [self.all_gather_single(*pair) for pair in zip(wholes, parts, strict=True)]
        return works[-1]

    def allgather(self, lists: list[list[Tensor]], parts: list[Tensor], opts: Any = None) -> _Work:
        def finish(every: list[Tensor]) -> None:
            for to, came in zip(lists[0], every, strict=True):
                to.copy_(came.view_as(to))

        sizes = f"{parts[0].numel()} into a list"
        return self._collective(
            "all_gather", parts[0], sizes, finish, lambda: self._gloo.allgather(lists, parts)
        )

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, opts: Any = None) -> _Work:
        opts = opts or dist.ReduceScatterOptions()
        operation = opts.reduceOp.op

        def finish(every: list[Tensor]) -> None:
            own = [each.view(self.size(), -1)[self.rank()] for each in every]
            part.copy_(reduce(REDUCTIONS[operation], own).view_as(part))

        return self._collective(
            f"reduce_scatter {operation.name}",
            whole,
            f"{whole.numel()} into {part.numel()}",
            finish,
            lambda: self._gloo._reduce_scatter_base(part, whole, opts),
        )

    def reduce_scatter_single_coalesced(
        self, parts: list[Tensor], wholes: list[Tensor], opts: Any = None
    ) -> _Work:
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(parts, wholes, strict=True)]
        return works[-1]

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int], opts: Any = None
    ) -> _Work:
        size = self.size()
        if not received_rows and not sent_rows:  # equal parts
            received_rows = sent_rows = [len(sent) // size] * size
        elements = sent[:1].numel() if len(sent) else received[:1].numel()  # of a row

        def run() -> None:
            small = sent.nbytes <= Exchange.SLOT_BYTES
            text = f"all_to_all of rows of {sent.dtype}"
            every = self._same(text, sent if small else None, [*received_rows, *sent_rows])
            for rank, rows in enumerate(every):
                come = [theirs[size + rank] for theirs in every]
                if come != rows[:size]:
                    raise RuntimeError(f"all_to_all: rank {rank} expects {rows[:size]} rows, gets {come}")
            rows_sent = [sum(rows[size:]) for rows in every]
            if max(rows_sent) * elements * sent.itemsize > Exchange.SLOT_BYTES:
                self._gloo.alltoall_base(received, sent, received_rows, sent_rows).wait()
                return
            shown = self._exchange.shown([rows * elements for rows in rows_sent], sent.dtype)
            came = [
                each.view(rows_of, elements).split(rows[size:])[self.rank()]
                for each, rows_of, rows in zip(shown, rows_sent, every, strict=True)
            ]
            received.copy_(torch.cat(came).view_as(received))

        return self._issue(f"all_to_all of {sent_rows} rows", run)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        (tensor,) = tensors
        root = opts.rootRank
        return self._collective(
            f"broadcast from {root}",
            tensor,
            tensor.numel(),
            lambda every: tensor.copy_(every[root].view_as(tensor)),
            lambda: self._gloo.broadcast(tensors, opts),
        )

    def barrier(self, opts: Any = None) -> _Work:
        nothing = torch.empty(0)
        return self._collective("barrier", nothing, 0, lambda every: None, lambda: self._gloo.barrier())

    # Messages ---------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int) -> _Work:
        return self._together([("send", tensors[0], target)])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        return self._together([("receive", tensors[0], source)])

    def batch(self, operations: list[dist.P2POp]) -> _Work:
        """`batch_isend_irecv`."""
        names = {dist.isend: "send", dist.irecv: "receive"}
        return self._together([(names[each.op], each.tensor, each.group_peer) for each in operations])

    def _together(self, messages: list[tuple[str, Tensor, int]]) -> _Work:
        """One turn of sends and receives, each acknowledged by who receives."""
        gloo, one = self._gloo, torch.zeros(1, dtype=torch.uint8)

        def run() -> None:
            started = [
                (kind, peer, getattr(gloo, "send" if kind == "send" else "recv")([tensor], peer, DATA))
                for kind, tensor, peer in messages
            ]
            acknowledged = []
            for kind, peer, work in sorted(started, key=lambda each: each[0]):  # receives first
                work.wait()
                act = gloo.recv if kind == "send" else gloo.send
                acknowledged.append(act([one.clone()], peer, ACKNOWLEDGEMENT))
            for work in acknowledged:
                work.wait()

        words = {"send": "to", "receive": "from"}
        name = " and ".join(
            f"{kind} of {tensor.numel()} {words[kind]} {peer}" for kind, tensor, peer in messages
        )
        return self._issue(name, run)


def _create(options: Any, _backend_options: Any) -> InOrderGroup:
    # gloo's own limit only ends the worker of a group that has already failed.
    limit = max(2 * options.timeout, timedelta(minutes=1))
    gloo = distributed_c10d.ProcessGroupGloo(options.store, options.group_rank, options.group_size, limit)
    exchange = Exchange(options.store, options.group_rank, options.group_size)
    group = InOrderGroup(
        gloo, exchange, options.group_rank, options.group_size, options.timeout, options.group_id
    )
    group.label = f"ranks {options.global_ranks_in_group}"
    return group


def install() -> None:
    """Make the backend known to this process, and `batch_isend_irecv` a single turn on its groups."""
    if hasattr(dist.Backend, BACKEND.upper()):
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    plain = dist.batch_isend_irecv

    def batched(operations: list[dist.P2POp]) -> list[Any]:
        group = operations[0].group
        return [group.batch(operations)] if isinstance(group, InOrderGroup) else plain(operations)

    dist.batch_isend_irecv = batched


class PoolGroups(Groups):
    """Groups of worlds of several sizes within one: every rank of the pool names every group."""

    backend = "gloo"

    def __init__(self, device_type: str, timeout: timedelta) -> None:
        super().__init__(device_type, timeout)
        self._rows: dict[tuple[str, Row], Any] = {}

    def _make(self, rows: list[Row], own: Row | None, purpose: str) -> Any:
        for row in rows:
            if (purpose, row) not in self._rows:
                made = dist.new_group(list(row), self.timeout, self.backend)
                self._rows[purpose, row] = made if dist.get_rank() in row else None
        return self._rows[purpose, own] if own is not None else None


class InOrderGroups(PoolGroups):
    """Groups that keep their order, as on NCCL."""

    backend = BACKEND

    def __init__(self, device_type: str, timeout: timedelta = LIMIT) -> None:
        super().__init__(device_type, timeout)

    @property
    def in_order(self) -> bool:
        return True

    def world(self, ranks: Row) -> Any:
        return self._group([ranks], ranks if dist.get_rank() in ranks else None, "world")

    def _make(self, rows: list[Row], own: Row | None, purpose: str) -> Any:
        group = super()._make(rows, own, purpose)
        if isinstance(group, InOrderGroup) and purpose:
            group.label = purpose
        return group
