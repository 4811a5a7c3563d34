"""Loss spikes: what counts as one, and that a rollback trains as if the bad batches had never been."""

from __future__ import annotations

import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from meshwright.checkpoint.directory import latest_step, published
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.spec.sections import RecoverySpec
from meshwright.train.guard.spikes import SpikeDetector
from meshwright.train.loop import TrainingRun
from ranks import Ranks
from spiked_runs import (
    FLAGS,
    POISONED,
    SEQUENCES,
    STEPS,
    Range,
    never_seen,
    of_batches,
    rollbacks,
    run_spiked,
    spiked,
)
from training_runs import spec_of

RULE = RecoverySpec(on_spike="stop", spike_window=50, spike_steps=3)


def losses(seed: int) -> list[tuple[float, float]]:
    """Losses that fall with noise, and norms: 400 steps of a run that is well."""
    chance = random.Random(seed)
    return [
        (2 + 5 * 0.98**step + chance.gauss(0, 0.05), chance.lognormvariate(0, 0.4)) for step in range(400)
    ]


def found(rows: list[tuple[float, float]], detector: SpikeDetector | None = None) -> list[int]:
    detector = detector or SpikeDetector(RULE)
    firsts = [detector.first_step(step, *row) for step, row in enumerate(rows, start=1)]
    return [first for first in firsts if first is not None]


def test_a_run_that_is_well_has_no_spike() -> None:
    for seed in range(20):
        assert found(losses(seed)) == []


@pytest.mark.parametrize(
    ("length", "loss", "norm", "firsts"),
    [
        (3, 4.0, 30.0, [301]),
        (5, 4.0, 30.0, [301, 301, 301]),
        (2, 4.0, 30.0, []),  # a bad batch, from which the loss comes back
        (3, 4.0, 1.0, []),  # hard samples
        (3, 2.1, 30.0, []),
    ],
)
def test_a_spike_is_high_in_loss_and_norm_for_some_steps(
    length: int, loss: float, norm: float, firsts: list[int]
) -> None:
    rows = losses(0)
    rows[300 : 300 + length] = [(loss, norm)] * length
    assert found(rows) == firsts


def test_a_detector_goes_on_from_its_state() -> None:
    rows = losses(1)
    rows[300:303] = [(4.0, 30.0)] * 3
    whole = SpikeDetector(RULE)
    for step, row in enumerate(rows[:302], start=1):
        assert whole.first_step(step, *row) is None
    other = SpikeDetector(RULE)
    other.restore(whole.state())
    assert other.first_step(303, *rows[302]) == whole.first_step(303, *rows[302]) == 301
    assert other.state() == whole.state()


