"""Batches of `meshwright verify` with uneven targets, and the means of means that they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.parallel.loss_normalization import count_targets
from meshwright.parallel.stage import DecoderStage
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from meshwright.verify import verify as subject
from meshwright.verify.compare import TOLERANCE
from meshwright.verify.uneven import EMPTY_STEP, empty_slots, thin
from ranks import Ranks
from small import spec_of

SEQ_LEN, SEQUENCES = 16, 16
BASE = {
    "model.vocab_size": 61,
    "data.seq_len": SEQ_LEN,
    "train.batch_tokens": SEQ_LEN * SEQUENCES,
    "train.warmup_steps": 1,
}
SHAPES = [(dp, micro) for dp in (1, 2, 4, 8, 16) for micro in (1, 2, 4) if SEQUENCES // dp >= micro]


def layout_of(dp: int, micro: int) -> RunSpec:
    return spec_of(BASE, layout__dp=dp, layout__micro_batch=micro)


def whole_batch(samples: int = SEQUENCES) -> Batch:
    ones = torch.ones(samples, SEQ_LEN, dtype=torch.int64)
    slots = torch.arange(samples)
    return Batch(ones, ones, ones, ones, slots, slots)


def kept(batch: Batch) -> list[int]:
    """The number of targets of each sample."""
    return (batch.targets != -100).sum(1).tolist()


@pytest.mark.parametrize(("dp", "micro"), SHAPES)
def test_a_part_loses_the_targets_that_it_loses_in_the_whole(dp: int, micro: int) -> None:
    spec, batch = layout_of(dp, micro), whole_batch()
    for step in range(1, 5):
        whole = thin(batch, step, spec)
        for start in range(0, SEQUENCES, spec.rank_sequences):
            stop = start + spec.rank_sequences
            part = thin(batch.rows(start, stop), step, spec)
            assert torch.equal(part.targets, whole.targets[start:stop])
    assert kept(batch) == [SEQ_LEN] * SEQUENCES, "the given batch is left as it is"


@pytest.mark.parametrize(("dp", "micro"), SHAPES)
def test_one_rank_and_one_microbatch_are_empty_in_one_step(dp: int, micro: int) -> None:
    spec, batch = layout_of(dp, micro), whole_batch()
    assert kept(thin(batch, 1, spec)) == [SEQ_LEN] * SEQUENCES
    for step in range(2, 6):
        counts = kept(thin(batch, step, spec))
        share = spec.rank_sequences
        ranks = [counts[start : start + share] for start in range(0, SEQUENCES, share)]
        empty_ranks = [not any(rank) for rank in ranks]
        micros = [
            not any(rank[start : start + micro])
            for rank, empty in zip(ranks, empty_ranks, strict=True)
            for start in range(0, share, micro)
            if not empty
        ]
        here = step == EMPTY_STEP
        assert sum(empty_ranks) == (1 if here and dp > 1 else 0)
        assert sum(micros) == (1 if here and spec.microbatches > 1 else 0)
        assert counts.count(0) == (len(empty_slots(spec)) if here else 0)
        assert max(counts) - min(filter(None, counts)) > SEQ_LEN // 4 or counts.count(0) > SEQUENCES // 2


@pytest.mark.parametrize("vocabulary", [256, 32_000])
@pytest.mark.parametrize("samples", [3, 16, 100])
def test_numbers_of_targets_are_hard_to_round_to_bf16(samples: int, vocabulary: int) -> None:
    """In even steps one over them is, in odd ones the logits' gradients at targets of probability 1/V."""
    sizes = {"train__batch_tokens": SEQ_LEN * samples, "model__vocab_size": vocabulary}
    spec, exact = (spec_of(BASE, **sizes, precision__compute=compute) for compute in ("bf16", "fp32"))
    whole = whole_batch(samples)
    for step in range(1, 5):
        found, most = (sum(kept(thin(whole, step, each))) for each in (spec, exact))
        assert most / 2 < found <= most
        factor = torch.tensor((1 - (step % 2) / vocabulary) / found, dtype=torch.float64)
        off = float(factor.bfloat16().double() / factor - 1)
        assert abs(off) > (2e-3 if step % 2 else 3e-3)
        parts = [thin(whole.rows(slot, slot + 1), step, spec) for slot in range(samples)]
        assert sum(sum(kept(part)) for part in parts) == found


