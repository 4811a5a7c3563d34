"""Batches of one data rank, by step; the next step's batch is made in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Protocol, Self

import numpy as np
import torch

from meshwright.data.corpus import Corpus
from meshwright.data.packing import IGNORE, Samples
from meshwright.data.permutation import I64
from meshwright.data.split_samples import FirstSamples, Split
from meshwright.spec import RunSpec

NO_SAMPLE = -1


class ByToken(Protocol):
    """Tensors by sample and token, such as soft targets (`model/soft_targets.py`)."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor], /) -> Self:
        """Return them with each tensor, whose first dim is that of the samples, changed."""
        ...


@dataclass(frozen=True)
class Batch:
    """n samples of T tokens on the CPU, all int64.

    tokens, targets, positions, documents: (n, T); a target of -100 is not predicted.
    ids: (n,) numbers of the samples in their split, -1 for padding. slots: (n,) places in the global batch.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    ids: torch.Tensor
    slots: torch.Tensor
    soft_targets: ByToken | None = field(default=None, kw_only=True)
    """More that the loss is of, on the device."""
    further: ByToken | None = field(default=None, kw_only=True)
    """Tokens after the next ones, on the device (`model/multi_token_prediction.py`)."""

    def rows(self, start: int, stop: int) -> Batch:
        """Return the samples from `start` up to `stop`, as views."""
        cut = itemgetter(slice(start, stop))
        more: dict[str, Any] = {
            name: each.each(cut) for name in BY_TOKEN if (each := getattr(self, name)) is not None
        }
        return Batch(*(cut(getattr(self, name)) for name in TENSORS), **more)

    def to(self, device: torch.device) -> Batch:
        """Return a copy whose tokens, targets and positions are on `device`; of pinned ones without a wait.

        Documents stay on the CPU, where attention is planned.
        """
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ON_DEVICE}
        return replace(self, **moved)

    def pinned(self) -> Batch:
        """Return a copy of which `to` takes what it copies from memory that a GPU reads by itself."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in ON_DEVICE})


ON_DEVICE = ("tokens", "targets", "positions")
"""Tensors of a batch that a device computes with."""
TENSORS = ("tokens", "targets", "positions", "documents", "ids", "slots")
"""Fields of a `Batch` that the data gives."""
BY_TOKEN = ("soft_targets", "further")
"""Fields of a `Batch` that parts of a step add."""


