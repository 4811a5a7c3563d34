"""Moments in a mapped file, or on their way through a device, give the numbers of a run that keeps them."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

import small
from covering import marked, some
from equality import equal_to_one_device, verify_and_count
from meshwright.comm.mesh import Mesh
from meshwright.dryrun.rank_step import rehearse
from meshwright.optim import offload
from meshwright.optim.offload import MomentMemory
from meshwright.parallel.flat_param import dtensor
from meshwright.planner.memory.states import moment_bytes, states, units
from meshwright.planner.rank_view import place_of
from meshwright.spec import RunSpec, UserError
from meshwright.spec.tiling import Tiling, tiled
from meshwright.train import step
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from meshwright.verify.covering import Case
from ranks import Ranks

BASE = {
    "model.vocab_size": 61, "data.corpus": "synthetic", "data.seq_len": 16, "train.batch_tokens": 8 * 16,
    "train.steps": 4, "train.lr": 1e-2, "train.eval_tokens": 64,
}  # fmt: skip
OPTIMISERS = ("adamw", "lion", "muon")
ROUNDED = {"precision__compute": "bf16", "precision__master": "bf16"}
LAYOUTS: list[dict[str, object]] = [
    {},
    *({"layout__dp": 2, "layout__zero": zero} for zero in range(4)),
    {"layout__tp": 2, "layout__cp": 2},
    {"layout__pp": 2, "layout__dp": 2, "layout__zero": 3},
    {"layout__dp": 2, "layout__ep": 2, "layout__zero": 1, "model__moe__experts": 4, "model__moe__top_k": 2,
     "model__moe__ffn": 12},
    {"layout__dp": 2, "layout__zero": 3, **ROUNDED},
    {"layout__tp": 2, "model__ffn": 64, **ROUNDED},  # chunks of rows are of whole vectors of the CPU
]  # fmt: skip
PIECES = Tiling(moment_elements=160)
spec_of = partial(small.spec_of, BASE)


def trained(mesh: Mesh, spec: RunSpec, folder: Path | None, staged: bool) -> list[Tensor]:
    """This rank's parameters and moments after three steps."""
    with tiled(PIECES):
        memory = MomentMemory(spec.train, mesh.device, mesh.control, folder, staged)
        trainer = Trainer(spec, mesh, memory=memory)
    assert folder is None or not [*folder.iterdir()]  # nothing is left by a crash, or in another run's way
    trainer.initialise()
    for number, batch in enumerate(small.first_batches(spec, mesh, 3), 1):
        trainer.step(batch, number)
    moments = [tensor for _, tensor in trainer.optimiser.tensors()]
    held = [tensor for _, tensor in trainer.states.parameters()]
    assert trainer.optimiser.staging is None or trainer.optimiser.staging.length == PIECES.moment_elements
    return [getattr(tensor, "padded", tensor).to_local().clone() for tensor in (*held, *moments)]


