"""Seconds that planning a save takes in large worlds: shapes only, no tensor and no rank is there.

    python bench/checkpoint_scale.py

The states of a model of 405 billion parameters in fp32 with two moments, on 1,024 and 16,384 ranks. Printed
for each world, in seconds on this machine: what any rank computes for its share, what the first rank of a
part does with the rows of its ranks, what rank 0 does with the reports of all parts, and what a rank reads.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.checkpoint.manifest import Manifest, ManifestPart, PartFile, join, report
from meshwright.checkpoint.save_plan import cut_rows, global_indices, rectangles
from meshwright.checkpoint.writer import PARTS
from meshwright.spec.records import read
from meshwright.spec.sharded_tensor import Rectangle
from meshwright.spec.tiling import tiling

T = TypeVar("T")
HIDDEN, INNER, HEAD, VOCAB = 16384, 53248, 1024, 128256
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "attn.q.weight": ((HIDDEN, HIDDEN), 0),
    "attn.k.weight": ((HEAD, HIDDEN), 0),
    "attn.v.weight": ((HEAD, HIDDEN), 0),
    "attn.out.weight": ((HIDDEN, HIDDEN), 1),
    "mlp.gate.weight": ((INNER, HIDDEN), 0),
    "mlp.up.weight": ((INNER, HIDDEN), 0),
    "mlp.down.weight": ((HIDDEN, INNER), 1),
    "norm1.weight": ((HIDDEN,), None),
    "norm2.weight": ((HIDDEN,), None),
}
"""Shape of each parameter of a layer, and the dim that the tensor axis splits."""
DIGEST = "0" * 64


@dataclass(frozen=True)
class Faked:
    """A world of pp x dp x tp ranks; states are sharded over dp."""

    pp: int
    dp: int
    tp: int
    layers: int = 126

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def part_ranks(self) -> int:
        """Ranks of a part of the manifest."""
        return max(tiling().manifest_ranks, -(-self.ranks // PARTS))

    def shapes(self, stage: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Parameters of a stage: layers dealt evenly, an embedding first and a head last."""
        first, end = (self.layers * each // self.pp for each in (stage, stage + 1))
        found = {f"blocks.{n}.{name}": form for n in range(first, end) for name, form in SHAPES.items()}
        if stage == 0:
            found["embed.weight"] = ((VOCAB, HIDDEN), 0)
        if stage == self.pp - 1:
            found["head.weight"] = ((VOCAB, HIDDEN), 0)
        return found

    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of every tensor."""
        return {
            kind + name: ("float32", shape)
            for stage in range(self.pp)
            for name, (shape, _) in self.shapes(stage).items()
            for kind in ("model/", "optim/exp_avg/", "optim/exp_avg_sq/")
        }

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.forms().values()) // 3

    def held(self, rank: int) -> dict[str, list[Rectangle]]:
        """The rectangles that a rank holds of each parameter of its stage."""
        stage, place = divmod(rank, self.dp * self.tp)
        shard, tensor = divmod(place, self.tp)
        return {
            name: list(_rectangles(shape, split, self.dp, self.tp, shard, tensor))
            for name, (shape, split) in self.shapes(stage).items()
        }

    def rows(self, rank: int) -> list[list[Any]]:
        """Message of a rank to the first rank of its part; of tensor ranks the first writes what all hold."""
        found, start = [], 0
        for kind in ("model/", "optim/exp_avg/", "optim/exp_avg_sq/"):
            for name, held in self.held(rank).items():
                if "norm" in name and rank % self.tp:
                    continue
                for offsets, sizes in held:
                    for first, rows in cut_rows(sizes, 4):
                        piece = [offsets[0] + first, *offsets[1:]], [rows, *sizes[1:]]
                        size = 4 * math.prod(piece[1])
                        found.append([kind + name, *piece, start, size, DIGEST])
                        start += size
        return found

    def part(self, number: int) -> ManifestPart:
        """The part that lists the ranks from `number` times `part_ranks` on."""
        first = number * self.part_ranks
        return ManifestPart.of((self.rows(rank) for rank in range(first, first + self.part_ranks)), first)

    def reports(self) -> list[dict[str, Any]]:
        """Messages of all parts, for rank 0."""
        count = range(-(-self.ranks // self.part_ranks))
        return [report(self.part(number), PartFile(f"part-{number:05d}.json", 1, DIGEST)) for number in count]

    def root(self, reports: list[dict[str, Any]] | None = None) -> Manifest:
        """The manifest's root."""
        joined = join(self.forms(), self.reports() if reports is None else reports)
        return Manifest(1, "", self.ranks, 1, {}, *joined)

    def needed_parts(self, rank: int) -> set[int]:
        """Parts that a rank opens to load its own states."""
        root = self.root()
        held = self.held(rank)
        return {part for name, each in held.items() for part in root.parts_of("model/" + name, each)}


@cache
def _rectangles(
    shape: tuple[int, ...], split: int | None, dp: int, tp: int, shard: int, tensor: int
) -> tuple[Rectangle, ...]:
    rows: Placement = _StridedShard(0, split_factor=tp) if split == 0 else Shard(0)
    over_tensor: Placement = Replicate() if split is None else Shard(split)
    indices = global_indices("", shape, (rows, over_tensor), (dp, tp), (shard, tensor))
    return tuple(rectangle for _, rectangle in rectangles(indices))


def seconds(work: Callable[[], T]) -> tuple[float, T]:
    """(seconds, result)."""
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


def measured(world: Faked) -> dict[str, Any]:
    """One row of figures."""
    own, rows = seconds(lambda: world.rows(0))
    lines = [json.dumps(world.rows(rank)) for rank in range(world.part_ranks)]
    listed, part = seconds(lambda: ManifestPart.of(map(json.loads, lines), 0))
    text_seconds, text = seconds(part.render)
    part_seconds, _ = seconds(lambda: report(part, PartFile("part-00000.json", 1, DIGEST)))
    reports = world.reports()
    told = [json.dumps(None)] * (world.ranks - len(reports)) + [json.dumps(each) for each in reports]
    parsed, found = seconds(lambda: [each for each in map(json.loads, told) if each is not None])
    joined, root = seconds(lambda: world.root(found))
    sealed, content = seconds(root.render)
    opened, _ = seconds(lambda: Manifest.parse(content))
    checked, _ = seconds(lambda: read(ManifestPart, json.loads(text)).check(root.tensors))
    return {
        "ranks": world.ranks,
        "pieces": len(rows) * world.ranks,
        "any_rank_share_s": round(own, 3),
        "first_of_part_s": round(listed + text_seconds + part_seconds, 3),
        "rank_0_root_s": round(parsed + joined + sealed, 3),
        "read_root_s": round(opened, 3),
        "read_part_s": round(checked, 3),
        "root_bytes": len(content),
        "part_bytes": len(text),
        "parts": len(reports),
    }


if __name__ == "__main__":
    for pp, dp in ((8, 16), (16, 128)):
        print(json.dumps(measured(Faked(pp=pp, dp=dp, tp=8))), flush=True)
