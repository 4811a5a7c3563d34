"""Seconds of one microbatch in the embedding and the head on one device, and in the map that layers which
predict further tokens have beside their blocks."""

from __future__ import annotations

from functools import partial

from meshwright.planner.cost.breakdown import PassSeconds, Seconds, weighted_sum
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.kernels import KernelCosts
from meshwright.planner.cost.layer_products import LayerProducts
from meshwright.planner.cost.operator_bytes import (
    ForwardBackward,
    embedding_bytes,
    head_bytes,
    head_chunks,
    unit_copies,
)
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.traffic.layer_messages import end_messages
from meshwright.planner.traffic.message import Message


class EndCosts(LayerProducts):
    """The embedding and the head of a run, whose layers `LayerCost` has."""

    format: str
    stack: SoftwareStack
    kernels: KernelCosts
    links: CollectiveCosts
    width: float
    rows: int
    launch: float
    """Host seconds of an operator."""

    @property
    def largest_unit(self) -> float:
        """Parameters of the embedding or the head on one tensor rank."""
        return self.rows * self.spec.model.hidden

    @property
    def sixteen(self) -> str:
        """Format of products that no recipe takes below 16 bits: attention's own, and the head's."""
        return "bf16" if self.precision.cast else self.format

    def packed(self, block: bool) -> float:
        """Bytes moved per parameter, of a block or of an end, and microbatch to lay out its gradient."""
        copies = unit_copies(self.spec)
        if not self.counted:
            # counted: 2 bytes are read of a gradient, 4 of its sum, and 4 are written
            return self.stack.packed + (10.0 if self.stack.accumulates else 0.0)
        return copies.packed_block if block else copies.packed

    def end_messages(self, head: bool) -> list[Message]:
        """Messages around the head, or the embedding; published programs are not charged for the loss's."""
        return [m for m in end_messages(self.shape, head) if self.stack.own or m.where != "loss"]

    def _around(self, head: bool) -> float:
        """Seconds of the messages around an end, the loss's left out: half of them for each pass."""
        seconds = sum(self.links.seconds(m) for m in end_messages(self.shape, head) if m.where != "loss")
        return seconds * (1 - self.stack.overlap("tensor")) / 2

    def _heads(self) -> PassSeconds:
        """Seconds of the head, and of what further tokens take beside their layer's block: the head again, a
        lookup, and the map that joins hidden states and embeddings."""
        once, further = self._head(), self.spec.model.mtp_num_layers
        if not further:
            return once
        hidden, own = self.spec.model.hidden, self.own
        product = partial(self.kernels.matmul, self.sixteen)
        joined = PassSeconds(
            Seconds(matmul=product(own, hidden, 2 * hidden)),
            Seconds(matmul=product(own, 2 * hidden, hidden)),
            Seconds(matmul=product(hidden, 2 * hidden, own)),
        )
        return weighted_sum([(1 + further, once), (further, self._embedding()), (further, joined)])

    def _head(self) -> PassSeconds:
        """Seconds of the last norm, the head's product and the loss; fp8 runs compute logits in bf16."""
        model, rows, n = self.spec.model, self.rows, self.tokens
        product = partial(self.kernels.matmul, self.sixteen)
        chunks = head_chunks(self.shape) if self.counted else {n: 1}
        loss = [m.count * self.links.seconds(m) for m in self.end_messages(True) if m.where == "loss"]
        sent = self._around(head=True)
        # counted: logits are written, widened to fp32, read for their maximum and their sum; the gradient is
        # made of the fp32 copy, and read by both products; a cap reads and writes three times, its slope, too
        capped = 6.0 * self.width if model.logit_softcap is not None else 0.0
        sizes = [n * rows * (each + capped) for each in (16.0, 10.0)]
        logits, back = map(self.kernels.moved, head_bytes(self.spec, self.shape) if self.counted else sizes)
        packed = self.kernels.moved(self.packed(block=False) * rows * model.hidden)
        host = self.stack.ends / 2 * self.launch
        forward = sum(count * product(m, rows, model.hidden) for m, count in chunks.items())
        of_input = sum(count * product(m, model.hidden, rows) for m, count in chunks.items())
        of_weight = sum(count * product(rows, model.hidden, m) for m, count in chunks.items())
        again = forward if self.shape.log_probs else 0.0  # whose backward computes the logits once more
        return PassSeconds(
            Seconds(matmul=forward, moved=logits, host=host, tensor=sent + sum(loss)),
            Seconds(matmul=again + of_input, moved=back, tensor=sent),
            Seconds(matmul=of_weight, moved=packed),
        )

    def _embedding(self) -> PassSeconds:
        """Seconds of the lookup, and of adding up its gradient."""
        stream, sent = self.shape.stream * self.width, self._around(head=False)
        # counted: a row read, written, and read by what follows; the gradient in fp32
        sizes = (
            embedding_bytes(self.spec, self.shape)
            if self.counted
            else ForwardBackward(3 * stream, 6 * stream)
        )
        moved, back = map(self.kernels.moved, sizes)
        packed = self.kernels.moved(self.packed(block=False) * self.largest_unit)
        host = self.stack.ends / 2 * self.launch
        weight = Seconds(moved=back + packed, tensor=sent)
        return PassSeconds(Seconds(moved=moved, host=host, tensor=sent), Seconds(), weight)
