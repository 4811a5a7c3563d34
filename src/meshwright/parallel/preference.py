"""The loss of whole answers (`model/preference_loss.py`) as a part of a training step.

Splits        nothing of its own: samples hold whole pairs, or judged answers with what goes with them, whose
              log-probabilities every context rank of the last stage has (`loss_function.py`).
Wire          what `loss_function.py` says, and for each forward ahead of a step what one without gradients
              sends: in pipelines breadth first. Five numbers more of those that a step sums, and of judged
              answers a sum of two before it.
Takes         the forwards ahead, and for each as many numbers as a sample has documents.

The reference is the run's model with its adapters off: their weights are frozen, so that it stays what the
run began with, and takes no memory. It is asked about a step's samples before the step. So is the model
itself for KTO's estimate of the KL divergence, on which the loss of each answer of the global batch depends:
it is the mean over all microbatches of all ranks, that no layout changes.

The loss is the mean over the pairs, or judged answers, of the global batch: each rank sums those of its
samples, and the division happens once, by their number (`loss_normalization.py`). One counts where both of
its documents have a token that is trained on, which the corpus sees to.

Shapes: n samples of T tokens, in each of which D document numbers at most (`preference_objectives.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NotRequired

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import TypedDict

from meshwright.comm.collectives import start_all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.model.chunked_cross_entropy import IGNORE
from meshwright.model.lora import adapters_off
from meshwright.model.preference_loss import estimated_kl
from meshwright.parallel.loss_function import SampleLogProbs, SampleLoss
from meshwright.parallel.microbatches import microbatches, own_tokens
from meshwright.parallel.parallelize import ParallelDecoder
from meshwright.parallel.pipeline_parallel import ActionHook
from meshwright.parallel.preference_objectives import (
    DocumentSums,
    both,
    by_document,
    log_ratios,
    objective_of,
)
from meshwright.parallel.step_part import StepBegin, StepPart
from meshwright.parallel.stored_reference import Side, StoredReference
from meshwright.spec import RunSpec, UserError
from meshwright.spec.differences import as_in_file
from meshwright.spec.preference import ForwardAhead, PreferenceSpec


class _Fields(TypedDict):
    """Fields of a checkpoint's state."""

    reference_log_probs: NotRequired[str]


