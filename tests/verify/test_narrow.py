"""A narrowed copy, and the small tiles, keep what depends on size: bugs there are found in a large run."""

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import layouts
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.kernels.attention_intervals import attention_intervals
from meshwright.kernels.partial_attention import make_part
from meshwright.parallel.context_parallel import zigzag
from meshwright.schedule import NAMES
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.parameters import parameters
from meshwright.spec.stages import stages
from meshwright.spec.tiling import Tiling, loss_rows, query_rows, tiled, tiling
from meshwright.verify import verify as subject
from meshwright.verify.narrow import MOST_WORK, narrow
from meshwright.verify.tiles import small_tiles
from ranks import RANKS, Ranks


def large(**flags: object) -> RunSpec:
    """A run of the preset `small`, which with its default batch is narrowed."""
    given = {"model.preset": "small"} | {key.replace("__", "."): str(value) for key, value in flags.items()}
    return load(None, list(given.items()))


def full(*values: object) -> Any:
    """Parameters of a case that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.full)


# Bugs that only a large run has -------------------------------------------------------------------------


class Bug(NamedTuple):
    """A line of a function of the product, by the module that calls it, and what stands there instead."""

    module: str
    function: str
    line: str
    instead: str


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Give the module a copy of the function with the bug in it."""
    owner: Any = import_module(f"meshwright.{bug.module}")
    *inside, name = bug.function.split(".")
    for each in inside:
        owner = getattr(owner, each)
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(bug.line) == 1
    made: dict[str, Any] = {}
    exec(source.replace(bug.line, bug.instead), function.__globals__, made)
    with patch.object(owner, name, made[name]):
        yield


def verify_with(mesh: Mesh, spec: RunSpec, bug: Bug | None) -> dict[str, object] | None:
    """One step of `verify`, with the bug on the layout's side alone."""

    class Harmed(subject.Trainer):
        def gradients(self, batch: Batch) -> Tensor:
            if bug is None:
                return super().gradients(batch)
            with planted(bug):
                return super().gradients(batch)

    with patch.object(subject, "Trainer", Harmed):
        return subject.verify(spec, mesh, 1)


LOSS = Bug(
    "model.chunked_cross_entropy",
    "_LinearCrossEntropy.forward",
    "grad_weight, first > 0",
    "grad_weight, False",
)
"""The gradient of the head's weight is that of the last chunk."""
BLOCK = Bug("kernels.attention_cpu", "_add_bias", "triu_(1)", "triu_(1 + first)")
"""Queries of the second block see later keys of their block."""
TILE = Bug(
    "kernels.partial_attention", "_row_of_tiles", "_borders(columns, *inner)",
    "_borders(columns, *inner) if column == left else ()",
)  # fmt: skip
"""Queries see later keys in the second tile of keys."""
CUT = Bug(
    "parallel.stage", "DecoderStage.__call__", "through(stage.blocks,",
    "through(stage.blocks[: decoder.spec.layers // 2],",
)  # fmt: skip
"""A stage of more blocks than half of the layers skips its last."""
WINDOW = Bug("parallel.context_parallel", "attention_intervals", "(window - 1)", "window")
"""The sliding window is larger by one."""

BUGS: dict[str, tuple[Bug, dict[str, object]]] = {
    "loss-dp": (LOSS, {"layout__dp": 2}),
    "loss-tp": (LOSS, {"layout__tp": 2}),
    "block": (BLOCK, {"layout__dp": 2, "data__document_mask": "false"}),
    "tile-ring": (TILE, {"layout__cp": 2}),
    "tile-ulysses": (TILE, {"layout__cp": 2, "layout__context_mode": "ulysses"}),
    "cut": (CUT, {"layout__pp": 2, "model__layers": 9}),
    "window": (WINDOW, {"layout__cp": 2, "model__sliding_window": 128}),
}


