"""Runs whose batch grows: samples, metrics, resumes in the middle, rollbacks."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.spec import RunSpec, UserError
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from ranks import Ranks
from spiked_runs import FLAGS, never_seen, rollbacks, run_spiked
from training_runs import Notes, go_on, spec_of, start

T = 16
WARMUP: dict[str, object] = {"train__batch_warmup": f"{4 * T}:{12 * T},{8 * T}:{25 * T}"}
BIG: dict[str, object] = WARMUP | {
    "train__batch_tokens": 16 * T,
    "train__steps": 8,
    "train__lr_scaling": "sqrt",
}
SIZES = [4, 4, 4, 8, 8, 16, 16, 16]


def ids(spec: RunSpec, ranks: int, steps: range) -> list[list[int]]:
    """Samples of each of these steps, over all ranks."""
    corpus = open_corpus(spec)
    loaders = [Loader(corpus, spec, rank, ranks) for rank in range(ranks)]
    found = [torch.cat([loader.step(step).ids for loader in loaders]).tolist() for step in steps]
    for loader in loaders:
        loader.close()
    return found


def test_steps_take_consecutive_samples_on_any_ranks(corpus: Path) -> None:
    spec = spec_of(corpus, **BIG)
    one = ids(spec, 1, range(8))
    assert [len(step) for step in one] == SIZES
    steady = spec_of(corpus, train__batch_tokens=4 * T)
    flat = [sample for step in ids(steady, 1, range(19)) for sample in step]
    assert [sample for step in one for sample in step] == flat
    for ranks in (2, 4):
        assert ids(spec, ranks, range(8)) == one
    assert ids(spec, 2, range(4, 8)) == one[4:]


def test_no_sample_is_lost_or_seen_twice_over_skipped_ones(corpus: Path) -> None:
    spec = spec_of(corpus, **BIG)
    loader = Loader(open_corpus(spec), spec, 0, 1)
    loader.skip(6, 13)  # within a batch and across a boundary of stages
    loader.skip(30, 33)
    order = [*range(6), *range(13, 30), *range(33, 99)]
    starts = [0, *accumulate(SIZES)]
    assert [loader.first_sample(step) for step in range(8)] == [order[start] for start in starts[:8]]
    assert [loader.end_of_samples(step) for step in range(8)] == [order[end - 1] + 1 for end in starts[1:]]
    every = Loader(open_corpus(spec_of(corpus)), spec_of(corpus, train__batch_tokens=T), 0, 1)
    wanted = [int(every.step(sample).ids) for sample in order[: sum(SIZES)]]
    assert [sample for step in range(8) for sample in loader.step(step).ids.tolist()] == wanted
    loader.close()
    every.close()


def rows_of(mesh: Mesh, spec: RunSpec, out: Path) -> tuple[list[dict[str, float]], list[int]]:
    """Metrics' rows, and the microbatches of each step."""
    notes = Notes()
    run = open_run(spec, mesh, out, Observers([notes]))
    counts: list[int] = []
    begin = run.trainer.states.begin_step

    def noted(microbatches: int) -> None:
        counts.append(microbatches)
        begin(microbatches)

    with patch.object(run.trainer.states, "begin_step", noted):
        run.execute(None)
    return notes.rows, counts


def test_metrics_count_the_tokens_of_each_step(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    flags = BIG | {"train__steps": "none", "train__tokens": 73 * T - 5, "layout__micro_batch": 1}
    spec = spec_of(corpus, **flags, layout__dp=2, train__schedule="constant", train__warmup_steps=0)
    rows, counts = ranks.run(spec.layout, rows_of, spec, tmp_path)[0]
    assert [row["tokens"] for row in rows] == [T * total for total in accumulate(SIZES)]
    for row, size in zip(rows, SIZES, strict=True):
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(size * T)
        assert row["lr"] == pytest.approx(1e-2 * (size * T / 8192) ** 0.5)
    assert counts == [size // 2 for size in SIZES]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"layout__pp": 2, "layout__dp": 2, "layout__zero": 1},
        pytest.param(
            {"layout__dp": 2, "precision__compute": "fp8", "model__ffn": 48, "precision__amax_history": 3},
            marks=pytest.mark.full,
        ),
        pytest.param({"layout__dp": 4, "layout__zero": 3}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_stop_and_resume_in_the_warm_up_are_bitwise_equal(
    ranks: Ranks, corpus: Path, tmp_path: Path, layout: dict[str, object]
) -> None:
    spec = spec_of(corpus, **BIG, **layout, checkpoint__every=2, checkpoint__keep=9)
    whole, _ = start(ranks, spec, tmp_path)
    for step in (4, 2):
        again, _ = go_on(ranks, spec, tmp_path, step)
        assert again["steps"] == whole["steps"] == len(SIZES)
        for what in ("parameters_sha256", "samples_sha256", "final_loss"):
            assert again[what] == whole[what], what


def test_a_resume_on_another_layout_goes_on_with_the_next_sample(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    first = spec_of(corpus, **BIG, layout__dp=2, layout__zero=3, checkpoint__every=4)
    whole, wanted = start(ranks, first, tmp_path)
    both, found = go_on(ranks, spec_of(corpus, **BIG, layout__pp=2), tmp_path, 4)
    assert both["samples_sha256"] == whole["samples_sha256"]
    assert both["final_loss"] == pytest.approx(whole["final_loss"], abs=1e-5)
    assert found and found.keys() < wanted.keys()  # those of the first stage
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[key], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_another_warm_up_is_refused(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    start(ranks, spec_of(corpus, **BIG, train__stop_at=2), tmp_path)
    other = BIG | {"train__batch_warmup": f"{4 * T}:{12 * T}"}
    with pytest.raises(
        Exception, match=r"train\.batch_warmup was \[\[64, 192\], \[128, 400\]\] and is"
    ) as raised:
        start(ranks, spec_of(corpus, **other), tmp_path, "auto")
    assert UserError.__name__ in str(raised.value)


def test_a_rollback_in_the_warm_up_loses_no_sample(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """The warm-up ends with step 24: the spiked steps 17 to 19 have half a batch each."""
    flags = FLAGS | {"train__batch_warmup": f"{4 * T}:{24 * 4 * T}", "layout__dp": 2}
    spec = spec_of(corpus, **flags)
    assert [spec.train.batch_of_step(step) // T for step in (24, 25)] == [4, 8]
    result, events, _ = run_spiked(ranks, spec, tmp_path / "spiked", range(64, 76))
    assert rollbacks(events) == [(19, 15, (60, 76))]
    calm = never_seen(ranks, spec, tmp_path / "calm", [(60, 76)], range(64, 76))
    assert result["parameters_sha256"] == calm["parameters_sha256"]
    assert result["samples_sha256"] == calm["samples_sha256"]
