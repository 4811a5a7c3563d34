"""Token files that change while a run reads them: every rank ends with the sentence that names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import small
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.spec.errors import DataError
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from ranks import Ranks
from training_runs import Notes

STEPS = 6


def spec_of(corpus: Path, cache: Path) -> RunSpec:
    base = {
        "model.vocab_size": 300,
        "data.corpus": corpus,
        "data.tokenizer": "byte",
        "data.seq_len": 16,
        "data.val_fraction": 0.1,
        "data.cache": cache,
        "train.batch_tokens": 8 * 16,
        "train.steps": STEPS,
        "layout.dp": 2,
    }
    return small.spec_of(base)


class Damage(Notes):
    """Changes a byte of the token files under `cache` after `step`."""

    def __init__(self, cache: Path, step: int) -> None:
        super().__init__()
        self.cache, self.step = cache, step

    def on_step(self, row: dict[str, Any]) -> None:
        super().on_step(row)
        if row["step"] == self.step:
            (path,) = self.cache.rglob("*.tokens.bin")
            with path.open("r+b") as file:
                file.write(b"\7")


def damaged(mesh: Mesh, corpus: Path, folder: Path, step: int) -> tuple[str, int]:
    """The error of a run whose second rank's token file changes, and the steps that this rank reported."""
    cache = folder / f"cache{mesh.rank}"
    watch = Damage(cache, step if mesh.rank == 1 else 0)
    run = open_run(spec_of(corpus, cache), mesh, folder, Observers([watch]))
    with pytest.raises(DataError) as raised:
        run.execute(None)
    return str(raised.value), len(watch.rows)


@pytest.mark.parametrize("step", [2, STEPS], ids=["training", "validation"])
def test_data_that_one_rank_finds_damaged_ends_all_ranks_alike(
    ranks: Ranks, corpus: Path, tmp_path: Path, step: int
) -> None:
    spec = spec_of(corpus, tmp_path)
    (first, steps), (second, others) = ranks.run(spec.layout, damaged, corpus, tmp_path, step)
    assert first == second and steps == others
    assert f"{tmp_path / 'cache1'}" in first and "00000.tokens.bin: bytes 0 to " in first
    assert step <= steps <= step + 2