class SplitReader:
    """The samples of a split in order, as batches of data rank `rank` of `ranks`."""

    def __init__(self, split: Split, spec: RunSpec, rank: int, ranks: int) -> None:
        self.split = split
        self._rank, self._ranks = rank, ranks
        self._micro_batch, self._rows = spec.micro_batch, spec.batch_sequences // ranks
        self._seq_len = spec.data.seq_len
        self._failure: Exception | None = None

    def batches(self, max_tokens: int | None = None, source: int | None = None) -> Iterator[Batch]:
        """Return the first `max_tokens` targets (default all), or a source's part of them, each once over all
        ranks.

        Every rank yields the same number of batches, each of as many sequences as its share of a step, but
        for the last, which has as few as whole microbatches allow. Samples beyond the last have no targets.
        Nor have those of a batch that cannot be read: other ranks wait for this one in collectives, so the
        error is kept for `check`.
        """
        self._failure = None
        return self._batches(self.split.head(max_tokens, source))

    def _batches(self, head: FirstSamples) -> Iterator[Batch]:
        micro, first = self._micro_batch, 0
        while first < head.samples:
            needed = -(-(head.samples - first) // (self._ranks * micro)) * micro
            rows = min(self._rows, needed)
            slot = first + self._rank * rows + np.arange(rows)
            first += self._ranks * rows
            real = slot < head.samples
            try:
                ids, allowed = head.at(np.minimum(slot, head.samples - 1))
                samples = self.split.gather(ids)
            except Exception as error:
                self._failure = self._failure or error
                ids, allowed = np.zeros_like(slot), np.zeros_like(slot)
                samples = Samples(*(np.zeros((rows, self._seq_len), dtype=np.int64) for _ in Samples._fields))
            limit = np.where(real, allowed, 0)
            samples.targets[np.arange(samples.targets.shape[1]) >= limit[:, None]] = IGNORE
            yield _batch(samples, np.where(real, ids, NO_SAMPLE), slot)

    def check(self) -> None:
        """Raise the error of a batch that was not read."""
        if self._failure is not None:
            raise self._failure


class Loader:
    """The batches of data rank `rank` of `ranks`.

    Step s takes the global samples from that on which follows those of the steps before, one for each slot of
    its batch, whatever the number of ranks; skipped samples are left out of the count. A rank reads its
    contiguous share of the slots. The background thread puts batches into pinned memory with `pin`.
    """

    def __init__(self, corpus: Corpus, spec: RunSpec, rank: int, ranks: int, pin: bool = False) -> None:
        if not 0 <= rank < ranks or spec.shared_sequences % ranks:
            raise ValueError(f"rank {rank} of {ranks} for a batch of {spec.shared_sequences} sequences")
        self._train = spec.train
        self._corpus = corpus
        self._order = corpus.order(spec.train.seed)
        self._rank, self._ranks, self._pin = rank, ranks, pin
        self._seq_len = spec.data.seq_len
        self.validation = SplitReader(corpus.validation, spec, rank, ranks)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._next: tuple[int, Future[Batch]] | None = None
        self.skipped: list[tuple[int, int]] = []
        """Global samples that no step takes, as ranges [first, end) that are apart from each other, in order.
        """

    def skip(self, first: int, end: int) -> None:
        """Leave out the samples from `first` up to `end`, too; for steps that are asked for after this."""
        apart = [pair for pair in self.skipped if pair[1] < first or end < pair[0]]
        touched = [(first, end), *(pair for pair in self.skipped if pair not in apart)]
        self.restore(sorted([*apart, (min(touched)[0], max(end for _, end in touched))]))

    def restore(self, skipped: Iterable[Sequence[int]]) -> None:
        """Set the skipped samples, as `skipped` lists them."""
        self._next = None  # made of other samples
        self.skipped = [(first, end) for first, end in skipped]

    def first_sample(self, step: int) -> int:
        """Return the number of the first global sample that a step takes, from 0."""
        return int(self._samples(step, np.zeros(1, dtype=np.int64))[0])

    def end_of_samples(self, step: int) -> int:
        """Return the number of the last global sample that a step takes, plus 1."""
        last = self._train.batch_of_step(step + 1) // self._seq_len - 1
        return int(self._samples(step, np.array([last]))[0]) + 1

    def _samples(self, step: int, slots: I64) -> I64:
        """Return the numbers of the global samples in slots of a step."""
        numbers = self._train.tokens_after(step) // self._seq_len + slots
        for first, end in self.skipped:
            numbers = np.where(numbers >= first, numbers + (end - first), numbers)
        return numbers

    def ids(self, step: int) -> I64:
        """Return the numbers in their split of all ranks' samples of a step, whose tokens are not read."""
        slots = np.arange(self._train.batch_of_step(step + 1) // self._seq_len)
        return self._corpus.train.ids(*self._order.at(self._samples(step, slots)))

    def step(self, step: int) -> Batch:
        """Return this rank's samples of optimiser step `step`, from 0: a function of (seed, step, skipped).

        Errors of the background thread are raised here.
        """
        ready, self._next = self._next, None
        batch = ready[1].result() if ready is not None and ready[0] == step else self._make(step)
        self._next = (step + 1, self._pool.submit(self._make, step + 1))
        return batch

    def close(self) -> None:
        """End the background thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, step: int) -> Batch:
        share = self._train.batch_of_step(step + 1) // self._seq_len // self._ranks
        slot = self._rank * share + np.arange(share)
        ids = self._corpus.train.ids(*self._order.at(self._samples(step, slot)))
        batch = _batch(self._corpus.train.gather(ids), ids, slot)
        return batch.pinned() if self._pin else batch


def _batch(samples: Samples, ids: I64, slots: I64) -> Batch:
    return Batch(*(torch.from_numpy(array) for array in (*samples, ids, slots)))
