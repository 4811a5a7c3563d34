"""A dry run holds and sends what formulas say, and what real ranks do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple
from hashlib import sha256
from typing import Any

import pytest
import torch

from allocations import measure
from layouts import KINDS, draw
from meshwright import api
from meshwright.cli.main import main
from meshwright.comm.mesh import Mesh
from meshwright.dryrun import memory_tracker
from meshwright.dryrun.memory_tracker import PLAIN, FakeMemory
from meshwright.dryrun.rank_step import ACTIVATIONS, MESSAGES, STATES, rehearse, step_of
from meshwright.kernels import attention_cpu
from meshwright.kernels.attention_cpu import BODIES
from meshwright.planner.memory.in_flight import peak_activations
from meshwright.planner.memory.states import checkpoint_bytes, states
from meshwright.planner.traffic.messages import traffic
from meshwright.spec import RunSpec, UserError, load
from meshwright.train import state
from meshwright.train.step import Trainer
from ranks import Ranks
from small import after_a_step, first_batches, spec_of

CPU = torch.device("cpu")
BASE = {
    "model.layers": 3, "model.hidden": 64, "model.ffn": 192, "model.heads": 8, "model.kv_heads": 4,
    "data.corpus": "synthetic", "data.seq_len": 256, "train.batch_tokens": 256 * 8,
    "layout.micro_batch": 2, "precision.compute": "bf16",
}  # fmt: skip


# The counter --------------------------------------------------------------------------------------------


def test_storages_count_while_anything_holds_them() -> None:
    memory = FakeMemory(torch.device("cpu", 0))
    with memory:
        x = torch.zeros(100, 10, device=memory.device)
        assert memory.total == 4000
        row = x[3]
        del x
        assert memory.total == memory.peak == 4000
        row.untyped_storage().resize_(0)
        memory.resized(row)
        assert memory.total == 0
        weight = torch.zeros(10, 10, device=memory.device, requires_grad=True)
        y = torch.ones(5, 10, device=memory.device) @ weight
        squared = y.square()
        del y  # autograd saved it
        assert memory.total == 400 + 200 + 200 + 200
        squared.sum().backward()
        assert weight.grad is not None
        del squared
        assert memory.total == 400 + 400
        host = torch.arange(7)
        assert host.sum() == 21 and memory.total == 800
    assert memory.peak == 4000


def test_what_a_storage_is_for_may_change() -> None:
    memory = FakeMemory(torch.device("cpu", 0))
    with memory:
        x = torch.zeros(10, device=memory.device)
        memory.mark(x, "early")
        since = memory.now
        y, z = torch.zeros(20, device=memory.device), torch.zeros(30, device=memory.device)
        memory.settle(since, "late")
        del y
        memory.becomes(x.untyped_storage(), "other")
        assert +memory.kinds == {"other": 40, "late": 120}
        assert memory.most["early"] == 40 and memory.most["late"] == 200
        assert sorted(held.size for held in memory.at_peak()) == [40, 80, 120]
        del z
        assert {held.kind: held.size for held in memory.at_peak()} == {"early": 40, "late": 120}


@pytest.mark.parametrize(("queries", "keys"), [(500, 1500), (1025, 1025), (64, 64)])
def test_the_last_blocks_of_attention_take_most(
    queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake operator runs these alone, and its peak is that of all."""

    def peaks() -> list[int]:
        memory, found = FakeMemory(torch.device("cpu", 0), BODIES), dict[Any, int]()
        monkeypatch.setattr(memory_tracker, "_peaks_inside", found)
        with memory:
            shape = {"dtype": torch.bfloat16, "device": memory.device, "requires_grad": True}
            q, k = torch.zeros(2, queries, 8, 8, **shape), torch.zeros(2, keys, 4, 8, **shape)
            mask = torch.zeros(2, 1, queries, keys, **shape).detach() if keys > queries else None
            attention_cpu.blocked_attention(q, k, k, mask).sum().backward()
        return list(found.values())

    last = peaks()
    monkeypatch.setattr(attention_cpu, "FakeTensor", type(None))
    assert len(last) == 2 and last == peaks()


