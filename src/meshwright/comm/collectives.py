"""All communication between ranks: functions that start a collective and record (axis, operation, bytes).

Every reduction is a SUM; the one division is in `parallel/loss_normalization.py`. An axis of one rank sends
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from meshwright.comm.mesh import Axis
from meshwright.comm.traffic_counter import Pending
from meshwright.host import host_number

# torch 2.13 renamed these two and warns at each call of the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_GATHER_COALESCED, _SCATTER_COALESCED = (
    (f"{new}_coalesced" if hasattr(dist.ProcessGroup, f"{new}_coalesced") else f"{old}_coalesced")
    for new, old in (
        ("all_gather_single", "allgather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)


class _Done:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


DONE: Pending = _Done()


def _announce(
    axis: Axis,
    operation: str,
    tensor: Tensor | Sequence[Tensor],
    pair: tuple[int, int, int] | None = None,
    rows: tuple[list[int], list[int]] | None = None,
) -> tuple[object, ...]:
    """Show a call to the mesh's check, if it has one, and return what that returns; see `CallCheck.starts`.

    With `rows`, each rank brings another number of rows of the tensor.
    """
    if axis.wire.check is None:
        return ()
    tensors = [tensor] if isinstance(tensor, Tensor) else tensor
    number = sum(each.shape[rows is not None :].numel() for each in tensors)
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    what = f"{'rows of ' * (rows is not None)}{number:,} {dtype} element{'s' * (number != 1)}"
    return (axis.wire.check.starts(axis, operation, what, pair, rows),)


def start_all_gather(whole: Tensor, part: Tensor, axis: Axis) -> Pending:
    """Fill `whole` (n * numel of part,) with the `part` of each rank, in the order of ranks."""
    if axis.size == 1:
        whole.view(-1).copy_(part.view(-1))
        return DONE
    sent = whole.nbytes * (axis.size - 1) / axis.size
    calls = _announce(axis, "all_gather", whole)
    if axis.memory is not None and axis.memory.joined():
        work = axis.memory.all_gather([whole.view(axis.size, -1)], [part.view(-1)])
    else:
        work = _all_gather(whole, part, group=axis.group, async_op=True)
    return axis.wire.start(axis, "all_gather", sent, [work], calls, (whole, part))


def start_reduce_scatter(part: Tensor, whole: Tensor, axis: Axis) -> Pending:
    """Sum `whole` (n * numel of part,) over the axis and write this rank's slice to `part`."""
    if axis.size == 1:
        part.view(-1).copy_(whole.view(-1))
        return DONE
    sent = whole.nbytes * (axis.size - 1) / axis.size
    calls = _announce(axis, "reduce_scatter", whole)
    if axis.memory is not None and axis.memory.joined():
        work = axis.memory.reduce_scatter(part, [whole.view(axis.size, -1)])
    else:
        work = _reduce_scatter(part, whole, op=dist.ReduceOp.SUM, group=axis.group, async_op=True)
    return axis.wire.start(axis, "reduce_scatter", sent, [work], calls, (part, whole))


def start_all_reduce(tensor: Tensor, axis: Axis, operation: str = "all_reduce") -> Pending:
    """Sum `tensor` over the axis in place, or take the largest of "amax"; recorded as `operation`."""
    if axis.size == 1:
        return DONE
    sent = 2 * tensor.nbytes * (axis.size - 1) / axis.size
    calls = _announce(axis, operation, tensor)
    largest = operation == "amax"
    if axis.memory is not None and axis.memory.joined():
        work = axis.memory.all_reduce(tensor, largest)
    else:
        reduction = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work = dist.all_reduce(tensor, op=reduction, group=axis.group, async_op=True)
    return axis.wire.start(axis, operation, sent, [work], calls, (tensor,))


def start_broadcast(tensor: Tensor, source: int, axis: Axis) -> Pending:
    """Copy `tensor` of rank `source` of the axis to all its ranks, in place.

    Recorded as S (n-1)/n for S bytes, the mean over ranks when blocks pass along a chain.
    """
    if axis.size == 1:
        return DONE
    sent = tensor.nbytes * (axis.size - 1) / axis.size
    calls = _announce(axis, "broadcast", tensor)
    work = dist.broadcast(tensor, group=axis.group, group_src=source, async_op=True)
    return axis.wire.start(axis, "broadcast", sent, [work], calls, (tensor,))


