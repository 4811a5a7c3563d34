"""Votes over what ranks hold alike: every flipped bit is found, its rank named, and no alarm is false."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import expert_cases
import layout_cases
import pipeline_cases
import small
from covering import marked
from meshwright.checkpoint.directory import latest_step
from meshwright.comm.checksum import checksum
from meshwright.comm.mesh import Mesh
from meshwright.islands.outer import Outer
from meshwright.spec import RunSpec
from meshwright.spec.errors import CorruptionError
from meshwright.train.callbacks import Observers
from meshwright.train.guard.nonfinite import bad_state, buffers, locate
from meshwright.train.guard.replay import replay, replicas
from meshwright.train.guard.vote import Divergence, Vote
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult
from ranks import Ranks
from training_runs import EXPERTS, Notes, spec_of


def flip(flat: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of an element of a flat fp32 or fp64 tensor."""
    bits = flat.view({4: torch.int32, 8: torch.int64}[flat.element_size()])
    bits[element] ^= torch.tensor(1, dtype=bits.dtype) << bit  # the last is the sign


def test_every_single_bit_changes_a_checksum() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, width in ((torch.float32, 32), (torch.float64, 64)):
        flat = torch.randn(70_001, dtype=dtype, generator=generator)
        whole = int(checksum(flat))
        for element in (0, 1, 65_535, 65_536, 70_000):
            for bit in range(width):
                flip(flat, element, bit)
                assert int(checksum(flat)) != whole
                flip(flat, element, bit)
        assert int(checksum(torch.cat([flat[:1], flat])[1:])) == whole  # not aligned to 8 bytes
        flat[[3, 70_000]] = flat[[70_000, 3]]
        assert int(checksum(flat)) != whole
    assert int(checksum(torch.zeros(0))) == 0


def flipped(
    mesh: Mesh, spec: RunSpec, out: Path, rank: int, name: str
) -> tuple[str, list[dict[str, Any]], int]:
    """The error of a run in which a bit of `name` flips on `rank`, the events, and the last step.

    A weight's bit flips a step before the vote; a moment's would have changed the weight by then.
    """
    flip_step = 4 if name.startswith("exp_avg") else 3
    notes = Notes()
    run = open_run(spec, mesh, out, Observers([notes]))
    step = run.trainer.step

    def spoil(*arguments: Any) -> StepResult:
        result = step(*arguments)
        if run.done + 1 == flip_step and mesh.rank == rank:
            for prefix, buffer in buffers(run.trainer):
                for slot in buffer.slots:
                    if prefix + slot.key == name:
                        flip(buffer.flat, slot.start, 20)
        return result

    run.trainer.step = spoil  # type: ignore[method-assign]
    try:
        run.execute(None)
    except CorruptionError as error:
        return str(error), [fields for kind, fields in notes.events if kind == "divergence"], run.done
    return "", [], run.done


WEIGHT, MOMENT, NORM = (
    "blocks.1.mlp.up.weight",
    "exp_avg of blocks.1.attn.q.weight",
    "blocks.1.mlp_norm.weight",
)
FLIPS: list[dict[str, object]] = [
    {"name": name, "rank": rank, "named": named, "dp": dp} | more
    for name in (WEIGHT, MOMENT)
    for rank, named, dp, more in (
        (1, [0, 1], 2, {}),
        (2, [2], 3, {}),
        (3, [3], 4, {}),
        (0, [0], 4, {}),
        (3, [1, 3], 2, {"replicate": 2, "zero": 3}),
        (5, [5], 2, {"replicate": 3, "zero": 3}),
        (2, [0, 2], 2, {"tp": 2}),
        (4, [4], 4, {"tp": 2}),
        (7, [7], 4, {"pp": 2, "order": "replicate-dp-pp-tp"}),
    )
] + [
    {"name": NORM, "rank": 1, "named": [0, 1], "tp": 2},
    {"name": NORM, "rank": 2, "named": [2], "tp": 4},
    {"name": NORM, "rank": 2, "named": [2], "dp": 2, "tp": 2},  # both of its comparisons name it
    {"name": "blocks.0.attn.k.weight", "rank": 3, "named": [2, 3], "tp": 4, "sequence_parallel": "false"},
    {"name": "embed.weight", "rank": 0, "named": [0, 1], "pp": 2, "tied": "true"},
    {"name": "blocks.2.mlp.experts.down", "rank": 2, "named": [0, 2], "dp": 4, "ep": 2, "experts": True},
]  # fmt: skip
QUICK = [case for number, case in enumerate(FLIPS) if number in (2, 6, 13) or number >= 20]


