"""Dispatch of tokens to their experts, and combination of the experts' outputs.

Shapes: N tokens, k experts of each, C channels, M admitted copies (a token has one per expert), R rows that
the experts compute on: copies sorted by expert, each expert's padded with rows of weight 0 to a multiple of
ALIGN.

A device is waited for where the host needs the numbers of rows: for the splits of messages, and where experts
are computed one by one. Else R is the most that there could be. Then an index of -1 stands for a row that
holds no copy (`holes`): such rows are zeros as they come, and those behind the last expert's not computed.

Dispatch copies a token's row to each of its experts; combine sums the copies' outputs in at least fp32. Each
is the transpose of the other, so the backward of one runs the other. Both have a start and a finish, so that
computation overlaps with messages in flight. On one device there are no messages; over expert ranks they are
the all-to-all of `AllToAllDispatcher` (`parallel/expert_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import expert_rows
from meshwright.kernels.with_backward import with_backward
from meshwright.spec.tiling import ALIGN

Column = tuple[Tensor, Tensor]
"""Values (., C) that are sent, and which of them each row holds."""


class RowGroups(NamedTuple):
    """The rows of each expert on this rank, padding included."""

    ends: Tensor
    """Where the rows of each expert end (E,), in int32 on their device."""
    sizes: tuple[int, ...] | None
    """Rows of each expert on the host; None where only one kernel for all of them, given `ends`, computes."""
    keys: Tensor | None = None
    """Key of each row's token (R,) in int64, by which adapters drop numbers; None where they drop none."""

    def to_the_end(self, rows: int) -> RowGroups:
        """The groups where the last expert's rows, which are so many of all, go to the end."""
        if self.sizes is None:
            ends = self.ends.clone()
            ends[-1:].fill_(rows)
            return self._replace(ends=ends)
        sizes = *self.sizes[:-1], rows - sum(self.sizes[:-1])
        return self._replace(sizes=sizes)

    def expert_of_rows(self, rows: int) -> Tensor:
        """The expert of each of so many rows (R,), from the device alone."""
        places = torch.arange(rows, device=self.ends.device, dtype=self.ends.dtype)
        return torch.bucketize(places, self.ends, right=True).clamp_(max=len(self.ends) - 1)