class Preference(StepPart):
    """A step's loss of whole answers on one rank."""

    Fields = _Fields

    def __init__(self, spec: RunSpec, mesh: Mesh, built: ParallelDecoder, how: PreferenceSpec) -> None:
        self.spec, self.how, self._mesh = spec, how, mesh
        self.numbers = how.numbers
        self._objective = objective_of(how)
        self._decoder, self._pipeline = built.decoder, built.pipeline
        self.counts = self._pipeline.has_end and mesh.tensor.rank == mesh.context.rank == 0
        """True for the one rank of those with the same samples that counts answers and rewards."""
        self._sums: tuple[Tensor, ...] = ()
        """`Found.numbers` of this step's microbatches."""
        self._held_out: tuple[Tensor, ...] = ()
        """Those of microbatches that were held out."""
        self._means: dict[str, float] = {}
        self.stored: StoredReference | None = None
        """Log-probabilities of all samples by the reference, in a run that computes them ahead."""

    def begin_step(self, begin: StepBegin) -> None:
        """Begin to add up rewards."""
        self._sums = ()

    def own_count(self, batch: Batch) -> int:
        """The pairs, or judged answers, of a batch that this rank counts."""
        if not self.counts:
            return 0
        targets, documents = batch.targets.cpu(), batch.documents
        lengths = by_document((targets != IGNORE).long(), documents, self._documents(documents))
        return int(both(lengths).sum())

    def with_answers(self, batch: Batch, own: Batch) -> Batch:
        """`own`, this rank's tokens of a batch, with the loss of its answers."""
        return self._with_loss("train", batch, own)

    def with_held_out(self, batch: Batch, own: Batch) -> Batch:
        """`own`, this rank's tokens of a batch that is held out, with the loss of its answers."""
        return self._with_loss("validation", batch, own)

    def _with_loss(self, side: Side, batch: Batch, own: Batch) -> Batch:
        rows, count = self._rows(batch), self._documents(batch.documents)
        ahead = {each: self._log_probs(each, own, rows, count) for each in self.how.forwards_ahead}
        if self.how.precompute_ref_log_probs:
            assert self.stored is not None
            ahead["base"] = self.stored.of(side, batch.ids, count).to(self._mesh.device, non_blocking=True)
        kl = self._kl(rows, ahead, count)
        if not self._pipeline.has_end:
            return own
        if "base" in ahead:
            rows["reference"] = ahead["base"]
        function = partial(self._loss, count, kl)
        loss = SampleLoss(self._mesh.context, batch.tokens.shape[1], rows, function=function)
        return replace(own, soft_targets=loss)

    def reference_sums(self, batch: Batch) -> Tensor:
        """Log-probabilities (n, D) of the documents of a batch by the reference: the model as it is, with its
        adapters. All ranks call this; none on other stages than the last."""
        own, count = own_tokens(batch, self._mesh), self._documents(batch.documents)
        return self._log_probs("model", own, self._rows(batch), count)

    def _rows(self, batch: Batch) -> dict[str, Tensor]:
        """Tensors by sample on the device: tokens, their documents, and which of them are trained on."""
        place = {"documents": batch.documents, "trained": (batch.targets != IGNORE).long()}
        rows = {name: F.pad(each[:, :-1], (1, 0)) for name, each in place.items()}
        rows["documents"][:, :1] = batch.documents[:, :1]
        rows["input_ids"] = batch.tokens
        return {name: each.to(self._mesh.device, non_blocking=True) for name, each in rows.items()}

    def _log_probs(self, which: ForwardAhead, own: Batch, rows: Mapping[str, Tensor], count: int) -> Tensor:
        """Log-probabilities (n, D) of the documents of samples by a model; none on other stages than the
        last."""
        length = own.documents.shape[1]
        own = replace(own, soft_targets=SampleLogProbs(self._mesh.context, length, rows))
        micros = list(microbatches(own, self.spec.micro_batch, self._mesh.device))
        with adapters_off(self._decoder) if which == "base" else nullcontext(), self._unwatched():
            found = self._pipeline.forward(micros)
        return (
            by_document(torch.cat(found, 1)[0], rows["documents"], count) if found else torch.empty(0, count)
        )

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """A context in which those who look at a step's tensors are not told of forwards ahead of it."""
        watch, self._pipeline.watch = self._pipeline.watch, ActionHook()
        try:
            yield
        finally:
            self._pipeline.watch = watch

    def _kl(self, rows: Mapping[str, Tensor], ahead: Mapping[ForwardAhead, Tensor], count: int) -> Tensor:
        """The estimate of the KL divergence over the batches of all ranks, a scalar; 0 for a loss without
        one."""
        if not self.how.judged:
            return torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        summed = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        if self.counts:
            lengths = by_document(rows["trained"], rows["documents"], count)
            summed += log_ratios(DocumentSums(ahead["model"], lengths, ahead["base"]))
        start_all_reduce(summed, self._mesh.world, "scalars").wait()
        return estimated_kl(*summed)

    def _loss(self, count: int, kl: Tensor, log_probs_BT: Tensor, rows: Mapping[str, Any]) -> Tensor:
        """The sum of the losses of the answers of some samples, with at most `count` documents in each."""
        documents = rows["documents"]
        log_probs, lengths = (by_document(each, documents, count) for each in (log_probs_BT, rows["trained"]))
        sums = DocumentSums(log_probs, lengths, rows.get("reference", torch.zeros_like(log_probs)))
        found = self._objective.losses(sums, kl)
        if self.counts:
            if torch.is_grad_enabled():
                self._sums = (*self._sums, found.numbers)
            else:
                self._held_out = (*self._held_out, found.numbers)
        return found.losses.sum()

    def forwards(self) -> Iterator[AbstractContextManager[None]]:
        """Those ahead of a step."""
        yield from (
            adapters_off(self._decoder) if each == "base" else nullcontext()
            for each in self.how.forwards_ahead
        )

    # Numbers ------------------------------------------------------------------------------------------

    def own_numbers(self, factor: float, following: Batch | None) -> list[Tensor]:
        """`Found.numbers` of this rank's samples."""
        return [self._summed(self._sums)]

    def take(self, numbers: Sequence[float]) -> None:
        """Take those of all ranks."""
        self._means = self._objective.metrics(numbers)

    def metrics(self) -> Mapping[str, float]:
        """Mean rewards of the last step, and what else `Objective.metrics` has."""
        return self._means

    def _documents(self, documents_NT: Tensor) -> int:
        """The most documents of a sample, rounded up to whole groups."""
        most, group = int(documents_NT.max()) + 1 if documents_NT.numel() else 0, self._objective.group
        return most + -most % group

    def held_out_metrics(self) -> Mapping[str, float]:
        """`metrics` of what was held out, since it was last asked; collective over the mesh."""
        summed, self._held_out = self._summed(self._held_out), ()
        start_all_reduce(summed, self._mesh.world, "scalars").wait()
        return self._objective.metrics(summed.tolist())

    def _summed(self, parts: Sequence[Tensor]) -> Tensor:
        zeros = torch.zeros(self.numbers, dtype=torch.float64, device=self._mesh.device)
        return torch.stack([zeros, *parts]).sum(0)

    def of_gradients(self) -> tuple[list[object], list[Tensor]]:
        """The sums, which become more while gradients are computed."""
        return [self], []

    def state(self) -> Mapping[str, Any]:
        """The digest of what was stored of the reference."""
        return {} if self.stored is None else {"reference_log_probs": self.stored.digest}

    def assume(self, number: int) -> None:
        """Take it that something is stored of all samples of a step."""
        if self.how.precompute_ref_log_probs:
            sums = np.zeros((self.spec.batch_sequences, self._objective.group))
            self.stored = StoredReference({"train": sums, "validation": sums}, "", "")

    # What others ask ----------------------------------------------------------------------------------

    def check(self, state: Mapping[str, Any], where: str) -> None:
        """Refuse a stored reference that is not the one that a checkpoint was trained with.

        Refuse a checkpoint that was trained by another loss, as data of pairs is that of no other run."""
        before, after = state["spec"].get("preference"), self.how.model_dump(mode="json")
        for key, now in after.items() if before is not None else ():
            was = before.get(key, type(self.how).model_fields[key].default)
            if was != now:
                raise UserError(
                    f"{where} is of another run: preference.{key} was {as_in_file(was)} and is "
                    f"{as_in_file(now)}; give the same value, or another --out"
                )
        kept = state.get("reference_log_probs")
        if self.stored is not None and kept is not None and kept != self.stored.digest:
            raise UserError(
                f"{where} was trained with other log-probabilities of the reference (digest {kept[:12]}, in "
                f"the run's folder now {self.stored.digest[:12]}): they are of another model; put the file "
                f"back, or give another --out"
            )


def preference_of(spec: RunSpec, mesh: Mesh, built: ParallelDecoder) -> list[Preference]:
    """The part that learns from pairs, in a list; none in a run without them."""
    return [] if spec.preference is None else [Preference(spec, mesh, built, spec.preference)]