# Formulas -----------------------------------------------------------------------------------------------


QUICK = sorted(range(64), key=lambda seed: sha256(f"dry run {seed}".encode()).digest())[:4]
QUICK.append(23)  # experts in a pipeline with deferred gradients of weights


def seeds(count: int, quick: Collection[int]) -> list[Any]:
    """So many seeds as parameters, with the marker `full` but for those that are `quick`."""
    return [pytest.param(seed, marks=() if seed in quick else pytest.mark.full) for seed in range(count)]


@pytest.mark.parametrize("seed", seeds(64, QUICK))
def test_formulas_hold_on_random_layouts(seed: int) -> None:
    spec, rank = draw(seed)
    place = rank * spec.layout.pp // spec.layout.world_size
    found = rehearse(spec, rank, CPU)
    planned = states(spec, place)
    assert {kind: found.most[kind] for kind in STATES} == dict(zip(STATES, astuple(planned), strict=True))
    assert found.states == planned.total
    assert found.most[ACTIVATIONS] == pytest.approx(peak_activations(spec, place), rel=0.03)
    assert found.wire == pytest.approx(traffic(spec, place), rel=1e-12)
    assert sum(found.by_component.values()) == found.peak
    assert sum(sum(held.values()) for held in found.by_module.values()) == found.peak


@pytest.mark.parametrize("seed", seeds(6, (1, 2, 3)))
def test_formulas_hold_of_weights_in_bf16(seed: int) -> None:
    kind = ("adamw", "lion", "muon")[seed % 3]
    bf16 = {"precision__compute": "bf16", "precision__master": "bf16", "train__optimiser": kind}
    spec, rank = draw(seed, **bf16)
    place = rank * spec.layout.pp // spec.layout.world_size
    found, planned = rehearse(spec, rank, CPU), states(spec, place)
    assert {kind: found.most[kind] for kind in STATES} == dict(zip(STATES, astuple(planned), strict=True))
    sent = traffic(spec, place)
    if kind == "muon":  # ranks of a stage are dealt unequal parts
        found.wire.pop(("shard", "all_to_all"), None), sent.pop(("shard", "all_to_all"), None)
    assert found.wire == pytest.approx(sent, rel=1e-12)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_formulas_hold_of_delayed_scaling(recipe: str) -> None:
    flags = {"model.heads": 4, "model.head_dim": 16, "model.hidden": 64, "model.ffn": 64}
    spec = spec_of(BASE | flags, layout__pp=2, precision__compute=recipe, precision__amax_history=5)
    found, planned = rehearse(spec, 1, CPU), states(spec, 1)
    assert {kind: found.most[kind] for kind in STATES} == dict(zip(STATES, astuple(planned), strict=True))
    assert planned.scaling > 0


@pytest.mark.parametrize("seed", seeds(6, range(len(KINDS))))
def test_formulas_hold_of_a_moving_average(seed: int) -> None:
    spec, rank = draw(seed, train__ema=0.99)
    place = rank * spec.layout.pp // spec.layout.world_size
    found, planned = rehearse(spec, rank, CPU), states(spec, place)
    assert {kind: found.most[kind] for kind in STATES} == dict(zip(STATES, astuple(planned), strict=True))
    without, _ = draw(seed)
    assert planned.optimiser > states(without, place).optimiser
    assert found.wire == pytest.approx(traffic(spec, place), rel=1e-12)