def start_all_to_all(
    received: Tensor,
    sent: Tensor,
    axis: Axis,
    received_rows: list[int] | None = None,
    sent_rows: list[int] | None = None,
) -> Pending:
    """Send the first `sent_rows[0]` rows of `sent` to rank 0, and so on; `received` holds rows by sender.

    Without numbers of rows each rank gets equally many.
    """
    if axis.size == 1:
        received.view(-1).copy_(sent.view(-1))
        return DONE
    crossing, rows = sent.nbytes * (axis.size - 1) / axis.size, None
    if sent_rows is not None and received_rows is not None:
        crossing = float((sum(sent_rows) - sent_rows[axis.rank]) * sent[:1].nbytes)
        rows = sent_rows, received_rows
    calls = _announce(axis, "all_to_all", sent, rows=rows)
    work = dist.all_to_all_single(received, sent, received_rows, sent_rows, group=axis.group, async_op=True)
    return axis.wire.start(axis, "all_to_all", crossing, [work], calls, (received, sent))


def start_shift(received: Tensor, sent: Tensor, axis: Axis, distance: int = 1) -> Pending:
    """Send `sent` to the rank `distance` after this one on the ring, and receive from the one before.

    A tensor of no elements is neither sent nor waited for.
    """
    if axis.size == 1:
        received.copy_(sent)
        return DONE
    after, before = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
    calls = _announce(axis, "shift", sent, (axis.rank, after, 0))
    calls += _announce(axis, "shift", received, (before, axis.rank, 0))
    operations = []
    if sent.numel():
        operations.append(dist.P2POp(dist.isend, sent, group=axis.group, group_peer=after))
    if received.numel():
        operations.append(dist.P2POp(dist.irecv, received, group=axis.group, group_peer=before))
    works = dist.batch_isend_irecv(operations) if operations else []
    return axis.wire.start(axis, "shift", float(sent.nbytes), works, calls, (received, sent))


def start_send(sent: Tensor, target: int, axis: Axis, tag: int = 0) -> Pending:
    """Send `sent` to rank `target` of the axis."""
    pair = axis.rank, target, tag
    calls = _announce(axis, "send", sent, pair)
    work = dist.isend(sent, group=axis.group, group_dst=target, tag=tag)
    return axis.wire.start(axis, "send", float(sent.nbytes), [work], calls, (sent,), pair)


def start_receive(received: Tensor, source: int, axis: Axis, tag: int = 0) -> Pending:
    """Receive what rank `source` of the axis sends with this tag, in the order in which it sends."""
    pair = source, axis.rank, tag
    calls = _announce(axis, "receive", received, pair)
    work = dist.irecv(received, group=axis.group, group_src=source, tag=tag)
    return axis.wire.watched(axis, "receive", [work], calls, (received,), pair)


# Several tensors in one message -------------------------------------------------------------------------


@dataclass
class _Staged:
    """A collective of a buffer, whose result is copied to its places when it has ended."""

    work: Pending
    copy: Callable[[], None] | None

    def wait(self) -> None:
        self.work.wait()
        if self.copy is not None:
            with torch.no_grad():
                self.copy()
            self.copy = None

    def is_completed(self) -> bool:
        return self.work.is_completed()


def _has_groups_of_calls(axis: Axis) -> bool:
    """True where calls of several tensors are one launch, as NCCL's are. gloo sends each in turn: there they
    are copied to a buffer, and from one."""
    assert axis.group is not None
    return dist.get_backend(axis.group) != "gloo"


def start_all_gather_coalesced(wholes: Sequence[Tensor], axis: Axis) -> Pending:
    """Fill each of `wholes` (n, k), whose row of this rank is filled already, with the rows of all ranks.

    All are contiguous and of one format; they are one message, recorded as one.
    """
    if axis.size == 1:
        return DONE
    parts = [whole[axis.rank] for whole in wholes]
    calls, staged = _announce(axis, "all_gather", wholes), None
    work: Pending
    if axis.memory is not None and axis.memory.joined():
        work = axis.memory.all_gather(wholes, parts)
    elif _has_groups_of_calls(axis):
        options = AllgatherOptions()
        options.asyncOp = True
        work = getattr(axis.group, _GATHER_COALESCED)([whole.view(-1) for whole in wholes], parts, options)
    else:
        staged = parts[0].new_empty(axis.size, sum(part.numel() for part in parts))
        parts = [torch.cat(parts)]
        work = _all_gather(staged.view(-1), parts[0], group=axis.group, async_op=True)
    sent = sum(whole.nbytes for whole in wholes) * (axis.size - 1) / axis.size
    tensors = (*wholes, *parts) if staged is None else (staged, *parts)
    started = axis.wire.start(axis, "all_gather", sent, [work], calls, tensors)
    if staged is None:
        return started
    pieces = staged.split([whole.shape[1] for whole in wholes], 1)
    return _Staged(started, lambda: torch._foreach_copy_([*wholes], [*pieces]))


