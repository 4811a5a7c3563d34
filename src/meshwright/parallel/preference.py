"""The loss of pairs of answers (`model/preference_loss.py`) as a part of a training step.

Splits        nothing of its own: samples hold whole pairs, whose log-probabilities every context rank of the
              last stage has (`loss_function.py`).
Wire          what `loss_function.py` says, and with a reference what a forward without gradients sends, once
              more: in pipelines breadth first. Four numbers more of those that a step sums.
Takes         with a reference a forward more of each step, and as many numbers as a sample has answers.

The reference is the run's model with its adapters off: their weights are frozen, so that it stays what the
run began with, and takes no memory. It is asked about a step's samples before the step.

The mean is over the pairs of the global batch: each rank sums those of its samples, and the division happens
once, by their number (`loss_normalization.py`). A pair counts where both of its answers have a token that is
trained on, which the corpus sees to.

Shapes: n samples of T tokens, in each of which D documents at most, an even number: pair k is documents 2k,
which is the chosen answer, and 2k + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.collectives import start_all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.model.chunked_cross_entropy import IGNORE
from meshwright.model.lora import adapters_off
from meshwright.model.preference_loss import Answers, pair_losses
from meshwright.parallel.loss_function import SampleLogProbs, SampleLoss
from meshwright.parallel.microbatches import microbatches
from meshwright.parallel.parallelize import ParallelDecoder
from meshwright.parallel.pipeline_parallel import ActionHook
from meshwright.parallel.step_part import StepBegin, StepPart
from meshwright.spec import RunSpec, UserError
from meshwright.spec.differences import as_in_file
from meshwright.spec.preference import METRICS, PreferenceSpec


class Preference(StepPart):
    """A step's loss of pairs on one rank."""

    numbers = 1 + len(METRICS)

    def __init__(self, spec: RunSpec, mesh: Mesh, built: ParallelDecoder, how: PreferenceSpec) -> None:
        self.spec, self.how, self._mesh = spec, how, mesh
        self._decoder, self._pipeline = built.decoder, built.pipeline
        self._counts = self._pipeline.has_end and mesh.tensor.rank == mesh.context.rank == 0
        """True for the one rank of those with the same samples that counts pairs and rewards."""
        self._sums: tuple[Tensor, ...] = ()
        """Number of pairs and sums of `METRICS`, of this step's microbatches."""
        self._held_out: tuple[Tensor, ...] = ()
        """Those of microbatches that were held out."""
        self._means: dict[str, float] = {}

    def begin_step(self, begin: StepBegin) -> None:
        """Begin to add up rewards."""
        self._sums = ()

    def own_count(self, batch: Batch) -> int:
        """The pairs of a batch that this rank counts."""
        if not self._counts:
            return 0
        targets, documents = batch.targets.cpu(), batch.documents
        lengths = by_document((targets != IGNORE).long(), documents, _documents(documents))
        return int(both(lengths).sum())

    def with_answers(self, batch: Batch, own: Batch) -> Batch:
        """`own`, this rank's tokens of a batch, with the loss of its pairs."""
        if not self._pipeline.has_end:
            if self.how.has_reference:
                self._reference_log_probs(own, {})
            return own
        device, count = self._mesh.device, _documents(batch.documents)
        place = {"documents": batch.documents, "trained": (batch.targets != IGNORE).long()}
        rows = {name: F.pad(each[:, :-1], (1, 0)) for name, each in place.items()}
        rows["documents"][:, :1] = batch.documents[:, :1]
        rows = {name: each.to(device) for name, each in {"input_ids": batch.tokens, **rows}.items()}
        if self.how.has_reference:
            found = self._reference_log_probs(own, rows)
            rows["reference"] = by_document(found, rows["documents"], count)
        function = partial(self._loss, count)
        loss = SampleLoss(self._mesh.context, batch.tokens.shape[1], rows, function=function)
        return replace(own, soft_targets=loss)

    with_held_out = with_answers

    def _reference_log_probs(self, own: Batch, rows: Mapping[str, Tensor]) -> Tensor:
        """Log-probabilities (n, T) of the reference, at the tokens' own places; (0, T) on other stages than
        the last."""
        length = own.documents.shape[1]
        own = replace(own, soft_targets=SampleLogProbs(self._mesh.context, length, rows))
        micros = list(microbatches(own, self.spec.micro_batch, self._mesh.device))
        with adapters_off(self._decoder), self._unwatched():
            found = self._pipeline.forward(micros)
        return torch.cat(found, 1)[0] if found else torch.empty(0, length)

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """A context in which those who look at a step's tensors are not told of the reference's."""
        watch, self._pipeline.watch = self._pipeline.watch, ActionHook()
        try:
            yield
        finally:
            self._pipeline.watch = watch

    def _loss(self, count: int, log_probs_BT: Tensor, rows: Mapping[str, Any]) -> Tensor:
        """The sum of the losses of the pairs of some samples, with at most `count` documents in each."""
        documents, trained = rows["documents"], rows["trained"]
        sums = by_document(log_probs_BT, documents, count)
        lengths = by_document(trained, documents, count)
        reference = rows.get("reference", torch.zeros_like(sums))
        counted = both(lengths)
        # The loss of a pair that does not count is one of numbers that leave it finite.
        given = ((sums, -1), (lengths, 1), (reference, -1))
        chosen, rejected = (
            Answers(*(torch.where(counted, each[:, side::2], filler) for each, filler in given))
            for side in (0, 1)
        )
        found = pair_losses(self.how, chosen, rejected)
        if self._counts:
            margins = found.chosen - found.rejected
            rewards = (found.chosen, found.rejected, margins, (margins > 0).to(margins))
            sums = torch.stack(
                [counted.sum().double(), *((counted * each).double().sum() for each in rewards)]
            )
            if torch.is_grad_enabled():
                self._sums = (*self._sums, sums)
            else:
                self._held_out = (*self._held_out, sums)
        return torch.where(counted, found.loss, 0).sum()

    def forwards(self) -> Iterator[AbstractContextManager[None]]:
        """The reference's forward."""
        if self.how.has_reference:
            yield adapters_off(self._decoder)

    # Numbers ------------------------------------------------------------------------------------------

    def own_numbers(self, factor: float, following: Batch | None) -> list[Tensor]:
        """The pairs of this rank's samples, and the sums of `METRICS` over them."""
        return [self._summed(self._sums)]

    def take(self, numbers: Sequence[float]) -> None:
        """Take those of all ranks."""
        self._means = _means(numbers)

    def metrics(self) -> Mapping[str, float]:
        """Mean rewards of the last step, their mean margin, and the share of chosen answers that have the
        larger one."""
        return self._means

    def held_out_metrics(self) -> Mapping[str, float]:
        """`metrics` of the pairs that were held out, since it was last asked; collective over the mesh."""
        summed, self._held_out = self._summed(self._held_out), ()
        start_all_reduce(summed, self._mesh.world, "scalars").wait()
        return _means(summed.tolist())

    def _summed(self, parts: Sequence[Tensor]) -> Tensor:
        zeros = torch.zeros(self.numbers, dtype=torch.float64, device=self._mesh.device)
        return torch.stack([zeros, *parts]).sum(0)

    def of_gradients(self) -> tuple[list[object], list[Tensor]]:
        """The sums, which become more while gradients are computed."""
        return [self], []

    # What others ask ----------------------------------------------------------------------------------

    def check(self, state: Mapping[str, Any], where: str) -> None:
        """Refuse a checkpoint that was trained by another loss, as data of pairs is that of no other run."""
        before, after = state["spec"].get("preference"), self.how.model_dump(mode="json")
        for key, now in after.items() if before is not None else ():
            if before[key] != now:
                raise UserError(
                    f"{where} is of another run: preference.{key} was {as_in_file(before[key])} and is "
                    f"{as_in_file(now)}; give the same value, or another --out"
                )