@pytest.mark.parametrize(
    "name", [full(name) if name in ("loss-dp", "tile-ulysses") else name for name in BUGS]
)
def test_what_a_large_run_alone_does_is_checked(ranks: Ranks, name: str) -> None:
    bug, flags = BUGS[name]
    spec = large(**flags)
    found = ranks.run(spec.layout, verify_with, spec, bug)[0]
    assert found["narrowed"] is not None and not found["equal"]


@pytest.mark.parametrize("name", ["loss-tp", "tile-ring", "block"])
def test_a_run_that_is_not_narrowed_has_small_tiles_too(ranks: Ranks, name: str) -> None:
    bug, flags = BUGS[name]
    spec = large(
        **flags, model__hidden=32, model__ffn=40, model__vocab_size=61, data__seq_len=16,
        train__batch_tokens=16 * 8,
    )  # fmt: skip
    found = ranks.run(spec.layout, verify_with, spec, bug)[0]
    assert found["narrowed"] is None and not found["equal"]


EQUAL: dict[str, dict[str, object]] = {
    "kv-heads": {"model__preset": "llama3-8b", "layout__tp": 8},  # one key-value head for each tensor rank
    "cut-by-hand": {
        "model__layers": 9, "layout__stages": "2,7", "layout__pp": 2, "layout__dp": 2, "layout__zero": 3,
    },
    "window": {"model__sliding_window": 128, "layout__cp": 4, "layout__dp": 2, "layout__zero": 3},
    "uneven": {"model__preset": "moe-small", "layout__dp": 3, "layout__zero": 3, "layout__tp": 2},
    "experts": {
        "model__preset": "moe-small", "model__moe__capacity_factor": 1.5, "model__moe__dense_first": 3,
        "layout__dp": 2, "layout__tp": 2, "layout__ep": 4, "layout__pp": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [full(name) if name in ("kv-heads", "window", "experts") else name for name in EQUAL]
)
def test_large_runs_equal_one_device(ranks: Ranks, name: str) -> None:
    flags = EQUAL[name]
    spec = large(train__batch_tokens=4096 * 2 * int(str(flags.get("layout__dp", 1))), **flags)
    found = ranks.run(spec.layout, verify_with, spec, None)[0]
    assert found["narrowed"] is not None
    assert found["equal"], found["worst_name"]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_any_large_run_equals_one_device(ranks: Ranks, seed: int) -> None:
    spec = draw(seed, RANKS)
    found = ranks.run(spec.layout, verify_with, spec, None)[0]
    assert found["narrowed"] is not None
    assert found["equal"], found["worst_name"]


# What the copy keeps -------------------------------------------------------------------------------------


def draw(seed: int, most_ranks: int | None = None) -> RunSpec:
    """A large run of any kind on a layout of any kind, that the rules accept."""
    chance = random.Random(seed)
    while True:
        try:
            spec = load(None, [(key, str(value)) for key, value in _flags(chance.choice).items()])
        except UserError:  # most draws are no layout: they are drawn again
            continue
        if narrow(spec)[1] is not None and (most_ranks is None or spec.layout.world_size <= most_ranks):
            return spec


def _flags(one: Callable[[Sequence[Any]], Any]) -> dict[str, object]:
    presets = ["small", "gpt3-175b", "llama3-8b", "llama3-405b", "qwen3-32b", "deepseek-v3", "mixtral-8x7b"]
    preset, length = one([*presets, "moe-small"]), one([384, 510, 1000, 2048, 4096])
    flags: dict[str, object] = {
        "model.preset": preset, "data.seq_len": length, "data.corpus": "synthetic",
        "model.layers": one([2, 5, 9, 13, 32, 61]), "model.vocab_size": one([8192, 50257, 8191]),
        "layout.dp": one([1, 1, 2, 3, 4, 8]), "layout.zero": one([0, 1, 2, 3]),
        "layout.tp": one([1, 2, 3, 4, 8]), "layout.cp": one([1, 1, 2, 3, 4, 8]),
        "layout.pp": one([1, 1, 2, 3, 4, 6]),
        "layout.context_mode": one(["ring", "ulysses", "gather", "ring+ulysses"]),
        "layout.schedule": one(NAMES), "layout.stages": one(["even", "balanced"]),
        "layout.sequence_parallel": one(["true", "false"]), "layout.micro_batch": one([1, 2, 5]),
    }  # fmt: skip
    if preset not in ("gpt3-175b", "deepseek-v3"):
        flags["model.sliding_window"] = one(["none", 100, 300, length - 1, 8192])
    if preset in ("deepseek-v3", "mixtral-8x7b", "moe-small"):
        flags |= {
            "layout.ep": one([1, 2, 4]), "layout.etp": one([1, 1, 2]), "model.moe.every": one([1, 2, 4]),
            "model.moe.dense_first": one([0, 1, 3]), "model.moe.capacity_factor": one(["none", 0.5, 1.5]),
        }  # fmt: skip
    sequences = int(str(flags["layout.dp"])) * int(str(flags["layout.micro_batch"])) * one([1, 3, 7, 16])
    return flags | {"train.batch_tokens": length * sequences}


def order_of(cut: Sequence[int]) -> list[int]:
    """Place of each stage's number of blocks among the different ones that are not 0."""
    kinds = sorted({*cut} - {0})
    return [kinds.index(blocks) if blocks else -1 for blocks in cut]


def cut_of(spec: RunSpec) -> list[int]:
    return [len(stage.blocks) for stage in stages(spec.model, spec.layout, spec.data.seq_len)]


@pytest.mark.parametrize("seed", range(200))
def test_a_narrowed_copy_keeps_what_breaks(seed: int) -> None:
    spec = draw(seed)
    small, _ = narrow(spec)
    old, new, layout = spec.model, small.model, spec.layout
    tp, cp, ranks_of_rows = layout.tp, layout.cp, layout.shard_ranks
    assert new.parameters * small.train.batch_tokens <= 30 * MOST_WORK  # large worlds have large batches
    for was, now in (  # several stay several, and one stays one
        (old.layers, new.layers),
        (min(cut_of(spec)), min(cut_of(small))) if layout.pp * layout.chunks <= 4 else (1, 1),
        (spec.micro_batch, small.micro_batch),
        (spec.microbatches, small.microbatches),
        (layout.local_kv_heads(old.kv_heads), layout.local_kv_heads(new.kv_heads)),
        (layout.local_kv_heads(old.kv_heads) // layout.ulysses(old.kv_heads),
         layout.local_kv_heads(new.kv_heads) // layout.ulysses(new.kv_heads)),
    ):  # fmt: skip
        assert min(was, 2) == min(now, 2) and now <= was
    for was, now, unit in (  # remainders
        (spec.data.seq_len, small.data.seq_len, 2 * cp * tp),
        (old.hidden, new.hidden, ranks_of_rows),
        (old.ffn, new.ffn, tp * ranks_of_rows),
        (old.vocab_size, new.vocab_size, 64),
        (old.vocab_size, new.vocab_size, tp),
        (spec.microbatches, small.microbatches, layout.pp),
    ):
        assert was % unit == now % unit
    # The mesh is made for the run's heads.
    assert layout.kv_copies(old.kv_heads) == small.layout.kv_copies(new.kv_heads)
    assert layout.ulysses(old.kv_heads) == small.layout.ulysses(new.kv_heads)
    assert old.heads // old.kv_heads == new.heads // new.kv_heads
    assert order_of(cut_of(spec)) == order_of(cut_of(small))
    kinds = [{each.has_experts(layer) for layer in range(each.layers)} for each in (old, new)]
    assert kinds[0] == kinds[1]
    if old.sliding_window is None or old.sliding_window >= spec.data.seq_len:
        assert new.sliding_window == old.sliding_window
    else:
        assert new.sliding_window is not None and new.sliding_window < small.data.seq_len
    if old.moe is not None and new.moe is not None:
        if (of_rows := layout.expert_data_ranks) <= 64:
            assert old.hidden % of_rows == new.hidden % of_rows
            assert old.moe.ffn % (layout.etp * of_rows) == new.moe.ffn % (layout.etp * of_rows)
        assert min(2, old.moe.experts // layout.ep) == min(2, new.moe.experts // layout.ep)
        if old.moe.capacity_factor is not None:  # no expert has room for all, and most have none to spare
            assert new.moe.capacity_factor is not None and new.moe.capacity_factor <= 1.0


@pytest.mark.parametrize("narrowed", [True, False])
@pytest.mark.parametrize("seed", range(100))
def test_a_step_has_several_tiles_of_each_kind(seed: int, narrowed: bool) -> None:
    spec = narrow(draw(seed))[0] if narrowed else draw_small(seed)
    model, layout, length = spec.model, spec.layout, spec.data.seq_len
    kv_heads, exchanging = layout.local_kv_heads(model.kv_heads), layout.ulysses(model.kv_heads)
    usual = Tiling()
    with tiled(small_tiles(spec)):
        tokens = spec.micro_batch * length // layout.cp
        for cpu, by_kernel in ((True, False), (False, False), (False, True)):
            chunk, piece = loss_rows(-(-model.vocab_size // layout.tp), cpu, by_kernel)
            assert -(-tokens // chunk) >= 2 and (-(-chunk // piece) >= 2 or chunk == 1 or by_kernel)
        assert -(-length // query_rows(spec.micro_batch, model.heads // layout.tp, length, 8)) >= 2
        if layout.cp > 1 and exchanging in (1, layout.cp):
            places = torch.arange(length) if exchanging > 1 else zigzag(length, layout.cp, layout.cp - 1)
            seen = attention_intervals(None, length, None, places, spec.micro_batch, "cpu")
            heads = kv_heads // exchanging
            tiles = make_part(seen, places, heads, model.heads // model.kv_heads).tiles
            assert len({tile.rows.start for tile in tiles}) >= 2
            if exchanging == 1:  # many parts: a tile more takes long
                assert len({tile.columns.start for tile in tiles}) == 2
            assert len({tile.columns.start for tile in tiles if tile.rows.stop == len(places)}) >= 2
            assert len({tile.groups.start for tile in tiles}) >= min(2, spec.micro_batch * heads)
        sizes = tiling()
        ranks_of_rows, every = layout.tp * layout.shard_ranks, parameters(model)
        largest = max(each.size for unit in every.values() for each in unit)
        assert 2 * sizes.init_elements <= largest // ranks_of_rows
        assert 2 * sizes.norm_row <= sum(each.size for each in every["blocks.0"]) // ranks_of_rows
    assert all(getattr(sizes, field) <= getattr(usual, field) for field in vars(usual))
    assert tiling() == usual


def draw_small(seed: int) -> RunSpec:
    """A run that is checked as it is."""
    spec, _ = layouts.draw(seed)
    return subject.exact(spec, 1)


@pytest.mark.parametrize("flags", [{}, {"layout__dp": 2}, {"layout__cp": 4, "model__sliding_window": 300}])
def test_documents_end_within_samples_and_windows_cut(flags: dict[str, object]) -> None:
    """In the first three steps, for some query of each."""
    spec = narrow(subject.exact(large(**flags), 3))[0]
    loader = Loader(open_corpus(spec), spec, 0, 1)
    documents = torch.cat([loader.step(step).documents for step in range(3)])
    loader.close()
    assert bool((documents[:, 1:] != documents[:, :-1]).any())
    window, length = spec.model.sliding_window, spec.data.seq_len
    whole, cut = (
        attention_intervals(documents, length, size, torch.arange(length), len(documents), "cpu").first
        for size in (None, window)
    )
    assert bool((whole != cut).any()) == (window is not None)