def test_a_slot_that_no_batch_has_is_left_to_the_comparison_of_samples() -> None:
    batch = whole_batch()
    batch.slots[3] = SEQUENCES + 2
    assert kept(thin(batch, 2, layout_of(4, 2)))[3] == kept(thin(whole_batch(), 2, layout_of(4, 2)))[2]


def test_steps_drop_other_targets_and_layouts_empty_other_ranks() -> None:
    spec, batch = layout_of(4, 2), whole_batch()
    third, fourth = (thin(batch, step, spec).targets for step in (3, 4))
    assert not torch.equal(third, fourth)
    emptied = {empty_slots(layout_of(dp, micro))[0] * dp // SEQUENCES for dp, micro in SHAPES if dp > 1}
    assert len(emptied) > 2


@contextmanager
def means_of(trainer: Trainer, batch: Batch, own: Callable[[Batch], int], parts: int) -> Iterator[None]:
    """Weight targets as in a mean over `parts` of their means; `own` counts those of a microbatch's part."""
    trainer.expect(batch)
    assert trainer._targets is not None
    _, targets = trainer._targets
    call = DecoderStage.__call__

    def weighted(stage: DecoderStage, micro: Batch, x_BTD: Tensor | None) -> Tensor:
        whole = stage.target_weight
        stage.target_weight = whole * targets / (parts * max(1, own(micro)))
        result = call(stage, micro, x_BTD)
        stage.target_weight = whole
        return result

    with patch.object(DecoderStage, "__call__", weighted):
        yield


class MeanOfRanks(Trainer):
    """The mean over the data ranks of the mean loss of each."""

    def gradients(self, batch: Batch) -> Tensor:
        own = count_targets(batch.targets)
        with means_of(self, batch, lambda _: own, self.spec.layout.data_ranks):
            return super().gradients(batch)


class MeanOfMicrobatches(Trainer):
    """The mean over all microbatches of the mean loss of each."""

    def gradients(self, batch: Batch) -> Tensor:
        parts = self.spec.layout.data_ranks * self.spec.microbatches
        with means_of(self, batch, lambda micro: count_targets(micro.targets), parts):
            return super().gradients(batch)


def verify_with(mesh: Mesh, spec: RunSpec, trainer: type[Trainer], steps: int) -> dict[str, object] | None:
    with patch.object(subject, "Trainer", trainer):
        return subject.verify(spec, mesh, steps)


@pytest.mark.parametrize(("trainer", "dp"), [(MeanOfRanks, 2), (MeanOfMicrobatches, 1)])
def test_a_mean_of_means_is_found(ranks: Ranks, trainer: type[Trainer], dp: int) -> None:
    """In the first step, where all have as many targets, it is right by luck."""
    spec = spec_of(BASE, layout__dp=dp, layout__micro_batch=4)
    found = ranks.run(spec.layout, verify_with, spec, trainer, 3)[0]
    worst = {row["kind"]: row["worst"] for row in found["rows"]}
    assert worst["step 1 gradient"] <= TOLERANCE
    assert worst["step 2 gradient"] > 1e-3
    assert worst["step 3 gradient"] > 1e-3


@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 4, "zero": 2},
        {"dp": 2, "cp": 2, "zero": 3},
        {"dp": 2, "tp": 2, "sequence_parallel": "true"},
        {"dp": 2, "pp": 2, "schedule": "zb-h1"},
    ],
    ids=str,
)
def test_layouts_with_empty_parts_equal_one_device(ranks: Ranks, axes: dict[str, object]) -> None:
    """Over three steps, with 2 microbatches or more on each rank."""
    flags = {f"layout__{key}": value for key, value in axes.items()}
    spec = spec_of(BASE, **flags, layout__micro_batch=2)
    found = ranks.run(spec.layout, verify_with, spec, Trainer, 3)[0]
    assert found["equal"], found["worst_name"]
