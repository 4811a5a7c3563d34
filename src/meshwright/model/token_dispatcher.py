"""Dispatch of tokens to their experts, and combination of the experts' outputs.

Shapes: N tokens, k experts of each, C channels, M admitted copies (a token has one per expert), R rows that
the experts compute on: copies sorted by expert, each expert's padded with rows of weight 0 to a multiple of
ALIGN.

Dispatch copies a token's row to each of its experts; combine sums the copies' outputs in at least fp32. Each
is the transpose of the other, so the backward of one runs the other. Both have a start and a finish, so that
computation overlaps with messages in flight. On one device there are no messages; over expert ranks they are
the all-to-all of `AllToAllDispatcher` (`parallel/expert_parallel.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.model.with_backward import with_backward
from meshwright.spec.tiling import ALIGN

Sizes = tuple[int, ...]
"""Rows of each expert on this rank, padding included, on the host."""


class TokenDispatcher:
    """Dispatches one layer's tokens to experts on one device; `sizes` are the rows of each expert."""

    sizes: Sizes

    def __init__(self, experts_Nk: Tensor, admitted_Nk: Tensor | None, experts: int) -> None:
        """`experts_Nk` holds expert indices below `experts`; copies outside `admitted_Nk` are dropped."""
        self.tokens, self.top_k = experts_Nk.shape
        self.admitted = admitted_Nk
        self.dispatching: Any = None
        self.combining: Any = None
        chosen = experts_Nk if admitted_Nk is None else experts_Nk.masked_fill(~admitted_Nk, experts)
        order = chosen.flatten().argsort(stable=True)
        self.counts = torch.bincount(chosen.flatten(), minlength=experts + 1)[:experts]
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        self._plan(order, position.view(self.tokens, self.top_k))

    def _plan(self, order: Tensor, position_Nk: Tensor) -> None:
        """Assign rows, given the copies sorted by expert and each copy's position in that order.

        Sets `copy` and `token` (the copy and token of each row to send), `row` (the row of each copy at the
        experts), `sizes`, and `copy_rows` (N, k or more): the rows of a token's copies in what comes back.
        """
        (counts,) = self._to_host(self.counts.view(1, -1))
        copies = sum(counts)
        self.row, self.sizes = assign_rows(self.counts.view(1, -1), [counts])
        self.copy = order.new_zeros(sum(self.sizes))
        self.copy[self.row] = order[:copies]
        self.token = self.copy // self.top_k
        if copies < len(order):
            position_Nk = position_Nk.clamp(max=max(copies - 1, 0))
        self.copy_rows = self.row[position_Nk] if copies else torch.zeros_like(position_Nk)

    def _to_host(self, counts_SE: Tensor) -> list[list[int]]:
        """Numbers of copies per expert (E), from or to S ranks, on the host; waits for the device."""
        return counts_SE.tolist()

    # Messages ---------------------------------------------------------------------------------------

    def send(self, x_NC: Tensor, index: Tensor) -> Any:
        """Start to send rows `index` of `x_NC` to the experts; pass the result to `receive`."""
        return x_NC.index_select(0, index)

    def receive(self, sent: Any) -> Tensor:
        """Rows (R, C) of the experts on this rank; the content of padding rows is arbitrary."""
        return sent

    def send_back(self, rows_RC: Tensor) -> Any:
        """Start to send the experts' rows back; pass the result to `receive_back`."""
        return rows_RC

    def receive_back(self, sent: Any) -> Tensor:
        """Rows (., C) of this rank's copies, which `copy_rows` indexes."""
        return sent

    def sum_copies(self, rows: Tensor) -> Tensor:
        """(N, C): the sum over each token's admitted copies of their rows from `receive_back`."""
        if not len(rows):
            return rows.new_zeros(self.tokens, rows.shape[1])
        exact = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros(self.tokens, rows.shape[1], dtype=exact)
        slices = self.copy_rows.shape[1] // self.top_k
        for index in range(self.copy_rows.shape[1]):
            added = rows.index_select(0, self.copy_rows[:, index])
            if self.admitted is not None:
                added.masked_fill_(~self.admitted[:, index // slices].unsqueeze(1), 0)
            total += added
        return total.to(rows.dtype)

    def _copy_values(self, values: Tensor) -> Tensor:
        """(N, k): each copy's scalar out of `values` (one per row of `receive_back`); 0 for dropped
        copies."""
        if not len(values):
            return values.new_zeros(self.tokens, self.top_k)
        summed = values[self.copy_rows].view(self.tokens, self.top_k, -1).sum(2)
        return summed if self.admitted is None else summed.masked_fill(~self.admitted, 0)

    def _mask_padding(self, values_R: Tensor) -> Tensor:
        """`values_R` with 0 in padding rows."""
        masked = torch.zeros_like(values_R)
        masked[self.row] = values_R[self.row]
        return masked

    # Differentiable ---------------------------------------------------------------------------------

    def start_dispatch(self, x_ND: Tensor, weights_Nk: Tensor) -> Tensor:
        """Start to send tokens and routing weights to the experts; pass the handle to `finish_dispatch`."""
        return with_backward(self._send, self._receive_gradients, x_ND, weights_Nk)

    def finish_dispatch(self, handle: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (R, D) and routing weights (R,) of the experts on this rank."""
        return with_backward(self._receive, self._send_gradients, handle)

    def start_combine(self, y_RD: Tensor) -> Tensor:
        """Start to send the experts' outputs back; pass the handle to `finish_combine`."""
        return with_backward(self._send_outputs, self._receive_output_gradients, y_RD)

    def finish_combine(self, handle: Tensor) -> Tensor:
        """(N, D): the sum over each token's experts."""
        return with_backward(self._receive_outputs, self._send_output_gradients, handle)

    # Handles are scalars that order autograd's graph; the messages are in `dispatching` and `combining`.

    def _send(self, x: Tensor, weights: Tensor) -> Tensor:
        self.dispatching = self.send(x, self.token), self.send(weights.reshape(-1, 1), self.copy)
        return x.new_empty(())

    def _receive(self, _handle: Tensor) -> tuple[Tensor, Tensor]:
        (x, weights), self.dispatching = self.dispatching, None
        return self.receive(x), self._mask_padding(self.receive(weights).squeeze(1))

    def _send_gradients(self, grad_x: Tensor, grad_weights: Tensor) -> Tensor:
        self.combining = self.send_back(grad_x), self.send_back(grad_weights.unsqueeze(1))
        return grad_x.new_zeros(())

    def _receive_gradients(self, _grad: Tensor) -> tuple[Tensor, Tensor]:
        (grad_x, grad_weights), self.combining = self.combining, None
        values = self._copy_values(self.receive_back(grad_weights).squeeze(1))
        return self.sum_copies(self.receive_back(grad_x)), values

    def _send_outputs(self, y: Tensor) -> Tensor:
        # Detached: y's graph holds the dispatcher, which would be a reference cycle.
        self.combining = self.send_back(y.detach())
        return y.new_empty(())

    def _receive_outputs(self, _handle: Tensor) -> Tensor:
        combining, self.combining = self.combining, None
        return self.sum_copies(self.receive_back(combining))

    def _send_output_gradients(self, grad: Tensor) -> Tensor:
        self.dispatching = self.send(grad, self.token)
        return grad.new_zeros(())

    def _receive_output_gradients(self, _grad: Tensor) -> Tensor:
        dispatching, self.dispatching = self.dispatching, None
        return self.receive(dispatching)


def assign_rows(counts_SE: Tensor, listed: list[list[int]]) -> tuple[Tensor, Sizes]:
    """Rows of copies that arrive from S ranks, each sorted by expert, and the padded rows of each expert.

    `counts_SE` are the copies from each rank for each expert, `listed` the same numbers on the host. The
    first result (M,) holds the row of each copy, in order of arrival.
    """
    experts = len(listed[0])
    sums = [sum(row[expert] for row in listed) for expert in range(experts)]
    sizes = tuple(-(-total // ALIGN) * ALIGN for total in sums)
    device = counts_SE.device
    starts_E = torch.tensor([0, *sizes[:-1]], dtype=torch.int64).cumsum(0).to(device)
    before_SE = counts_SE.cumsum(0) - counts_SE  # copies for the expert from ranks before
    arrived_SE = (counts_SE.flatten().cumsum(0) - counts_SE.flatten()).view_as(counts_SE)
    shift = (starts_E + before_SE - arrived_SE).flatten()
    copies = sum(sums)
    moved = shift.repeat_interleave(counts_SE.flatten(), output_size=copies)
    return torch.arange(copies, device=device) + moved, sizes