@pytest.mark.parametrize("seed", seeds(36, (2, 18, 35)))
def test_formulas_hold_of_further_tokens(seed: int) -> None:
    if seed % len(KINDS) == [*KINDS].index("gpt"):
        pytest.skip("learned positions do not go with further tokens")
    spec, rank = draw(seed, model__mtp_num_layers=1)
    place = rank * spec.layout.pp // spec.layout.world_size
    found, planned = rehearse(spec, rank, CPU), states(spec, place)
    assert {kind: found.most[kind] for kind in STATES} == dict(zip(STATES, astuple(planned), strict=True))
    assert found.most[ACTIVATIONS] == pytest.approx(peak_activations(spec, place), rel=0.03)
    assert found.wire == pytest.approx(traffic(spec, place), rel=1e-12)


def islands_of(seed: int) -> tuple[RunSpec, int]:
    """A drawn run with islands, of which two in three stream fragments, and one of its ranks."""
    outer: dict[str, object] = {"outer__every": 4, "layout__replicate": 2, "precision__compute": "bf16"}
    if seed % 3:
        outer |= {"outer__fragments": 2, "outer__delay": 1 + 2 * (seed % 3 - 1)}
    return draw(seed, **outer, **COMPRESSED[seed // 9])


COMPRESSED: list[dict[str, object]] = [
    {},
    {"outer__format": "int4", "outer__error_decay": 0.9},
    {"outer__format": "bf16"},
    {"outer__top_k": 0.1, "outer__format": "fp4"},
]


@pytest.mark.parametrize("seed", seeds(36, (0, 13, 35)))
def test_formulas_hold_of_islands(seed: int) -> None:
    spec, rank = islands_of(seed)
    place = rank // spec.layout.strides["pp"] % spec.layout.pp
    found, planned = rehearse(spec, rank, CPU), states(spec, place)
    assert {kind: found.most[kind] for kind in STATES} == dict(zip(STATES, astuple(planned), strict=True))
    number = step_of(spec, rank)
    assert found.wire == pytest.approx(traffic(spec, place, number=number), rel=1e-12)
    assert found.wire["replicate", "scalars"] == 8


@pytest.mark.parametrize(("zero", "saved"), [(0, 4), (1, 2), (2, 2), (3, 2)])
def test_weights_in_bf16_save_their_masters(zero: int, saved: int) -> None:
    """Bytes of stored weights and of the copy that computes, of a parameter on one rank or on all."""
    found = []
    for master in ("fp32", "bf16"):
        spec = spec_of(BASE, layout__dp=4, layout__zero=zero, precision__master=master)
        held = states(spec, 0)
        found.append(held.parameters + held.masters)
    of_rank = 1 if zero == 0 else 4
    assert (found[0] - found[1]) * of_rank / spec.model.parameters == pytest.approx(saved, rel=0.02)


@pytest.mark.parametrize("seed", seeds(12, (0, 2)))
def test_moments_in_8_bits_take_what_is_planned(seed: int) -> None:
    rounded = {"precision__compute": "bf16", "precision__master": "bf16"} if seed % 3 == 2 else {}
    flags: dict[str, object] = {"train__optimiser": "adamw8bit", **rounded}
    spec, rank = draw(seed, **flags)
    place = rank * spec.layout.pp // spec.layout.world_size
    assert rehearse(spec, rank, CPU).most["optimiser"] == states(spec, place).optimiser


def test_blocks_are_recomputed_whichever_microbatch_came_before() -> None:
    """Ulysses' sight is one of each microbatch, and a backward of one follows the forward of another."""
    layout = {"cp": 2, "context_mode": "ring+ulysses", "pp": 2, "schedule": "interleaved", "virtual": 2}
    flags = {f"layout.{key}": value for key, value in layout.items()}
    spec = spec_of(BASE | flags | {"model.layers": 4}, recompute__policy="selective")
    found = rehearse(spec, 0, CPU)
    assert found.most[ACTIVATIONS] == pytest.approx(peak_activations(spec, 0), rel=0.03)


def test_a_rank_may_have_one_expert() -> None:
    flags = [("model.preset", "moe-tiny"), ("layout.dp", "8"), ("layout.ep", "8"), ("data.seq_len", "64")]
    spec = load(None, [*flags, ("train.batch_tokens", "512")])
    assert rehearse(spec, 3, CPU).states == states(spec, 0).total


@pytest.mark.parametrize(
    ("layout", "capacity"),
    [
        ({"dp": 2, "ep": 2}, 0.5),
        ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, 0.5),
        ({"dp": 2, "ep": 2, "pp": 2}, 0.5),
        ({"dp": 2, "ep": 2}, 2.0),
    ],
    ids=str,
)
def test_formulas_hold_of_dropped_tokens(layout: dict[str, int], capacity: float) -> None:
    flags = {f"layout.{axis}": size for axis, size in layout.items()}
    moe = {"model.moe.experts": 8, "model.moe.top_k": 2, "model.moe.ffn": 64}
    spec = spec_of(BASE | moe | flags, model__moe__capacity_factor=capacity)
    found = rehearse(spec, 0, CPU)
    assert found.most[ACTIVATIONS] == pytest.approx(peak_activations(spec, 0), rel=0.03)
    assert found.wire == pytest.approx(traffic(spec, 0), rel=1e-12)
    without = spec_of(BASE | moe | flags)
    sent = [traffic(each, 0)["expert", "all_to_all"] for each in (spec, without)]
    if capacity < 1:
        assert sent[0] < 0.55 * sent[1] and peak_activations(spec, 0) < 0.9 * peak_activations(without, 0)
    else:
        assert sent[0] == sent[1]


# Real ranks ---------------------------------------------------------------------------------------------


def one_step(mesh: Mesh, spec: RunSpec) -> dict[str, Any]:
    trainer = after_a_step(spec, mesh)
    sent = dict(mesh.wire.bytes)
    return {"wire": sent, "held": trainer.states.memory(), "moments": trainer.optimiser.memory()["optimiser"]}


@pytest.mark.parametrize(
    "layout",
    [
        {"layout__dp": 2, "layout__tp": 2, "layout__zero": 2},
        {"layout__dp": 2, "layout__cp": 2, "layout__zero": 1, "precision__compute": "fp32"},
        {"layout__pp": 2, "layout__tp": 2, "layout__schedule": "zb-v", "recompute__policy": "selective"},
    ],
    ids=str,
)
def test_a_dry_run_holds_and_sends_what_ranks_do(ranks: Ranks, layout: dict[str, object]) -> None:
    spec = spec_of(BASE, **layout)
    found = ranks.run(spec.layout, one_step, spec)
    for rank in (0, spec.layout.world_size - 1):
        real, dry = found[rank], rehearse(spec, rank, CPU)
        assert dry.wire == pytest.approx(real["wire"], rel=1e-14)
        held, most = real["held"], dry.most
        assert most["parameters"] + most["masters"] == held["parameters"] + held["compute copies"]
        assert 0 <= most["optimiser"] - real["moments"] < 200  # Adam's step counts
        assert most["gradients"] >= held["gradients"] > 0


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("layout", [{}, {"layout__tp": 2}, {"layout__cp": 2}], ids=str)
def test_a_dry_run_allocates_what_ranks_do(ranks: Ranks, layout: dict[str, object], policy: str) -> None:
    """Memory of planning on the host is not counted by the dry run."""
    spec = spec_of(BASE, **layout, recompute__policy=policy, train__batch_tokens=256 * 4)
    dry = rehearse(spec, 0, CPU)
    at_peak = sum(dry.by_component[kind] for kind in (ACTIVATIONS, MESSAGES, PLAIN))
    host = 8 * 2 * (256 + 128) if spec.layout.cp > 1 else 0
    for kept, peak in ranks.run(spec.layout, measure, spec):
        assert dry.most[ACTIVATIONS] + host == pytest.approx(kept, rel=0.01)
        assert at_peak == pytest.approx(peak, rel=0.02)


def saved_bytes(mesh: Mesh, spec: RunSpec) -> dict[str, int]:
    """Bytes of each whole tensor of a checkpoint that this rank has a part of, without counts of steps."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    (batch,) = first_batches(spec, mesh, 1)
    trainer.step(batch, 1)
    found = state.tensors(trainer).items()
    return {
        name: tensor.numel() * tensor.element_size()
        for name, tensor in found
        if tensor.dim() and tensor.numel() > 1
    }


@pytest.mark.parametrize(
    "flags",
    [
        {"layout__dp": 2, "layout__zero": 2},
        {"layout__dp": 2, "layout__zero": 1, "layout__replicate": 2, "outer__every": 3},
        {"layout__pp": 2, "layout__replicate": 2, "outer__every": 4, "train__optimiser": "muon"},
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_has_as_many_bytes_as_planned(ranks: Ranks, flags: dict[str, object]) -> None:
    spec = spec_of(BASE, **flags)
    whole: dict[str, int] = {}
    for saved in ranks.run(spec.layout, saved_bytes, spec):
        whole |= saved
    assert sum(whole.values()) == checkpoint_bytes(spec)


# What users ask -----------------------------------------------------------------------------------------


def test_a_world_of_a_thousand_ranks_takes_one_process() -> None:
    flags = {
        "layout.dp": 64,
        "layout.tp": 4,
        "layout.pp": 4,
        "layout.schedule": "1f1b",
        "layout.zero": 3,
        "train.batch_tokens": 256 * 256,
    }
    spec = spec_of(BASE | {"model.layers": 8, "layout.micro_batch": 1} | flags)
    found = api.dryrun(spec, world=1024, rank=5, all_stages=True)
    assert found["world_size"] == 1024 and [row["rank"] for row in found["ranks"]] == [5, 261, 517, 773]
    assert found["ranks"][0]["units"] == ["embed", "blocks.0", "blocks.1"]
    held = [row["most"]["activations"] for row in found["ranks"]]
    assert held[0] > held[1] > held[2]  # 1F1B has the most under way at the start
    modules = found["ranks"][0]["modules"]
    assert modules["blocks.0"]["masters"] == modules["blocks.1"]["masters"] > 0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"world": 8}, ["--world: is 8", "has 2 ranks", "try --world 2 or --layout.dp 4"]),
        ({"world": 3}, ["--world: is 3", "has 2 ranks", "--layout.dp 2 with --world 4"]),
        ({"world": 12}, ["--layout.dp 4 with --world 8"]),  # the batch is 8 sequences, a microbatch 2
        ({"rank": 2}, ["--rank: is 2", "2 ranks, counted from 0; give at most 1"]),
        ({"device": "tpu"}, ["--device", "'tpu'", "cpu"]),
    ],
)
def test_what_cannot_be_asked_gets_a_sentence(asked: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        api.dryrun(spec_of(BASE, layout__tp=2), **asked)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("flags", [pytest.param([], marks=pytest.mark.full), ["--all-stages"]], ids=str)
def test_what_is_printed_is_within_100_columns(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    layout = {"dp": 2, "replicate": 2, "cp": 2, "tp": 4, "pp": 2, "ep": 4, "zero": 2, "virtual": 8}
    words = [word for key, size in layout.items() for word in (f"--layout.{key}", str(size))]
    words += ["--layout.schedule", "interleaved", "--layout.context_mode", "ring+ulysses"]
    words += ["--model.preset", "moe-tiny", "--model.layers", "14", "--data.seq_len", "64"]
    assert main(["dryrun", *words, "--train.batch_tokens", "512", *flags]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.parametrize("world", [1, 3, 12, 1000])
def test_the_world_that_is_suggested_can_be(world: int) -> None:
    spec = spec_of(BASE, layout__tp=2, layout__zero=3, layout__dp=4)
    with pytest.raises(UserError) as error:
        api.dryrun(spec, world=world)
    words = str(error.value).partition("or --layout.dp ")[2].split()
    suggested = spec_of(BASE, layout__tp=2, layout__zero=3, layout__dp=int(words[0]))
    assert suggested.layout.world_size == int(words[-1] if len(words) > 1 else world)