def _means(numbers: Sequence[float]) -> dict[str, float]:
    """`METRICS` from a number of pairs and the sums over them; none without pairs."""
    pairs, *sums = numbers
    return {name: each / pairs for name, each in zip(METRICS, sums, strict=True)} if pairs else {}


def _documents(documents_NT: Tensor) -> int:
    """The most documents of a sample, rounded up to whole pairs."""
    most = int(documents_NT.max()) + 1 if documents_NT.numel() else 0
    return most + most % 2


def by_document(values_NT: Tensor, documents_NT: Tensor, count: int) -> Tensor:
    """Sums of numbers by document, (n, count).

    They are taken document by document in one order, where a scattered sum of CUDA takes any.
    """
    zero = torch.zeros((), dtype=values_NT.dtype, device=values_NT.device)
    parts = [torch.where(documents_NT == number, values_NT, zero).sum(1) for number in range(count)]
    return torch.stack(parts, 1) if parts else values_NT.new_zeros(len(values_NT), 0)


def both(lengths_ND: Tensor) -> Tensor:
    """True for pairs (n, D / 2) of which both answers have tokens that are trained on."""
    return (lengths_ND[:, 0::2] > 0) & (lengths_ND[:, 1::2] > 0)


def preference_of(spec: RunSpec, mesh: Mesh, built: ParallelDecoder) -> list[Preference]:
    """The part that learns from pairs, in a list; none in a run without them."""
    return [] if spec.preference is None else [Preference(spec, mesh, built, spec.preference)]
