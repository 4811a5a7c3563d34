"""Verify through a checkpoint, and through an export: what is lost or changed on the way is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from meshwright import api
from meshwright.api.verify_runs import IMPORTED, through_export, verify_worker
from meshwright.checkpoint import reader
from meshwright.checkpoint.save_plan import narrow
from meshwright.checkpoint.snapshots import Snapshots
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.weights import Wanted, WeightPart
from meshwright.comm.call_check import same_calls
from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch, Loader
from meshwright.exchange import hf
from meshwright.exchange.safetensors_stream import SafetensorsStream
from meshwright.parallel.stale_gradients import StaleGradients
from meshwright.spec import RunSpec, UserError
from meshwright.train import state
from meshwright.train.step import Trainer
from meshwright.verify.resume import load_part, save_part
from ranks import Ranks
from small import spec_of

BASE = {
    "model.vocab_size": 61, "data.seq_len": 16, "train.batch_tokens": 8 * 16, "train.steps": 3,
    "layout.micro_batch": 2,
}  # fmt: skip
EXPERTS = {"model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 16}
EIGHT_BIT: dict[str, object] = {"train__optimiser": "adamw8bit"}
Result = dict[str, Any]
Plant = Callable[[], AbstractContextManager[object]]


def part(mesh: Mesh, spec: RunSpec, saved: Path, save: bool, way: str, plant: Plant) -> Result | None:
    saved.mkdir(exist_ok=True)
    with same_calls(mesh, timedelta(seconds=30)), plant():
        if save:
            return save_part(spec, mesh, 2, saved, way == "snapshot")
        return load_part(spec, mesh, saved, saved / IMPORTED if way == "export" else saved, way == "snapshot")


def through(
    ranks: Ranks,
    folder: Path,
    first: dict[str, object],
    second: dict[str, object],
    plant: Plant = nullcontext,
    imported: bool = False,
    way: str = "checkpoint",
) -> tuple[Result, Result]:
    """Results of both parts, of which `plant` changes the second; exported and imported in between."""
    way = "export" if imported else way
    spec, then = spec_of(BASE, **first), spec_of(BASE, **second)
    saved = ranks.run(spec.layout, part, spec, folder, True, way, nullcontext)[0]
    if imported:
        through_export(folder, folder / "exported")
    return saved, ranks.run(then.layout, part, then, folder, False, way, plant)[0]


LAYOUTS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"layout__dp": 4, "layout__zero": 3, "layout__micro_batch": 1}, {"layout__tp": 2, "layout__dp": 2}),
    ({"layout__pp": 2, "model__tied": "true"}, {"layout__dp": 2, "layout__zero": 1}),
    ({"layout__dp": 2, "layout__cp": 2}, {"layout__dp": 2, "layout__tp": 2}),
    (EXPERTS | {"layout__dp": 2, "layout__ep": 2}, EXPERTS | {"layout__dp": 4, "layout__micro_batch": 1}),
    ({"layout__dp": 2, "layout__zero": 3} | EIGHT_BIT, {"layout__tp": 2} | EIGHT_BIT),
]


NAMED = dict(zip(("zero3-tp", "pp-zero1", "cp-tp", "ep-dp", "8-bit"), LAYOUTS, strict=True))
QUICK = {
    ("zero3-tp", "checkpoint"), ("pp-zero1", "export"), ("ep-dp", "checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("layouts", "way"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.full)
        for each in product(NAMED, ("checkpoint", "export"))
    ],
)
def test_a_run_that_is_loaded_on_another_layout_is_equal(
    ranks: Ranks, tmp_path: Path, layouts: str, way: str
) -> None:
    imported = way == "export"
    # A family of HF's that has experts has no bias to balance them, or latent attention.
    both = {"model__family": "mixtral", "model__ffn": 16} if imported else {"model__moe__bias": "true"}
    first, second = (layout | both if "model__moe__ffn" in layout else layout for layout in NAMED[layouts])
    saved, loaded = through(ranks, tmp_path, first, second, imported=imported)
    assert saved["equal"] and loaded["equal"], (saved["first"], loaded["first"])
    kinds = {row["kind"] for row in loaded["rows"]}
    last = 2 if imported else 4
    assert {"step 2 loaded parameter", "step 2 loaded exp_avg", f"step {last} exp_avg_sq"} <= kinds
    assert loaded["steps"] == saved["steps"] == 2


ISLANDS: dict[str, object] = {"layout__replicate": 2, "outer__every": 3, "outer__delay": 1}
LATE: dict[str, object] = {"layout__dp": 2, "outer__staleness": 1, "train__ema": 0.9}
SPARSE: dict[str, object] = {"outer__top_k": 0.25, "outer__momentum": 0.0, "outer__lr": 1.0}
WAYS: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("snapshot", {"layout__dp": 2, "layout__zero": 2}, {"layout__tp": 2}),
    ("snapshot", ISLANDS | SPARSE, ISLANDS | SPARSE),
    ("checkpoint", ISLANDS, ISLANDS | {"layout__tp": 2}),
    ("export", ISLANDS, ISLANDS),
    ("checkpoint", LATE, {**LATE, "layout__dp": 1, "layout__tp": 2}),
    ("snapshot", LATE, LATE),
]


@pytest.mark.parametrize(
    ("way", "first", "second"),
    [pytest.param(*way, marks=() if way in WAYS[3:5] else pytest.mark.full) for way in WAYS],
)
def test_islands_late_gradients_and_snapshots_are_compared(
    ranks: Ranks, tmp_path: Path, way: str, first: dict[str, object], second: dict[str, object]
) -> None:
    saved, loaded = through(ranks, tmp_path, first, second, imported=way == "export", way=way)
    assert saved["equal"] and loaded["equal"], (saved["first"], loaded["first"])
    kinds = {row["kind"] for row in loaded["rows"]}
    last = 2 if way == "export" else 4
    assert {f"step {last} validation loss", "step 2 loaded step", f"step {last} parameter"} <= kinds
    assert ("step 2 loaded outer momentum" in kinds) == ("outer__every" in first)


def no_snapshot() -> AbstractContextManager[object]:
    return patch.object(Snapshots, "newest", lambda _snapshots: None)


def no_gradients_under_way() -> AbstractContextManager[object]:
    return patch.object(StaleGradients, "expect", lambda _stale, _state: None)


@pytest.mark.parametrize(
    ("plant", "kind"), [(no_snapshot, "loaded step"), (no_gradients_under_way, "grad norm")]
)
def test_a_restart_without_its_snapshot_or_its_gradients_is_named(
    ranks: Ranks, tmp_path: Path, plant: Plant, kind: str
) -> None:
    _, loaded = through(ranks, tmp_path, LATE, LATE, plant, way="snapshot")
    assert loaded["first"]["kind"] == kind


def test_what_is_not_compared_through_a_checkpoint_is_refused() -> None:
    quorum = spec_of(BASE, **ISLANDS | {"outer__delay": 0, "outer__quorum": 1})
    with pytest.raises(UserError, match=r"^outer.quorum: 1: islands .* have a checkpoint each; remove"):
        api.verify(quorum, through="checkpoint")
    run = spec_of(BASE, **ISLANDS)
    with pytest.raises(UserError, match=r"^--onto: has 1 islands, and the run has 2"):
        api.verify(run, through="checkpoint", onto=spec_of(BASE, layout__dp=2))
    with pytest.raises(UserError, match=r"^--onto: has 4 ranks, and a snapshot is in the memory of those 2"):
        api.verify(spec_of(BASE, layout__dp=2), through="snapshot", onto=spec_of(BASE, layout__dp=4))


def lose(name: str) -> AbstractContextManager[object]:
    """Load all but the tensors whose names have `name` in them."""
    whole = CheckpointStore.load

    def load(
        self: CheckpointStore, step: int | None, tensors: dict[str, Any], check: Any, **more: Any
    ) -> Any:
        kept = {key: tensor for key, tensor in tensors.items() if name not in key}
        return whole(self, step, kept, check, **more)

    return patch.object(CheckpointStore, "load", load)


def begin_the_samples_again() -> AbstractContextManager[object]:
    step = Loader.step

    def anew(self: Loader, number: int) -> Batch:
        return step(self, number - 2)

    return patch.object(Loader, "step", anew)


def forget_the_updates() -> AbstractContextManager[object]:
    restore = state.restore

    def forget(trainer: Trainer, kept: dict[str, Any]) -> None:
        restore(trainer, kept)
        trainer.optimiser.resume(0)

    return patch.object(state, "restore", forget)


def turn_later_pieces() -> AbstractContextManager[object]:
    """Read all pieces of a tensor but the first with their rows in the opposite order."""
    whole = reader.Fetch.run

    def run(self: reader.Fetch, *source: Any) -> None:
        whole(self, *source)
        for staged, shared in self.overlaps:
            if shared[0] > staged.chunk.offset:
                rows = narrow(staged.data, shared, staged.chunk.offset)
                rows.copy_(rows.flip(0))

    return patch.object(reader.Fetch, "run", run)


def keep_no_first_moments() -> AbstractContextManager[object]:
    """Leave the first moments out of what a checkpoint holds."""
    whole = state.tensors

    def tensors(trainer: Trainer) -> dict[str, Any]:
        return {key: tensor for key, tensor in whole(trainer).items() if "exp_avg/" not in key}

    return patch.object(state, "tensors", tensors)


SHARDED: dict[str, object] = {"layout__dp": 2, "layout__zero": 2}
PLANTED: dict[str, tuple[Plant, str, str]] = {
    "nothing loaded": (partial(lose, "/"), "loaded parameter", "embed.weight"),
    "no second moments": (partial(lose, "exp_avg_sq"), "loaded exp_avg_sq", "embed.weight"),
    "samples from the first": (begin_the_samples_again, "loss", "loss"),
    "updates from 0": (forget_the_updates, "parameter", ""),
    "no first moments": (keep_no_first_moments, "loaded exp_avg", "embed.weight"),
    "pieces turned": (turn_later_pieces, "loaded parameter", "embed.weight"),
}


@pytest.fixture(scope="module")
def saved_run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a first part that is right, on two ranks with ZeRO-2."""
    folder, spec = tmp_path_factory.mktemp("saved"), spec_of(BASE, **SHARDED)
    assert ranks.run(spec.layout, part, spec, folder, True, "checkpoint", nullcontext)[0]["equal"]
    return folder