class TokenDispatcher:
    """Dispatches one layer's tokens to experts on one device; `groups` are the rows of each expert."""

    groups: RowGroups
    holes = False
    """True if an index of -1 stands for a row that holds no copy."""

    def __init__(
        self, experts_Nk: Tensor, admitted_Nk: Tensor | None, experts: int, takes_ends: bool = False
    ) -> None:
        """`experts_Nk` holds expert indices below `experts`; copies outside `admitted_Nk` are dropped.

        `takes_ends` says that one kernel computes all experts, which takes the ends of their rows from the
        device.
        """
        self.tokens, self.top_k = experts_Nk.shape
        self.admitted = admitted_Nk
        self.takes_ends = takes_ends
        self.dispatching: Any = None
        self.combining: Any = None
        chosen = experts_Nk if admitted_Nk is None else experts_Nk.masked_fill(~admitted_Nk, experts)
        order = chosen.flatten().argsort(stable=True)
        self.counts = add_counts_(order.new_zeros(experts + 1), chosen.flatten())[:experts]
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        self._plan(order, position.view(self.tokens, self.top_k))

    def _plan(self, order: Tensor, position_Nk: Tensor) -> None:
        """Assign rows, given the copies sorted by expert and each copy's position in that order.

        Sets `copy` and `token` (the copy and token of each row to send), `row` (the row of each copy at the
        experts), `groups`, and `copy_rows` (N, k or more): the rows of a token's copies in what comes back.
        """
        counts_1E = self.counts.view(1, -1)
        if self.takes_ends:
            self.holes = True
            self.row, source, ends = place_rows(counts_1E, len(order))
            self.groups, self.copy_rows = RowGroups(ends, None), self.row[position_Nk]
            self.copy = order[source.clamp(min=0)].masked_fill_(source < 0, -1)
            self.token = self.copy.div(self.top_k, rounding_mode="floor")
            return
        listed = self._to_host(counts_1E).tolist()
        copies, sizes = sum(listed[0]), padded_sizes(listed)
        self.row, ends = assign_rows(counts_1E, copies)
        self.groups = RowGroups(ends, sizes)
        self.copy = order.new_zeros(sum(sizes))
        self.copy[self.row] = order[:copies]
        self.token = self.copy // self.top_k
        if copies < len(order):
            position_Nk = position_Nk.clamp(max=max(copies - 1, 0))
        self.copy_rows = self.row[position_Nk] if copies else torch.zeros_like(position_Nk)

    def _to_host(self, counts_SE: Tensor) -> Tensor:
        """Numbers of copies per expert (E), from or to S ranks, on the host; waits for the device."""
        return counts_SE.cpu()

    # Messages ---------------------------------------------------------------------------------------

    def send(self, *columns: Column) -> Any:
        """Start to send rows to the experts, side by side; pass the result to `receive`."""
        return [expert_rows.gather(values, index, self.holes) for values, index in columns]

    def receive(self, sent: Any) -> Sequence[Tensor]:
        """The columns' rows (R, .) at the experts of this rank; the content of padding rows is arbitrary."""
        return sent

    def send_back(self, *columns_R: Tensor) -> Any:
        """Start to send the experts' rows back, side by side; pass the result to `receive_back`."""
        return columns_R

    def receive_back(self, sent: Any) -> Sequence[Tensor]:
        """The columns' rows of this rank's copies, which `copy_rows` indexes."""
        return sent

    def sum_copies(self, rows: Tensor) -> Tensor:
        """(N, C): the sum over each token's admitted copies of their rows from `receive_back`."""
        if not len(rows):
            return rows.new_zeros(self.tokens, rows.shape[1])
        if expert_rows.takes(rows):
            return expert_rows.sum_rows(rows, self._rows_or_holes())
        copy_rows, admitted = self._summed_rows()
        if rows.dtype != torch.bfloat16 or rows.device.type != "cpu":
            weights = None if admitted is None else admitted.to(rows.dtype)
            return F.embedding_bag(copy_rows, rows, mode="sum", per_sample_weights=weights)
        # The CPU's kernel would round ties away from zero, which makes sums of two 0.08% too large.
        total, last = rows.new_empty(0), copy_rows.shape[1] - 1
        for index in range(last + 1):
            added = rows.index_select(0, copy_rows[:, index])
            if admitted is not None:
                added.masked_fill_(~admitted[:, index : index + 1], 0)
            if index == 0:
                total = added if last < 2 else added.float()
            else:
                total = torch.add(total, added, out=total if index < last else torch.empty_like(added))
        return total

    def _copy_values(self, values: Tensor) -> Tensor:
        """(N, k): each copy's scalar out of `values` (one per row of `receive_back`); 0 for dropped
        copies."""
        if not len(values):
            return values.new_zeros(self.tokens, self.top_k)
        if expert_rows.takes(values):
            index = self._rows_or_holes().view(self.tokens * self.top_k, -1)
            return expert_rows.sum_rows(values.unsqueeze(1), index).view(self.tokens, self.top_k)
        copy_rows, admitted = self._summed_rows()
        found = values[copy_rows] if admitted is None else values[copy_rows].masked_fill_(~admitted, 0)
        return found.view(self.tokens, self.top_k, -1).sum(2)

    def _summed_rows(self) -> tuple[Tensor, Tensor | None]:
        """(N, k or more) each: the rows whose sum a token gets, and which of them count; None for all."""
        if self.holes:
            return self.copy_rows.clamp(min=0), self.copy_rows >= 0
        if self.admitted is None:
            return self.copy_rows, None
        slices = self.copy_rows.shape[1] // self.top_k
        return self.copy_rows, self.admitted.unsqueeze(2).expand(-1, -1, slices).flatten(1)

    def _rows_or_holes(self) -> Tensor:
        """(N, k or more): the rows whose sum a token gets, -1 for those that do not count."""
        if self.holes:
            return self.copy_rows
        copy_rows, admitted = self._summed_rows()
        return copy_rows if admitted is None else copy_rows.masked_fill(~admitted, -1)

    def _mask_padding(self, values_R: Tensor) -> Tensor:
        """`values_R` with 0 in padding rows."""
        if self.holes:
            return values_R  # they came as 0
        masked = torch.zeros_like(values_R)
        masked[self.row] = values_R[self.row]
        return masked

    # Differentiable ---------------------------------------------------------------------------------

    def start_dispatch(self, x_ND: Tensor, weights_Nk: Tensor, keys_N: Tensor | None = None) -> Tensor:
        """Start to send tokens, routing weights and the tokens' keys, if there are any, to the experts; pass
        the handle to `finish_dispatch`."""
        self._keys = () if keys_N is None else ((keys_N.unsqueeze(1), self.token),)
        return with_backward(self._send, self._receive_gradients, x_ND, weights_Nk)

    def finish_dispatch(self, handle: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (R, D) and routing weights (R,) of the experts on this rank; `groups` has the keys."""
        return with_backward(self._receive, self._send_gradients, handle)

    def start_combine(self, y_RD: Tensor) -> Tensor:
        """Start to send the experts' outputs back; pass the handle to `finish_combine`."""
        return with_backward(self._send_outputs, self._receive_output_gradients, y_RD)

    def finish_combine(self, handle: Tensor) -> Tensor:
        """(N, D): the sum over each token's experts."""
        return with_backward(self._receive_outputs, self._send_output_gradients, handle)

    # Handles are scalars that order autograd's graph; the messages are in `dispatching` and `combining`.

    def _send(self, x: Tensor, weights: Tensor) -> Tensor:
        self.dispatching = self.send((x, self.token), (weights.reshape(-1, 1), self.copy), *self._keys)
        return x.new_empty(())

    def _receive(self, _handle: Tensor) -> tuple[Tensor, Tensor]:
        dispatching, self.dispatching = self.dispatching, None
        x, weights, *keys = self.receive(dispatching)
        if keys:
            self.groups = self.groups._replace(keys=keys[0].squeeze(1))
        return x, self._mask_padding(weights.squeeze(1))

    def _send_gradients(self, grad_x: Tensor, grad_weights: Tensor) -> Tensor:
        self.combining = self.send_back(grad_x, grad_weights.unsqueeze(1))
        return grad_x.new_zeros(())

    def _receive_gradients(self, _grad: Tensor) -> tuple[Tensor, Tensor]:
        combining, self.combining = self.combining, None
        grad_x, grad_weights = self.receive_back(combining)
        return self.sum_copies(grad_x), self._copy_values(grad_weights.squeeze(1))

    def _send_outputs(self, y: Tensor) -> Tensor:
        # Detached: y's graph holds the dispatcher, which would be a reference cycle.
        self.combining = self.send_back(y.detach())
        return y.new_empty(())

    def _receive_outputs(self, _handle: Tensor) -> Tensor:
        combining, self.combining = self.combining, None
        (rows,) = self.receive_back(combining)
        return self.sum_copies(rows)

    def _send_output_gradients(self, grad: Tensor) -> Tensor:
        self.dispatching = self.send((grad, self.token))
        return grad.new_zeros(())

    def _receive_output_gradients(self, _grad: Tensor) -> Tensor:
        dispatching, self.dispatching = self.dispatching, None
        (grad,) = self.receive(dispatching)
        return grad


def padded_sizes(listed_SE: list[list[int]]) -> tuple[int, ...]:
    """Rows of each expert with its padding, given the copies for it from each of S ranks."""
    return tuple(-(-sum(counts) // ALIGN) * ALIGN for counts in zip(*listed_SE, strict=True))


def assign_rows(counts_SE: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """Rows of copies that arrive from S ranks, each sorted by expert, and where each expert's rows end.

    `counts_SE` are the copies from each rank for each expert, on their device, and `copies` is their sum. The
    first result (M,) holds the row of each copy, in order of arrival, and the second (E,) is in int32.
    """
    sizes_E = counts_SE.sum(0).add_(ALIGN - 1).bitwise_and_(-ALIGN)
    ends_E = sizes_E.cumsum(0, dtype=torch.int32)
    arrived_SE = counts_SE.flatten().cumsum(0).view_as(counts_SE)
    shift_SE = counts_SE.cumsum(0) - arrived_SE + (ends_E - sizes_E)  # from places in order of arrival
    moved = shift_SE.flatten().repeat_interleave(counts_SE.flatten(), output_size=copies)
    return moved.add_(torch.arange(copies, device=moved.device)), ends_E


def place_rows(counts_SE: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where copies go that arrive in `rows` rows from each of S ranks, each rank's sorted by expert.

    `counts_SE` are the copies from each rank for each expert, on their device. Returns the row at the experts
    of each that arrives (S rows,), -1 where it holds no copy; which is in each row at the experts (R,), -1
    for none; and where each expert's rows end (E,), in int32.
    """
    ranks, experts = counts_SE.shape
    most = (ranks * rows + experts * (ALIGN - 1)) // ALIGN * ALIGN
    sizes_E = counts_SE.sum(0).add_(ALIGN - 1).bitwise_and_(-ALIGN)
    ends_E = sizes_E.cumsum(0, dtype=torch.int32)
    arrived_SE = counts_SE.cumsum(1)
    shift_SE = counts_SE.cumsum(0) - arrived_SE + (ends_E - sizes_E)  # from places in order of arrival
    place = torch.arange(rows, device=counts_SE.device).repeat(ranks, 1)
    expert = torch.searchsorted(arrived_SE, place, right=True)
    absent = (expert == experts).flatten()
    row = place.add_(shift_SE.gather(1, expert.clamp_(max=experts - 1))).flatten()
    source = row.new_full((most + 1,), -1)  # the last stands for no row
    source.scatter_(0, row.masked_fill(absent, most), torch.arange(len(row), device=row.device))
    return row.masked_fill_(absent, -1), source[:most], ends_E


def add_counts_(total: Tensor, index: Tensor) -> Tensor:
    """Add to each element of `total` how often its place occurs in `index` (M,).

    On CUDA `torch.bincount` waits for the device, to learn the least and the largest number.
    """
    return total.scatter_add_(0, index, torch.ones_like(index, dtype=total.dtype))