CASES: list[Case] = [
    layout | {"train__optimiser": optimiser} for layout in LAYOUTS for optimiser in OPTIMISERS
]
QUICK = [case for place, case in enumerate(CASES) if place % 3 == place // 3 % 3][2::2]
"""Each optimiser, on layouts of data ranks and of a pipeline."""


@pytest.mark.parametrize("given", marked(CASES, QUICK))
def test_offloaded_moments_change_no_bit(ranks: Ranks, tmp_path: Path, given: Case) -> None:
    """In a file, updated where they are; and piece by piece through buffers, as a GPU takes them."""
    spec = spec_of(**given)
    wanted = ranks.run(spec.layout, trained, spec, None, False)
    for kind, staged in (("disk", False), ("disk", True), ("host", True)):
        away = spec_of(**given, train__offload=kind)
        found = ranks.run(away.layout, trained, away, tmp_path, staged)
        for mine, other in zip(found, wanted, strict=True):
            assert len(mine) == len(other) > 10
            assert all(map(torch.equal, mine, other)), (kind, staged)
    assert not [*tmp_path.iterdir()]


def staged_verify(mesh: Mesh, spec: RunSpec) -> Any:
    with patch.object(step, "MomentMemory", partial(MomentMemory, staged=True)):
        return verify_and_count(mesh, spec)


VERIFIED = [*product((verify_and_count, staged_verify), OPTIMISERS)]


@pytest.mark.parametrize(("run", "optimiser"), some(VERIFIED, VERIFIED[::2]))
def test_offloaded_moments_equal_one_device(ranks: Ranks, run: Any, optimiser: str) -> None:
    given = {"layout__dp": 2, "layout__zero": 1, "layout__tp": 2, "layout__micro_batch": 1}
    spec = spec_of(**given, train__optimiser=optimiser, train__offload="disk")
    kinds = equal_to_one_device(ranks, spec, 1e-10, run=run)
    assert {f"step 2 {moment}" for moment in spec.train.moments} <= set(kinds)


def run_it(mesh: Mesh, spec: RunSpec, out: Path, resume: str | None) -> dict[str, Any]:
    return open_run(spec, mesh, out, Observers([])).execute(resume)


def test_a_resume_reads_moments_from_the_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """With and without a file, and on another layout."""

    def start(out: str, resume: str | None = None, **flags: object) -> dict[str, Any]:
        spec = spec_of(**flags)
        return dict(ranks.run(spec.layout, run_it, spec, tmp_path / out, resume)[0])

    two: dict[str, object] = {"layout__dp": 2, "layout__zero": 3}
    whole = start("whole", **two)
    start("half", **two, train__offload="disk", train__stop_at=2)
    both = start("half", "auto", **two, train__offload="disk")
    assert both["parameters_sha256"] == whole["parameters_sha256"]
    assert both["memory"]["optimiser"] == 0 and both["memory"]["offloaded"] == whole["memory"]["optimiser"]
    assert "offloaded" not in whole["memory"]
    start("moved", **two, train__stop_at=2)
    moved = start("moved", "auto", layout__tp=2, train__offload="disk")
    assert moved["final_loss"] == pytest.approx(whole["final_loss"], rel=1e-4)
    start("kept", **two, train__offload="disk", train__stop_at=2)
    kept = start("kept", "auto", layout__tp=2)
    assert kept["parameters_sha256"] == moved["parameters_sha256"]
    assert kept["final_loss"] == moved["final_loss"]
    assert {path.name for path in (tmp_path / "half").iterdir()} == {"checkpoints"}


def refused(mesh: Mesh, spec: RunSpec, folder: Path, name: str) -> str:
    """The sentence of a run whose second rank has a full disk, or a host without memory."""
    room = os.statvfs_result((4096, 4096, 1, 1, 1, 9, 9, 9, 0, 255))
    full: dict[str, Any] = {"fstatvfs": room, "posix_fallocate": OSError(errno.ENOSPC, "full")}
    place, found = (offload, 1000) if name == "free_memory" else (os, full[name])
    given = {"side_effect" if isinstance(found, OSError) else "return_value": found}
    with patch.object(place, name, **given) if mesh.rank else nullcontext(), pytest.raises(UserError) as said:
        memory = MomentMemory(spec.train, mesh.device, mesh.control, folder, name == "free_memory")
        Trainer(spec, mesh, memory=memory)
    return str(said.value)


@pytest.mark.parametrize("name", ["fstatvfs", "posix_fallocate"])
def test_too_little_disk_is_one_sentence_on_all_ranks(ranks: Ranks, tmp_path: Path, name: str) -> None:
    spec = spec_of(layout__dp=2, layout__zero=1, train__offload="disk")
    for words in ranks.run(spec.layout, refused, spec, tmp_path, name):
        assert "train.offload: the optimiser's moments of this rank, " in words and str(tmp_path) in words
        assert " are free; give another train.offload_dir, or 'none'" in words
    assert not [*tmp_path.iterdir()]


def test_too_little_memory_of_the_host_is_one_sentence(ranks: Ranks, tmp_path: Path) -> None:
    spec = spec_of(layout__dp=2, layout__zero=1, train__offload="host")
    for words in ranks.run(spec.layout, refused, spec, tmp_path, "free_memory"):
        assert "do not fit in the host's memory, of which 1 KB are free; give 'disk'" in words


def unwritable(mesh: Mesh, spec: RunSpec) -> str:
    with pytest.raises(UserError) as raised:
        Trainer(spec, mesh)
    return str(raised.value)


def test_a_folder_that_cannot_be_written_is_one_sentence(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = spec_of(train__offload="disk", train__offload_dir=tmp_path / "file" / "folder")
    (words,) = ranks.run(spec.layout, unwritable, spec)
    assert words.startswith("train.offload_dir: ") and "give a folder that can be written" in words


def not_started(mesh: Mesh, spec: RunSpec, out: Path) -> str:
    with pytest.raises(UserError) as raised:
        open_run(spec, mesh, out, Observers([]))
    return str(raised.value)


def test_the_host_of_a_cpu_is_where_moments_are(ranks: Ranks, tmp_path: Path) -> None:
    """A CPU does not train with it, but verifies and rehearses what a GPU will train."""
    spec = spec_of(train__offload="host", layout__dp=2, layout__zero=1)
    assert "has no effect on a CPU" in ranks.run(spec.layout, not_started, spec, tmp_path)[0]
    assert "step 2 exp_avg" in equal_to_one_device(ranks, spec, 1e-10)
    on_disk = spec_of(train__offload="disk", layout__dp=2, layout__zero=1)
    cpu = torch.device("cpu")
    assert rehearse(spec, 0, cpu).most == rehearse(on_disk, 0, cpu).most


def test_a_tensor_outside_its_meshs_device_shares_its_memory(ranks: Ranks) -> None:
    assert ranks.run(spec_of().layout, shares_memory) == [True]


def shares_memory(mesh: Mesh) -> bool:
    local = torch.arange(6.0).view(2, 3)
    dims = [Replicate()] * mesh.storage.ndim
    outside = dtensor(local.to("meta"), mesh.storage, dims)
    assert outside.to_local().is_meta and outside.device_mesh is mesh.storage
    found = dtensor(local, mesh.storage, dims)
    found.to_local()[0, 0] = 7
    return float(local[0, 0]) == 7 and found.shape == local.shape and found.placements == tuple(dims)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_dry_run_and_the_formulas_leave_them_out(optimiser: str) -> None:
    spec = spec_of(layout__dp=4, layout__zero=2, train__optimiser=optimiser, train__offload="disk")
    usual = spec_of(layout__dp=4, layout__zero=2, train__optimiser=optimiser)
    view = place_of(spec, 0)
    size = moment_bytes(view, units(view))
    assert states(usual).optimiser - states(spec).optimiser == size > 0
    found = rehearse(spec, 1, torch.device("cpu"))
    assert found.states == states(spec).total
    assert rehearse(usual, 1, torch.device("cpu")).peak - found.peak == size
