"""Cost of a save and a load in a large world: messages, and which rank reads which bytes how often."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from checkpoint_scale import Faked
from covering import some
from faults import same, tensors, zeros_like
from meshwright.checkpoint import CheckpointStore
from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.manifest import Manifest, ManifestPart, PartFile, join, report
from meshwright.checkpoint.replicas import deal
from meshwright.comm.mesh import Mesh
from meshwright.comm.traffic_counter import TrafficCounter
from meshwright.spec import Layout
from meshwright.spec.tiling import Tiling, tiled
from ranks import RANKS, Ranks, RanksFailedError

EIGHT = Layout(dp=RANKS)
MESHES: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "replicated": ((RANKS,), (Replicate(),)),
    "sharded": ((RANKS,), (Shard(0),)),
    "hybrid": ((2, RANKS // 2), (Replicate(), Shard(0))),
    "replicated in between": ((2, 2, 2), (Replicate(), Shard(0), Replicate())),
    "replicated three times": ((2, 2, 2), (Replicate(), Replicate(), Replicate())),
}


class CountingDisk(Disk):
    """Counts opened files, read bytes and synced directories."""

    def __init__(self) -> None:
        self.opens: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.directories: Counter[str] = Counter()
        self._open: dict[int, str] = {}

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[int, int]]:
        self.opens[path.name] += 1
        with super().opened(path) as (descriptor, size):
            self._open[descriptor] = path.name
            yield descriptor, size

    def read(self, descriptor: int, target: memoryview, start: int) -> int:
        count = super().read(descriptor, target, start)
        self.bytes[self._open[descriptor]] += count
        return count

    def sync_directory(self, path: Path) -> None:
        self.directories[path.name.split("-")[0]] += 1
        super().sync_directory(path)


def whole() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    found = {f"model/{index}": torch.randn(16, 6, generator=draw) for index in range(11)}
    found["model/bf16"] = torch.randn(40, 8, generator=draw).bfloat16()
    found["optim/step"] = torch.tensor(3.0)
    return found


def placed(shape: tuple[int, ...], placements: tuple[Placement, ...]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", shape)
    result: dict[str, Tensor] = {}
    for name, tensor in whole().items():
        fitting = placements if tensor.ndim else [Replicate()] * len(shape)
        result[name] = distribute_tensor(tensor, mesh, fitting, src_data_rank=None)
    return result


def save_and_load(mesh: Mesh, name: str, directory: Path, part_ranks: int) -> dict[str, Any]:
    with tiled(Tiling(manifest_ranks=part_ranks)):
        saved, disk, wire = placed(*MESHES[name]), CountingDisk(), TrafficCounter()
        store = CheckpointStore(directory, 2, mesh.background, disk=disk, wire=wire)
        store.save(1, saved, {})
        synced = disk.directories
        loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
        store.load(1, loaded)
        for name, tensor in saved.items():
            assert torch.equal(loaded[name].to_local(), tensor.to_local()), name  # type: ignore[attr-defined]
        store.close()
        return {
            "bytes": dict(disk.bytes),
            "opens": dict(disk.opens),
            "synced": synced[".tmp"],
            "sent": sum(wire.bytes.values()),
            "held": sum(tensor.to_local().nbytes for tensor in saved.values()),  # type: ignore[attr-defined]
        }


def of_files(rows: list[dict[str, Any]], key: str, suffix: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update({file: count for file, count in row[key].items() if file.endswith(suffix)})
    return total


@pytest.mark.parametrize("name", some(MESHES, ("hybrid", "replicated in between")))
def test_every_byte_is_read_once_in_the_world(ranks: Ranks, name: str, tmp_path: Path) -> None:
    rows = ranks.run(EIGHT, save_and_load, name, tmp_path, 64)
    total = sum(tensor.nbytes for tensor in whole().values())
    found = of_files(rows, "bytes", ".bin")
    assert found.total() == total
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step-00000001").glob("*.bin")}
    assert found == sizes
    # A tensor on the border of two ranks' shares is read by one of them.
    assert max(of_files(rows, "opens", ".bin").values()) <= (1 if name == "sharded" else 2)


def test_what_replicas_send_each_other_is_recorded(ranks: Ranks, tmp_path: Path) -> None:
    rows = ranks.run(EIGHT, save_and_load, "hybrid", tmp_path, 64)
    # Rows go between 2 replicas; the scalar between the 2 in line with its reader, then from each to 3 more.
    sent = sum((row["held"] - 4) / 2 for row in rows) + 4 * (2 / 2 + 8 * 3 / 4)
    assert sum(row["sent"] for row in rows) == pytest.approx(sent)


def test_the_directory_is_synced_once(ranks: Ranks, tmp_path: Path) -> None:
    rows = ranks.run(EIGHT, save_and_load, "sharded", tmp_path, 64)
    assert [row["synced"] for row in rows] == [1, *[0] * (RANKS - 1)]


def test_ranks_read_the_parts_of_the_manifest_that_they_need(ranks: Ranks, tmp_path: Path) -> None:
    rows = ranks.run(EIGHT, save_and_load, "sharded", tmp_path, 2)
    for rank, row in enumerate(rows):
        parts = {file for file in row["opens"] if file.startswith("part-")}
        holds_the_scalar = {"part-00000.json"} & parts
        assert parts - holds_the_scalar <= {f"part-{rank - rank % 2:05d}.json"}
        assert ("manifest.json" in row["opens"]) == (rank == 0)
    body = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())["body"]
    assert [file for file, _, _ in body["parts"]] == [f"part-{rank:05d}.json" for rank in range(0, RANKS, 2)]


def another_layout(mesh: Mesh, directory: Path) -> None:
    for shape, placements in MESHES.values():
        expected = placed(shape, placements)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        CheckpointStore(directory, 2, mesh.background).load(1, loaded)
        for name, tensor in expected.items():
            assert torch.equal(loaded[name].to_local(), tensor.to_local()), name  # type: ignore[attr-defined]


def test_parts_load_under_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(EIGHT, save_and_load, "hybrid", tmp_path, 3)
    ranks.run(EIGHT, another_layout, tmp_path)


def tied(mesh: Mesh, directory: Path, differ: bool) -> int:
    """Two stages of a pipeline hold one tensor, each on its own half of the ranks."""
    pipeline = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("pp", "dp"))
    stage = pipeline.get_local_rank("pp")
    rows = 8 if differ and stage else 16
    full = {"model/tied": torch.arange(6.0 * rows).view(rows, 6), f"model/{stage}": torch.ones(5, 3)}
    saved = {
        name: distribute_tensor(tensor, pipeline["dp"], [Shard(0)], src_data_rank=None)
        for name, tensor in full.items()
    }
    store = CheckpointStore(directory, 2, mesh.background)
    try:
        store.save(1, saved, {})
    finally:
        store.close()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    store.load(1, loaded)
    for name, tensor in saved.items():
        assert torch.equal(loaded[name].to_local(), tensor.to_local()), name
    return sum(path.stat().st_size for path in (directory / "step-00000001").glob("*.bin"))


def test_what_two_stages_hold_is_written_once(ranks: Ranks, tmp_path: Path) -> None:
    assert set(ranks.run(EIGHT, tied, tmp_path, False)) == {4 * (16 * 6 + 2 * 5 * 3)}


def test_stages_that_disagree_about_a_tensor_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match=r"model/tied is float32 \[8, 6\] on rank 4"):
        ranks.run(EIGHT, tied, tmp_path, True)


def test_a_hole_is_seen_before_anything_is_published() -> None:
    rows = [["x", [0, 0], [2, 3], 0, 24, "0" * 64], ["x", [2, 0], [1, 3], 24, 12, "0" * 64]]
    told = [
        report(ManifestPart.of([[row]], rank), PartFile(f"part-{rank:05d}.json", 1, "0" * 64))
        for rank, row in enumerate(rows)
    ]
    root = Manifest(1, "", 2, 1, {}, *join({"x": ("float32", (3, 3))}, told))
    assert root.parts_of("x", [((2, 0), (1, 1))]) == {1} and root.part_count == 2
    for reports in (told[:1], [*told, told[0]]):
        with pytest.raises(ValueError, match="they overlap or leave a hole"):
            join({"x": ("float32", (3, 3))}, reports)


def rounds_of_a_save(mesh: Mesh, directory: Path) -> list[int]:
    store, control = CheckpointStore(directory, 2, mesh.background), mesh.background
    counts = []
    for step in range(3):
        before = control.rounds
        store.save(step, placed(*MESHES["hybrid"]), {})
        counts.append(control.rounds - before)
    store.close()
    return counts


def test_a_plan_is_agreed_on_once(ranks: Ranks, tmp_path: Path) -> None:
    first, second, third = ranks.run(EIGHT, rounds_of_a_save, tmp_path)[0]
    assert (first, second, third) == (19, 13, 13)


def test_shares_are_consecutive_and_even() -> None:
    for count in (1, 2, 3, 16):
        sizes = [1 + index % 7 for index in range(200)]
        owners = deal(sizes, count)
        assert owners == sorted(owners)
        loads = Counter[int]()
        for size, owner in zip(sizes, owners, strict=True):
            loads[owner] += size
        assert sorted(loads) == list(range(count))
        assert max(loads.values()) - min(loads.values()) <= 2 * max(sizes)
    assert deal([], 4) == [] and deal([0, 0], 4) == [0, 0]


def test_staging_is_allocated_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds pinned memory up to a power of two: one block of 33 GiB would take 64."""
    allocated: list[int] = []
    empty = torch.empty

    def counted(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        allocated.append(arguments[0])
        return empty(*arguments, **options)

    source = tensors(1)
    with monkeypatch.context() as patch, tiled(Tiling(image_bytes=300)):
        patch.setattr("meshwright.checkpoint.staging.torch.empty", counted)
        store = CheckpointStore(tmp_path, 2)
        for step in (1, 2):  # in the same memory
            store.save(step, source, {}, asynchronous=True)
            store.wait()
        copied = len(allocated)
        store.save(3, source, {})  # training waits, and nothing is copied
    store.close()
    assert len(allocated) == copied
    assert sum(allocated) == sum(tensor.nbytes for tensor in source.values())
    assert max(allocated) <= 300 and len([size for size in allocated if size]) > 1
    for step in (2, 3):
        target = zeros_like(source)
        store.load(step, target)
        assert same(target, source)


def test_the_root_does_not_grow_with_the_pieces() -> None:
    """It is sent to every rank, and rank 0 makes it alone."""
    worlds = [Faked(pp=2, dp=dp, tp=8, layers=2) for dp in (8, 64)]
    roots = [world.root() for world in worlds]
    assert [root.ranks for root in roots] == [128, 1024]
    for world, root in zip(worlds, roots, strict=True):
        assert root.bytes == world.parameters * 4 * 3
        part = world.part(1)
        assert len(part.files) == world.part_ranks == 64
        assert world.needed_parts(64) <= {0, 1}  # norms are written by the first tensor rank
    small, large = (len(root.render()) for root in roots)
    assert large - small < 20_000