def start_reduce_scatter_coalesced(part: Tensor, wholes: Sequence[Tensor], axis: Axis) -> Pending:
    """Sum each of `wholes` (n, k) over the axis, and write this rank's row of each to `part` (sum of k,), one
    after another.

    All are contiguous and of one format; they are one message, recorded as one.
    """
    if axis.size == 1:
        torch.cat([whole.view(-1) for whole in wholes], out=part)
        return DONE
    calls = _announce(axis, "reduce_scatter", wholes)
    read = wholes
    work: Pending
    if axis.memory is not None and axis.memory.joined():
        work = axis.memory.reduce_scatter(part, wholes)
    elif _has_groups_of_calls(axis):
        options = ReduceScatterOptions()  # of a sum
        options.asyncOp = True
        pieces = [*part.split([whole.shape[1] for whole in wholes])]
        work = getattr(axis.group, _SCATTER_COALESCED)(pieces, [whole.view(-1) for whole in wholes], options)
    else:
        read = [torch.cat([*wholes], 1).view(-1)]
        work = _reduce_scatter(part, read[0], op=dist.ReduceOp.SUM, group=axis.group, async_op=True)
    sent = sum(whole.nbytes for whole in wholes) * (axis.size - 1) / axis.size
    return axis.wire.start(axis, "reduce_scatter", sent, [work], calls, (part, *read))


# Products fused with their collective -------------------------------------------------------------------
#
# Operators of torch's symmetric memory: a rank reads the other ranks' parts from their memory and multiplies
# each as it arrives (asynchronous tensor parallelism; cf. Wang et al. 2023, ASPLOS). CUDA only.


def reach_each_other(axis: Axis) -> bool:
    """True if every rank of the axis can read the memory of the others; collective, equal on all ranks.

    Devices of one host must be peers; across hosts (an NVLink domain of GB200 trays) the rendezvous of
    symmetric memory decides.
    """
    if axis.size == 1 or axis.device.type != "cuda":
        return False
    if axis.peers is not None:
        return axis.peers
    import torch.distributed._symmetric_memory as symmetric  # it registers torch.ops.symm_mem's

    own = torch.tensor([host_number(), axis.device.index or 0], dtype=torch.int64, device=axis.device)
    places = gather_rows(own, axis).tolist()
    devices = {index for _, index in places}
    if len({host for host, _ in places}) == 1:
        distinct = len(devices) == axis.size and max(devices) < torch.cuda.device_count()
        near = distinct and all(torch.cuda.can_device_access_peer(*pair) for pair in permutations(devices, 2))
    else:
        assert axis.group is not None
        probe = symmetric.empty(1, dtype=torch.float32, device=axis.device)
        try:
            symmetric.rendezvous(probe, axis.group)
            near = True
        except RuntimeError:  # the devices share no memory domain
            near = False
    return sum_scalars([float(near)], axis)[0] == axis.size


def gather_matmul(
    part_ND: Tensor, maps_DF: list[Tensor], axis: Axis, keep: bool = False
) -> tuple[Tensor | None, list[Tensor]]:
    """All-gather rows (N, D) and multiply: (the rows (n N, D) if `keep`, products (n N, F) with each map)."""
    assert axis.group is not None
    axis.wire.record(axis.name, "all_gather", part_ND.nbytes * float(axis.size - 1))
    _announce(axis, "all_gather", part_ND)
    return torch.ops.symm_mem.fused_all_gather_matmul(
        part_ND.contiguous(), maps_DF, 0, axis.group.group_name, return_A=keep
    )


def matmul_scatter(x_NF: Tensor, map_FD: Tensor, axis: Axis) -> Tensor:
    """Multiply and reduce-scatter: this rank's rows (N / n, D) of the product, summed over the axis."""
    assert axis.group is not None
    sent = x_NF.shape[0] * map_FD.shape[1] * x_NF.element_size()
    axis.wire.record(axis.name, "reduce_scatter", sent * (axis.size - 1) / axis.size)
    _announce(axis, "reduce_scatter", x_NF)
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x_NF.contiguous(), map_FD, "sum", 0, axis.group.group_name
    )


# Small and host messages --------------------------------------------------------------------------------


def sum_scalars(values: Sequence[float], axis: Axis) -> list[float]:
    """Sum host numbers over the axis in float64 (exact for counts below 2**53)."""
    if axis.size == 1:
        return list(values)
    tensor = torch.tensor(list(values), dtype=torch.float64, device=axis.device)
    start_all_reduce(tensor, axis, "scalars").wait()
    return tensor.tolist()


def gather_rows(rows: Tensor, axis: Axis) -> Tensor:
    """Stack the equally shaped tensors of all ranks: (...) -> (n, ...)."""
    whole = torch.empty((axis.size, *rows.shape), dtype=rows.dtype, device=rows.device)
    start_all_gather(whole.view(-1), rows.contiguous().view(-1), axis).wait()
    return whole