@pytest.mark.parametrize("case", marked(FLIPS, QUICK))
def test_a_flipped_bit_is_found_at_the_next_vote_and_its_rank_named(
    ranks: Ranks, corpus: Path, tmp_path: Path, case: dict[str, object]
) -> None:
    axes = {
        key: value for key, value in case.items() if key not in ("name", "rank", "named", "tied", "experts")
    }
    flags = {f"layout__{key}": value for key, value in axes.items()}
    flags |= {"model__tied": case.get("tied", "false")} | (EXPERTS if case.get("experts") else {})
    flags |= {"train__batch_tokens": 24 * 16, "train__steps": 9, "recovery__vote_every": 2}
    spec = spec_of(corpus, **flags, checkpoint__every=2, checkpoint__asynchronous="false")
    name, named = str(case["name"]), case["named"]
    for error, events, step in ranks.run(spec.layout, flipped, spec, tmp_path, case["rank"], name):
        assert step == 4 and error.startswith(f"after step 4 {name} ")
        (event,) = events
        assert (event["tensor"], event["ranks"]) == (name, named)
        assert event["certain"] == (len(event["ranks"]) == 1)
        assert len(event["hosts"]) == len(event["ranks"])
    assert latest_step(tmp_path / "checkpoints") == 2


def test_a_corrupted_replica_is_never_saved(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """The vote before a save finds it, however rarely steps vote."""
    spec = spec_of(corpus, train__steps=9, layout__dp=2, recovery__vote_every=1000, checkpoint__every=2)
    for error, _, step in ranks.run(spec.layout, flipped, spec, tmp_path, 1, WEIGHT):
        assert error and step == 4
    assert latest_step(tmp_path / "checkpoints") == 2


def test_without_votes_it_goes_unseen(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, train__steps=9, layout__dp=2, recovery__vote_every=0, checkpoint__every=2)
    assert ranks.run(spec.layout, flipped, spec, tmp_path, 1, WEIGHT) == [("", [], 9)] * 2


def quiet(mesh: Mesh, spec: RunSpec) -> list[object]:
    """Findings of the guard in a good run of two steps: none."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    batches = small.first_batches(spec, mesh, 2)
    for number, batch in enumerate(batches, start=1):
        scale = trainer.step(batch, number).loss_scale
    found: Divergence | None = Vote(trainer)()
    first = locate(trainer, batches[-1], scale)
    axis = replicas(mesh)
    return [found, bad_state(trainer), first, axis and replay(trainer, batches[-1], axis)]


def good_runs() -> list[Any]:
    """Every layout of the tables of `verify`, some of them in `make test`."""
    tables = {
        "layouts": (layout_cases.BASE, layout_cases.CASES),
        "pipelines": (pipeline_cases.BASE, pipeline_cases.AXES),
        "experts": (expert_cases.BASE, expert_cases.ROUTED),
    }
    found = []
    for table, (base, cases) in tables.items():
        for number, case in enumerate(cases):
            flags = dict(case)
            if table == "layouts":
                flags["train__batch_tokens"] = 3 * int(str(case["layout__dp"])) * 32
            if table == "pipelines":
                flags = {
                    "layout__pp": 2,
                    "train__batch_tokens": 16 * 8,
                    **flags,
                    "model__tied": number % 2 == 0,
                }
            if router := flags.pop("router", None):
                flags["train__batch_tokens"] = 16 * 8
                flags |= expert_cases.ROUTERS[str(router)]
            marks = () if number in (3, 19) else pytest.mark.full
            compute = ("fp32", "bf16", "fp16")[number % 3]
            flags |= {"precision__compute": compute}
            flags |= {"precision__loss_scale": 256} if compute == "fp16" else {}
            found.append(pytest.param(base, flags, id=f"{table}-{number}", marks=marks))
    return found


@pytest.mark.parametrize(("base", "flags"), good_runs())
def test_good_runs_raise_no_alarm(ranks: Ranks, base: dict[str, object], flags: dict[str, object]) -> None:
    flags = {key: str(value).lower() if isinstance(value, bool) else value for key, value in flags.items()}
    spec = small.spec_of({"data.corpus": "synthetic", **base}, **flags)
    for found in ranks.run(spec.layout, quiet, spec, rules="nccl"):
        assert found == [None] * 4


def miscomputed(
    mesh: Mesh, spec: RunSpec, out: Path, rank: int, module: str, steady: bool
) -> tuple[str, list[dict[str, Any]]]:
    """The error of a run in which a rank's product is off, and by another error each time unless `steady`.

    The weight's bit that flips is not the cause: the arithmetic stays wrong after it.
    """
    notes = Notes()
    run = open_run(spec, mesh, out, Observers([notes]))
    step, errors = run.trainer.step, iter(range(1, 10**6))

    def off(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1e-3 * (1 if steady else next(errors))

    def spoil(*arguments: Any) -> StepResult:
        result = step(*arguments)
        if run.done == 1 and mesh.rank == rank:
            flip(run.trainer.states.units[1].stored, 0, 20)
        return result

    if mesh.rank == rank and module:
        run.trainer.decoder.get_submodule(module).register_forward_hook(off)
    run.trainer.step = spoil  # type: ignore[method-assign]
    with pytest.raises(CorruptionError) as raised:
        run.execute(None)
    return str(raised.value), [fields for kind, fields in notes.events if kind == "divergence"]


@pytest.mark.parametrize(
    ("module", "steady", "layout", "told"),
    [
        ("blocks.1.mlp", False, {"dp": 2}, "rank 1 (%) computed the output of blocks.1.mlp in microbatch 0 "),
        ("blocks.1.mlp", True, {"dp": 2}, "ranks 0 (%), 1 (%) computed the output of blocks.1.mlp in microb"),
        ("", True, {"dp": 2}, "both compute the same from the same numbers"),
        (
            "blocks.0.attn", False, {"dp": 2, "replicate": 2, "zero": 3},
            "rank 1 (%) computed the output of blocks.0.attn in microbatch 0 ",
        ),
        ("blocks.1.attn", False, {"dp": 2, "tp": 2}, "rank 1 (%) computed the output of blocks.1.attn in "),
        ("blocks.0.mlp", False, {"dp": 2, "pp": 2}, "rank 1 (%) computed the output of blocks.0.mlp in "),
    ],
)  # fmt: skip
def test_of_two_replicas_the_one_that_computes_wrongly_is_named(
    ranks: Ranks, corpus: Path, tmp_path: Path, module: str, steady: bool, layout: dict[str, int], told: str
) -> None:
    flags = {f"layout__{key}": value for key, value in layout.items()}
    spec = spec_of(corpus, **flags, train__steps=4, recovery__vote_every=2)
    for error, (event,) in ranks.run(spec.layout, miscomputed, spec, tmp_path, 1, module, steady):
        assert told.replace("%", event["hosts"][0]) in error
        assert event["certain"] is False and f"({event['computation']})" in error


def flipped_anchor(
    mesh: Mesh, spec: RunSpec, out: Path, rank: int, prefix: str
) -> tuple[str, list[list[int]]]:
    """The error of a run in which a bit of what islands agreed on flips on `rank` after step 4, and the ranks
    that it names."""
    notes = Notes()
    run = open_run(spec, mesh, out, Observers([notes]))
    step, outer = run.trainer.step, run.trainer.part(Outer)

    def spoil(*arguments: Any) -> StepResult:
        result = step(*arguments)
        if run.done + 1 == 4 and mesh.rank == rank:
            flip(next(flat for found, _, flat in outer.agreed() if found == prefix), 5, 20)
        return result

    run.trainer.step = spoil  # type: ignore[method-assign]
    try:
        run.execute(None)
    except CorruptionError as error:
        return str(error), [fields["ranks"] for kind, fields in notes.events if kind == "divergence"]
    return "", []


@pytest.mark.parametrize("prefix", ["the anchor of ", "the outer momentum of "])
@pytest.mark.parametrize(("islands", "named"), [(2, [0, 1]), (3, [1])])
def test_islands_that_differ_in_what_they_agreed_on_are_found_before_that_is_saved(
    ranks: Ranks, corpus: Path, tmp_path: Path, prefix: str, islands: int, named: list[int]
) -> None:
    flags = {"layout__replicate": islands, "outer__every": 2, "checkpoint__every": 2}
    spec = spec_of(corpus, **flags, train__batch_tokens=96 * islands)
    found = ranks.run(spec.layout, flipped_anchor, spec, tmp_path, 1, prefix)
    for sentence, _ in found:
        assert sentence.startswith(f"after step 4 {prefix}") and "is not saved" in sentence
    assert found[0][1] == [named]
    assert latest_step(spec.checkpoint.folder(tmp_path)) == 2