@pytest.mark.parametrize("case", PLANTED)
def test_what_is_lost_on_the_way_is_named(ranks: Ranks, saved_run: Path, tmp_path: Path, case: str) -> None:
    plant, kind, name = PLANTED[case]
    folder, spec = Path(shutil.copytree(saved_run, tmp_path / "run")), spec_of(BASE, **SHARDED)
    loaded = ranks.run(spec.layout, part, spec, folder, False, "checkpoint", plant)[0]
    assert loaded["first"]["kind"] == kind, loaded["first"]
    assert loaded["first"]["name"] == name or not name


def turn_later_files() -> AbstractContextManager[object]:
    """Write the tensors of all files of an export but the first with their rows in the opposite order."""
    write = SafetensorsStream.write

    def turned(self: SafetensorsStream, values: Iterable[tuple[str, Tensor]]) -> None:
        if not Path(self._file.name).name.startswith(("model.", "model-00001-")):
            values = [(name, tensor.flip(0).contiguous()) for name, tensor in values]
        write(self, values)

    return patch.object(SafetensorsStream, "write", turned)


@pytest.mark.parametrize("case", ["files", "pieces"])
def test_a_change_past_the_first_file_or_piece_of_an_export_is_named(
    ranks: Ranks, tmp_path: Path, case: str
) -> None:
    plant = turn_later_pieces if case == "pieces" else nullcontext
    with turn_later_files() if case == "files" else nullcontext():
        _, loaded = through(ranks, tmp_path, {}, {}, plant, imported=True)
    assert loaded["first"]["kind"] == "loaded parameter"


def test_an_export_that_changes_a_weight_is_named(ranks: Ranks, tmp_path: Path) -> None:
    read = hf.HfWeights.parts

    def changed(self: hf.HfWeights, wanted: Wanted) -> Iterable[WeightPart]:
        for part in read(self, wanted):
            turned = part.name == "blocks.1.attn.k.weight"
            yield part._replace(value=part.value.flip(0)) if turned else part

    with patch.object(hf.HfWeights, "parts", changed):
        _, loaded = through(ranks, tmp_path, {}, {}, imported=True)
    assert (loaded["first"]["kind"], loaded["first"]["name"]) == (
        "loaded parameter",
        "blocks.1.attn.k.weight",
    )


def test_a_folder_that_holds_no_saved_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--load: .* holds no run\.json; give the folder of"):
        verify_worker(spec_of(BASE), load=tmp_path)
    with pytest.raises(UserError, match=r"^--onto: is the layout to load on; add --through"):
        api.verify(spec_of(BASE), onto=spec_of(BASE))
