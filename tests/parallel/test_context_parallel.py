"""Attention over the context axis equals one device's in all modes; bytes, work and memory are as told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from covering import some
from meshwright.comm.mesh import Mesh
from meshwright.kernels import attention_cpu_kernel
from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.kernels.attention_flash import FLASH
from meshwright.kernels.attention_intervals import attention_intervals
from meshwright.kernels.partial_attention import TILES, make_part
from meshwright.model.attention import attention_mask
from meshwright.parallel import ring_attention as ring
from meshwright.parallel.context_parallel import ContextAttention, share, zigzag
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.spec import Layout, RunSpec
from meshwright.spec.layout import ContextMode, ulysses_ranks
from meshwright.train.step import Trainer
from ranks import Ranks
from small import first_batches, spec_of
from varlen import exact_kernel

HEADS, DIM = 8, 4
CASES: list[tuple[ContextMode, int]] = [
    *product(("ring", "gather", "ulysses", "ring+ulysses"), (1, 2, 4)),
    ("ring", 8),
    ("ring+ulysses", 8),
]
QUICK = [("ring", 4), ("gather", 2), ("ulysses", 2), ("ring+ulysses", 4)]


@dataclass(frozen=True)
class Case:
    """One attention problem, made of its numbers alone, so that every rank makes the same."""

    seed: int
    kv_heads: int
    documents: str = "none"
    window: int | None = None
    batch: int = 2
    length: int = 96
    dtype: torch.dtype = torch.float64
    loud: float = 1.0

    def tensors(self) -> list[Tensor]:
        """q, k, v and the output's gradient of the whole sequence."""
        make = torch.Generator().manual_seed(self.seed)

        def draw(heads: int) -> Tensor:
            return torch.randn(self.batch, self.length, heads, DIM, generator=make, dtype=torch.float64)

        made = [draw(HEADS) * self.loud, draw(self.kv_heads), draw(self.kv_heads), draw(HEADS)]
        return [x.to(self.dtype) for x in made]

    def ids(self) -> Tensor | None:
        """Documents (B, S): none, one for each token, random ones, or some that cross the shards' borders."""
        if self.documents == "none":
            return None
        shape = (self.batch, self.length)
        make = torch.Generator().manual_seed(self.seed + 1)
        if self.documents == "tokens":
            return torch.arange(self.length).expand(shape)
        if self.documents == "crossing":  # each border of a shard lies within a document, of another length
            places = torch.arange(self.length)
            return torch.stack([(places + 3 + row) // (7 + 4 * row) for row in range(self.batch)])
        chance = float(torch.rand((), generator=make)) ** 3
        return (torch.rand(shape, generator=make) < chance).cumsum(1)


@dataclass(frozen=True)
class Group:
    """Problems of as many key-value heads, for which the pool makes the mesh; ranks take them in one call."""

    kv_heads: int
    cases: tuple[Case, ...]


def groups(cases: Sequence[Case]) -> list[Group]:
    """The cases by their key-value heads."""
    kinds = sorted({case.kv_heads for case in cases})
    return [Group(heads, tuple(case for case in cases if case.kv_heads == heads)) for heads in kinds]


@cache  # the modes and sizes have their cases in common
def one_device(case: Case, compute: torch.dtype) -> list[Tensor]:
    """out and the gradients of q, k, v, of the whole sequence, for inputs rounded to the case's format."""
    *inputs, grad = (x.to(compute) for x in case.tensors())
    inputs = [x.requires_grad_() for x in inputs]
    mask = attention_mask(case.length, case.length, case.window, case.ids(), like=inputs[0])
    out = blocked_attention(*inputs, mask)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def sharded(mesh: Mesh, attention: ContextAttention, case: Case) -> list[Tensor]:
    """The rank's own tokens' part of the result."""
    axis = mesh.context
    *inputs, grad = (share(x, axis) for x in case.tensors())
    inputs = [x.clone().requires_grad_() for x in inputs]
    at = zigzag(case.length, axis.size, axis.rank)
    seen = attention_intervals(case.ids(), case.length, case.window, at, case.batch, "cpu")
    out = attention(*inputs, attention.mask(seen))
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def worst(found: list[Tensor], exact: list[Tensor], whole: list[Tensor]) -> float:
    """The largest difference, relative to the whole tensor's largest number (or 0.1). NaN is infinite."""
    ratios = [
        (a.double() - b).abs().max() / c.abs().max().clamp(min=0.1)
        for a, b, c in zip(found, exact, whole, strict=True)
    ]
    assert len(ratios) == 4
    return float(torch.stack(ratios).nan_to_num(nan=float("inf")).max())


def difference(mesh: Mesh, case: Case) -> float:
    whole = one_device(case, torch.float64)
    exact = [share(x, mesh.context) for x in whole]
    return worst(
        sharded(mesh, ContextAttention(mesh, mesh.layout.context_mode, RecomputeCache()), case), exact, whole
    )


def differences(mesh: Mesh, group: Group) -> list[float]:
    return [difference(mesh, case) for case in group.cases]


def allowed(mode: ContextMode, ranks: int, kv_heads: int) -> bool:
    return mode != "ulysses" or kv_heads % ranks == 0


def random_cases(seed: int, count: int) -> list[Case]:
    make = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=make))]

    return [
        Case(
            seed=100 * seed + i,
            kv_heads=pick(4, 8),
            documents=pick("none", "random", "random", "random", "crossing"),
            window=pick(None, None, 1, 2, 7, 31, 1000),
            batch=pick(1, 2, 3),
            length=16 * pick(1, 2, 3, 7, 10),
            loud=pick(1.0, 1.0, 500.0),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(("mode", "n"), some(CASES, QUICK))
def test_equals_one_device(ranks: Ranks, mode: ContextMode, n: int) -> None:
    combinations = product((1, 2, 8), ("none", "random", "tokens", "crossing"), (None, 11))
    cases = [
        Case(seed, kv_heads, documents, window)
        for seed, (kv_heads, documents, window) in enumerate(combinations)
        if allowed(mode, n, kv_heads)
    ]
    if n < 8:
        cases += random_cases(n, 12)
    assert len(cases) >= 20
    for group in groups(cases):
        found = ranks.run(Layout(cp=n, context_mode=mode), differences, group)
        for case, *each in zip(group.cases, *found, strict=True):
            assert max(each) <= 1e-12 * case.loud, case


def difference_in_runs(mesh: Mesh, case: Case) -> float:
    """Ring attention on the sequences that flash attention takes on CUDA, with an exact kernel for them."""
    with patch.object(ring, "part_operators", lambda *_: FLASH), exact_kernel() as calls:
        found = difference(mesh, case)
    assert calls["forward"] and calls["backward"]
    assert mesh.layout.context_mode != "gather" or case.window or max(calls.values()) <= 2
    return found


def differences_in_runs(mesh: Mesh, group: Group) -> list[float]:
    return [difference_in_runs(mesh, case) for case in group.cases]


@pytest.mark.parametrize(("mode", "n"), some([each for each in CASES if each[1] in (2, 4)], QUICK))
def test_runs_of_sequences_equal_one_device(ranks: Ranks, mode: ContextMode, n: int) -> None:
    documents = ("none", "random", "tokens", "crossing")
    choices = enumerate(product((4, 8), documents, (None, 1, 11, 30)))
    cases = [Case(seed, kv_heads, kind, window, length=48) for seed, (kv_heads, kind, window) in choices]
    for group in groups(cases):
        found = ranks.run(Layout(cp=n, context_mode=mode), differences_in_runs, group)
        for case, *each in zip(group.cases, *found, strict=True):
            assert max(each) <= 1e-12, case


@pytest.mark.parametrize("mode", ["ring", "gather", "ulysses", "ring+ulysses"])
def test_bf16_is_as_close_as_one_device(ranks: Ranks, mode: ContextMode) -> None:
    documents = ("none", "random", "crossing")
    cases = [Case(seed, 4, kind, length=320, dtype=torch.bfloat16) for seed, kind in enumerate(documents)]
    exact = [one_device(case, torch.float64) for case in cases]
    # By torch's operators, which round scores as the ranks' tiles do; the kernel in C++ does not.
    with patch.object(attention_cpu_kernel, "takes", lambda *_: False):
        alone = [worst(one_device(case, case.dtype), x, x) for case, x in zip(cases, exact, strict=True)]
    assert all(1e-4 < difference < 0.05 for difference in alone)
    for case, one in zip(cases, alone, strict=True):
        assert max(ranks.run(Layout(cp=4, context_mode=mode), difference, case)) <= 2 * one


def sent_bytes(mesh: Mesh, case: Case) -> tuple[dict[Any, float], dict[Any, float]]:
    """Bytes that one layer sends in its forward, and in its backward."""
    axis = mesh.context
    attention = ContextAttention(mesh, mesh.layout.context_mode, RecomputeCache())
    *inputs, grad = (share(x, axis).clone() for x in case.tensors())
    inputs = [x.requires_grad_() for x in inputs]
    at = zigzag(case.length, axis.size, axis.rank)
    seen = attention_intervals(case.ids(), case.length, case.window, at, case.batch, "cpu")
    out = attention(*inputs, attention.mask(seen))
    forward = dict(mesh.wire.bytes)
    mesh.wire.clear()
    out.backward(grad)
    return forward, dict(mesh.wire.bytes)


@pytest.mark.parametrize(("dtype", "b", "a"), [(torch.float64, 8, 8), (torch.bfloat16, 2, 4)])
@pytest.mark.parametrize(("mode", "n"), CASES)
def test_bytes_equal_the_formula(
    ranks: Ranks, mode: ContextMode, n: int, dtype: torch.dtype, b: int, a: int
) -> None:
    case = Case(0, 4, "random", dtype=dtype)
    forward: dict[tuple[str, str], float] = {}
    backward: dict[tuple[str, str], float] = {}
    tokens = case.batch * case.length // n
    both = 2 * tokens * case.kv_heads * DIM
    u = {"ulysses": n, "ring+ulysses": {1: 1, 2: 2, 4: 2, 8: 4}[n]}.get(mode, 1)
    ring = n // u
    if mode == "gather" and n > 1:
        forward["context", "all_gather"] = n * both * b * (n - 1) / n
        backward["context", "reduce_scatter"] = n * both * a * (n - 1) / n
    elif ring > 1:
        forward["context", "shift"] = (ring - 1) * both * b
        backward["context", "shift"] = (ring - 1) * both * b + ring * both * a
    if u > 1:
        exchanged = 2 * tokens * (HEADS + case.kv_heads) * DIM * b * (u - 1) / u
        forward["context", "all_to_all"] = backward["context", "all_to_all"] = exchanged
    for sent in ranks.run(Layout(cp=n, context_mode=mode), sent_bytes, case):
        assert sent == (forward, backward)


def test_ranks_of_the_hybrid() -> None:
    found = {
        (n, kv): ulysses_ranks(n, kv, "ring+ulysses")
        for n in (1, 2, 3, 4, 6, 8, 12)
        for kv in (1, 2, 3, 4, 8)
    }
    for (n, kv), u in found.items():
        assert n % u == 0 and kv % u == 0
    assert [found[n, 8] for n in (1, 2, 4, 8)] == [1, 2, 2, 4]
    assert [found[2, 1], found[3, 3], found[6, 3], found[12, 4], found[8, 2]] == [1, 3, 3, 4, 2]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="30 tokens"):
        zigzag(30, 4, 0)


def test_shares_are_a_partition() -> None:
    for n, length in [(1, 7), (2, 8), (4, 40), (8, 16)]:
        places = [zigzag(length, n, rank) for rank in range(n)]
        assert all(bool((at.diff() > 0).all()) for at in places)
        assert torch.equal(torch.cat(places).sort().values, torch.arange(length))


def work_by_rank(length: int, n: int, documents: Tensor | None, window: int | None = None) -> list[int]:
    places = [zigzag(length, n, rank) for rank in range(n)]
    seen = [attention_intervals(documents, length, window, at, 1, "cpu") for at in places]
    return [sum(make_part(own, at, 4, 2).work for at in places) for own in seen]


def test_work_is_balanced_and_documents_reduce_it() -> None:
    length = 16_384
    causal = work_by_rank(length, 4, None)
    assert max(causal) <= 1.05 * min(causal)
    whole = 8 * length * (length + 1) // 2
    assert whole <= sum(causal) <= 1.1 * whole
    documents = (torch.arange(length) // 2048).unsqueeze(0)
    assert sum(work_by_rank(length, 4, documents)) <= 0.16 * sum(causal)
    assert sum(work_by_rank(length, 4, None, window=1024)) <= 0.2 * sum(causal)


def kept(mesh: Mesh, case: Case) -> tuple[int, int]:
    """Bytes that are kept for the backward, and the number of local tokens."""
    axis = mesh.context
    attention = ContextAttention(mesh, mesh.layout.context_mode, RecomputeCache())
    *inputs, _ = (share(x, axis).clone() for x in case.tensors())
    inputs = [x.requires_grad_() for x in inputs]
    at = zigzag(case.length, axis.size, axis.rank)
    seen = attention_intervals(None, case.length, None, at, case.batch, "cpu")
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(*inputs, attention.mask(seen))
    return sum(storages.values()), case.batch * case.length // axis.size


def test_the_ring_keeps_no_probabilities_and_no_received_block(ranks: Ranks) -> None:
    case = Case(0, 2, length=256)
    for total, tokens in ranks.run(Layout(cp=4), kept, case):
        assert total == tokens * 8 * ((2 * HEADS + 2 * case.kv_heads) * DIM + HEADS)


def in_evaluation(mesh: Mesh, case: Case) -> float:
    axis = mesh.context
    attention = ContextAttention(mesh, mesh.layout.context_mode, RecomputeCache())
    *inputs, _ = (share(x, axis) for x in case.tensors())
    at = zigzag(case.length, axis.size, axis.rank)
    with torch.no_grad():
        seen = attention_intervals(case.ids(), case.length, None, at, case.batch, "cpu")
        out = attention(*inputs, attention.mask(seen))
    return float((out - share(one_device(case, case.dtype)[0], axis)).abs().max())


def test_without_gradients(ranks: Ranks) -> None:
    layout = Layout(cp=4, context_mode="ring+ulysses")
    assert max(ranks.run(layout, in_evaluation, Case(3, 4, "random"))) < 1e-13


def plans_of_steps(mesh: Mesh, spec: RunSpec) -> list[int]:
    """How many times the attention to a part of the keys is planned in a step with documents, and in one
    without."""
    planned = Mock(side_effect=TILES.plan)
    eager = patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with patch.object(ring, "part_operators", lambda *_: TILES._replace(plan=planned)), eager:
        trainer = Trainer(spec, mesh)
        trainer.initialise()
        (batch,) = first_batches(spec, mesh, 1)
        counts = []
        for chance in (0.2, 0.0):
            documents = torch.rand(batch.documents.shape, generator=torch.Generator().manual_seed(0)) < chance
            trainer.step(replace(batch, documents=documents.cumsum(1)), 1)
            counts.append(planned.call_count - sum(counts))
    return counts


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"layout__cp": 2}, 2),
        ({"layout__cp": 2, "layout__context_mode": "gather", "recompute__policy": "full"}, 1),
        ({"layout__cp": 2, "layout__context_mode": "ulysses"}, 1),
        ({"layout__cp": 4, "layout__context_mode": "ring+ulysses", "model__sliding_window": 5}, 2),
        ({"layout__cp": 2, "train__compile": "true", "model__sliding_window": 5}, 2),
        ({"layout__cp": 2, "layout__pp": 2, "layout__schedule": "gpipe"}, 2),
    ],
    ids=str,
)
def test_a_microbatch_is_planned_once(ranks: Ranks, flags: dict[str, object], parts: int) -> None:
    """Not in each of its layers, nor again in a backward, nor when a block is recomputed."""
    base = {
        "model.vocab_size": 61, "model.layers": 4, "data.corpus": "synthetic", "data.seq_len": 16,
        "layout.micro_batch": 2, "train.batch_tokens": 16 * 6, "train.steps": 1, "train.warmup_steps": 0,
    }  # fmt: skip
    spec = spec_of(base, **flags)
    assert ranks.run(spec.layout, plans_of_steps, spec) == [[3 * parts, parts]] * spec.layout.world_size