def test_steps_take_the_batches_that_were_not_skipped(corpus: Path) -> None:
    spec = spec_of(corpus)
    loader = Loader(open_corpus(spec), spec, 0, 1)
    chance, left = random.Random(0), list(range(200))
    for _ in range(6):
        first = chance.randrange(60)
        end = first + chance.randrange(1, 20)
        loader.skip(first * SEQUENCES, end * SEQUENCES)
        left = [batch for batch in left if not first <= batch < end]
        assert [loader.first_sample(step) // SEQUENCES for step in range(50)] == left[:50]
        assert all(end < first for (_, end), (first, _) in pairwise(loader.skipped))
        assert loader.step(7).ids.equal(Loader(open_corpus(spec), spec, 0, 1).step(left[7]).ids)
    loader.close()


@pytest.mark.parametrize(
    ("most", "layout", "skipped"),
    [
        (200, {"dp": 2}, (15, 19)),
        (3, {"dp": 2, "zero": 3}, (16, 19)),
        pytest.param(200, {"pp": 2, "replicate": 2, "zero": 1}, (15, 19), marks=pytest.mark.full),
    ],
)
def test_a_rollback_trains_as_if_the_batches_had_never_been(
    ranks: Ranks, corpus: Path, tmp_path: Path, most: int, layout: dict[str, object], skipped: Range
) -> None:
    flags = FLAGS | {f"layout__{key}": value for key, value in layout.items()}
    spec = spec_of(corpus, **flags, recovery__spike_skip=most)
    result, events, _ = run_spiked(ranks, spec, tmp_path / "spiked")
    assert [fields["first_step"] for kind, fields in events if kind == "spike"] == [17]
    assert rollbacks(events) == [(19, 15, of_batches(*skipped))]
    calm = never_seen(ranks, spec, tmp_path / "calm", [of_batches(*skipped)])
    assert result["steps"] == calm["steps"] == STEPS
    assert result["parameters_sha256"] == calm["parameters_sha256"]
    assert result["samples_sha256"] == calm["samples_sha256"]


def test_a_resume_leaves_out_what_was_skipped(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, **FLAGS, layout__dp=2)
    whole, events, _ = run_spiked(ranks, spec, tmp_path / "whole")
    assert len(rollbacks(events)) == 1
    for layout in ({"layout__dp": 2}, {"layout__tp": 2}):
        out = tmp_path / "-".join(layout)
        shutil.copytree(tmp_path / "whole", out, symlinks=True)
        for step in (25, STEPS):
            shutil.rmtree(published(out / "checkpoints")[step])
        again, events, _ = run_spiked(ranks, spec_of(corpus, **FLAGS, **layout), out, (), "20")
        assert not rollbacks(events)
        assert again["samples_sha256"] == whole["samples_sha256"]
        assert again["final_loss"] == pytest.approx(whole["final_loss"], abs=1e-5)
        assert (again["parameters_sha256"] == whole["parameters_sha256"]) == (layout == {"layout__dp": 2})


def test_a_second_spike_before_a_save_goes_back_to_the_same_step(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = spec_of(corpus, **FLAGS)
    bad = [*range(*of_batches(16, 22)), *range(*of_batches(30, 33))]
    result, events, _ = run_spiked(ranks, spec, tmp_path / "spiked", bad)
    left_out = [of_batches(15, 19), of_batches(19, 22), of_batches(27, 33)]
    assert rollbacks(events) == [(19, 15, left_out[0]), (18, 15, left_out[1]), (26, 20, left_out[2])]
    calm = never_seen(ranks, spec, tmp_path / "calm", [left_out[2], of_batches(15, 22)])
    assert result["parameters_sha256"] == calm["parameters_sha256"]
    assert result["samples_sha256"] == calm["samples_sha256"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"recovery__on_spike": "stop"}, "--resume 15 --recovery.on_spike rollback"),
        (
            {"recovery__max_rollbacks": 0},
            "after 0 rollbacks (recovery.max_rollbacks); train anew",
        ),
        ({"checkpoint__every": 20}, "no checkpoint before it to go back to; set checkpoint.every"),
    ],
)
def test_a_spike_that_cannot_be_gone_back_from_ends_the_run(
    ranks: Ranks, corpus: Path, tmp_path: Path, flags: dict[str, object], words: str
) -> None:
    spec = spec_of(corpus, **(FLAGS | flags))
    _, events, error = run_spiked(ranks, spec, tmp_path)
    assert error.startswith("a loss spike from step 17 to step 19, ") and words in error
    assert not rollbacks(events)
    assert latest_step(tmp_path / "checkpoints") == (None if "checkpoint__every" in flags else 15)


def test_spikes_are_ignored_by_default(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, **(FLAGS | {"recovery__on_spike": "ignore"}))
    result, events, _ = run_spiked(ranks, spec, tmp_path)
    assert result["steps"] == STEPS and not [kind for kind, _ in events if kind == "spike"]


def spiked_as_before(mesh: Mesh, *run: Any) -> tuple[dict[str, Any], list[Any], str]:
    """`spiked`, with checkpoints as they were before `train.batch_warmup`: they count skipped batches."""
    metadata = TrainingRun._metadata

    def counted(self: TrainingRun, samples: str) -> dict[str, Any]:
        kept = metadata(self, samples)
        ranges = kept["guard"].pop("skipped_samples")
        kept["guard"]["skipped_batches"] = [(first // SEQUENCES, end // SEQUENCES) for first, end in ranges]
        return kept

    with patch.object(TrainingRun, "_metadata", counted):
        return spiked(mesh, *run)


def test_a_resume_from_a_checkpoint_that_counts_batches(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec, part = spec_of(corpus, **FLAGS), spec_of(corpus, **FLAGS, train__stop_at=22)
    whole, _, _ = run_spiked(ranks, spec, tmp_path / "whole")
    ranks.run(part.layout, spiked_as_before, part, tmp_path / "halves", POISONED, None, ())
    both, events, _ = run_spiked(ranks, spec, tmp_path / "halves", (), "auto")
    assert not rollbacks(events)
    assert both["samples_sha256"] == whole["samples_sha256"]
    assert both["parameters_sha256"] == whole["parameters_sha256"]
