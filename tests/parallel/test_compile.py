"""Compiled blocks on every axis: one graph for all blocks, one device's results, and the same bytes."""

from __future__ import annotations

import shutil
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from covering import some
from meshwright.comm.mesh import Mesh
from meshwright.parallel import tensor_linears as tensor
from meshwright.parallel.flat_param import ParamSlot
from meshwright.parallel.fsdp_unit import Unit
from meshwright.planner.traffic.messages import traffic
from meshwright.spec import RunSpec
from meshwright.train.guard.trace import Place, StepTracer
from meshwright.train.step import Trainer
from ranks import Ranks
from small import first_batches, spec_of

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"
)

STEPS = 2
BASE = {
    "model.vocab_size": 61,
    "model.kv_heads": 4,
    "data.corpus": "synthetic",
    "data.seq_len": 16,
    "train.batch_tokens": 16 * 8,
    "train.steps": STEPS,
    "train.warmup_steps": 0,
    "layout.micro_batch": 2,
    "precision.compute": "fp64",
}


def trained(mesh: Mesh, spec: RunSpec, backend: str = "aot_eager") -> dict[str, Any]:
    """Results of the steps, bytes that the last one sent, and graphs that the compiler made.

    `aot_eager` makes the graphs of `inductor`, with the same messages, and generates no code of them, which
    takes nine tenths of the time.
    """
    torch.compiler.reset()
    counters.clear()
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        trainer = Trainer(spec, mesh)
    trainer.initialise()
    steps = []
    for number, batch in enumerate(first_batches(spec, mesh, STEPS), 1):
        trainer.expect(batch)
        mesh.wire.clear()
        steps.append(trainer.step(batch, number))
    return {
        "numbers": torch.tensor([[step.loss, step.grad_norm] for step in steps], dtype=torch.float64),
        "sent": dict(mesh.wire.bytes),
        "parameters": {name: stored.full_tensor() for name, stored in trainer.states.parameters()},
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }


LATENTS = {
    "model__head_dim": 12, "model__mla__q_rank": 16, "model__mla__kv_rank": 8, "model__mla__rope_dim": 4,
    "model__mla__v_dim": 6,
}  # fmt: skip
CASES: dict[str, dict[str, object]] = {
    "tp2": {"tp": 2, "data__document_mask": "false"},  # one graph, which `inductor` compiles
    "tp2-full": {"tp": 2, "sequence_parallel": "false", "recompute__policy": "full"},
    "cp2-ring": {"cp": 2, "zero": 1, "recompute__policy": "selective"},
    "cp2-gather": {"cp": 2, "context_mode": "gather", "recompute__save": "matmul"},
    "all": {
        "tp": 2, "cp": 2, "zero": 3, "context_mode": "ulysses", "recompute__policy": "selective",
    },
    "lora": {"tp": 2, "lora__rank": 4, "train__lr": 0.01},
    "lora-full": {"tp": 2, "sequence_parallel": "false", "lora__rank": 4, "recompute__policy": "full"},
    "lora-latents": LATENTS | {"tp": 2, "lora__rank": 4, "train__lr": 0.01},
    "lora-alone": {"lora__rank": 4},
    "dora": {"tp": 2, "lora__rank": 4, "lora__dora": "true", "train__lr": 0.01},
    "dora-full": {"tp": 2, "lora__rank": 4, "lora__dora": "true", "recompute__policy": "full"},
    "latents": LATENTS | {"tp": 2, "recompute__policy": "full"},
    "latents-cp2": LATENTS | {"tp": 2, "cp": 2, "sequence_parallel": "false"},
    "latents-cp2-full": LATENTS | {"tp": 2, "cp": 2, "recompute__policy": "full"},
}  # fmt: skip
QUICK = [("all", "aot_eager"), ("tp2", "inductor")]
"""Each axis and each backend; `test_verify_blocks.py` has more of `aot_eager`."""


@pytest.mark.parametrize(
    ("case", "backend"),
    some(product(CASES, ("aot_eager", "inductor")), QUICK),
)
def test_compiled_blocks_equal_one_device(ranks: Ranks, case: str, backend: str) -> None:
    flags = {key if "__" in key else f"layout__{key}": value for key, value in CASES[case].items()}
    spec = spec_of(BASE, **flags, train__compile="true")
    of_one = {
        key: value
        for key, value in flags.items()
        if key.startswith(("model__", "data__", "lora__", "train__"))
    }
    alone = spec_of(BASE, **of_one)
    wanted = ranks.run(alone.layout, trained, alone)[0]
    for found in ranks.run(spec.layout, trained, spec, backend):
        # The first microbatch whose rows hold several documents brings a mask, where there is no `cp`.
        # With adapters the first block's input has no gradient.
        assert 1 <= found["graphs"] <= (2 if spec.lora is None else 4) and found["breaks"] == {}
        assert found["sent"] == pytest.approx(traffic(spec), rel=1e-14)
        torch.testing.assert_close(found["numbers"], wanted["numbers"], rtol=1e-10, atol=0)
        for name, parameter in wanted["parameters"].items():
            torch.testing.assert_close(found["parameters"][name], parameter, rtol=1e-9, atol=1e-9)


def gradients(mesh: Mesh, spec: RunSpec) -> tuple[set[str], dict[str, Tensor], int]:
    """Names of the blocks' matrices whose gradients were copied; gradients of the second step; and graphs."""
    torch.compiler.reset()
    counters.clear()
    copied, pack = set[str](), Unit.pack

    def noted(unit: Unit, slot: ParamSlot, grad: Tensor) -> None:
        if slot.key.startswith("blocks.") and grad.ndim > 1:
            copied.add(slot.key.removeprefix("blocks."))
        pack(unit, slot, grad)

    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        trainer = Trainer(spec, mesh)
    trainer.initialise()
    with patch.object(Unit, "pack", noted):
        for number, batch in enumerate(first_batches(spec, mesh, 2), 1):
            trainer.compile_stages(evaluate=False)  # leaves nothing
            trainer.step(batch, number)
        trainer.gradients(batch)
    found = {name: grad.full_tensor() for name, grad in trainer.states.gradients()}
    return copied, found, counters["stats"]["unique_graphs"]


ADDED: dict[str, dict[str, object]] = {
    "accumulated": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3, "recompute__policy": "selective"},
    "biases": {"dp": 2, "model__qkv_bias": "true", "model__out_bias": "true"},
    "tied": {"tp": 2, "model__tied": "true"},
    "tp2": {"tp": 2, "sequence_parallel": "false", "recompute__policy": "full"},
    "cp2": {"cp": 2},
    "1f1b": {"pp": 2, "schedule": "1f1b", "model__tied": "true"},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual": 2, "model__layers": 4},
    "latents": LATENTS,
    "lora": {"dp": 2, "lora__rank": 4},
    "frozen": {"dp": 2, "train__frozen": "blocks.0.attn.*"},
}  # fmt: skip
RETURNED = {"lora": {f"0.attn.{each}.lora_a.weight" for each in "qkv"}}
"""Nothing asks for the gradient of the input of the first layers."""


@pytest.mark.parametrize("case", some(ADDED, ("zero3", "1f1b", "lora")))
def test_products_of_compiled_blocks_add_gradients_where_they_are_sent(ranks: Ranks, case: str) -> None:
    """Gradients are those of the same layout without a compiler, from one graph for all blocks."""
    flags = {key if "__" in key else f"layout__{key}": value for key, value in ADDED[case].items()}
    flags |= {"layout__micro_batch": 2, "data__document_mask": "false"}
    plain, spec = spec_of(BASE, **flags), spec_of(BASE, **flags, train__compile="true")
    assert spec.microbatches > 1
    wanted = ranks.run(plain.layout, gradients, plain)
    for (copied, found, graphs), (_, expected, none) in zip(
        ranks.run(spec.layout, gradients, spec), wanted, strict=True
    ):
        assert copied == RETURNED.get(case, set())
        assert none == 0 and 1 <= graphs <= 1 + (case in ("lora", "frozen"))
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)


class Seen(StepTracer):
    """The gradients of parameters, summed over microbatches."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.found: dict[str, Tensor] = {}

    def seen(self, what: str, tensor: Tensor, place: Place) -> None:
        if what.startswith("the gradient of "):
            self.found[what] = tensor + self.found.get(what, 0)


def traced(mesh: Mesh, spec: RunSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients that a look at a step sees, and those that the step leaves."""
    torch.compiler.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        trainer = Trainer(spec, mesh)
    trainer.initialise()
    (batch,) = first_batches(spec, mesh, 1)
    with Seen(trainer) as seen:
        trainer.gradients(batch)
    return seen.found, {name: grad.full_tensor() for name, grad in trainer.states.gradients()}


def test_a_look_at_a_step_sees_gradients_of_compiled_blocks(ranks: Ranks) -> None:
    flags = {"layout__micro_batch": 2, "data__document_mask": "false"}
    spec = spec_of(BASE, **flags, train__compile="true")
    assert spec.microbatches > 1
    ((found, gradients),) = ranks.run(spec.layout, traced, spec)
    assert {f"the gradient of {name}" for name in gradients} == set(found)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[f"the gradient of {name}"], gradient, rtol=1e-12, atol=1e-14)


def test_maps_with_biases(ranks: Ranks) -> None:
    """Three maps of one input, and, under GELU, one."""
    model = {
        "model__family": "gpt2", "model__norm": "layernorm", "model__activation": "gelu_tanh",
        "model__position": "learned", "model__max_seq_len": 16, "model__qkv_bias": "true",
        "model__out_bias": "true", "model__mlp_bias": "true", "model__layers": 1,
    }  # fmt: skip
    alone, spec = spec_of(BASE, **model), spec_of(BASE, **model, layout__tp=2, train__compile="true")
    wanted = ranks.run(alone.layout, trained, alone)[0]
    for found in ranks.run(spec.layout, trained, spec):
        torch.testing.assert_close(found["numbers"], wanted["numbers"], rtol=1e-10, atol=0)


def fused(mesh: Mesh, spec: RunSpec) -> dict[str, Any]:
    """As on CUDA devices that reach each other, with what torch puts in place of the operators elsewhere."""
    from torch.distributed import _symmetric_memory as symmetric

    gather = Mock(side_effect=symmetric._fused_all_gather_matmul_fallback)
    scatter = Mock(side_effect=symmetric._fused_matmul_reduce_scatter_fallback)
    operators = SimpleNamespace(fused_all_gather_matmul=gather, fused_matmul_reduce_scatter=scatter)
    reach = patch.object(tensor, "reach_each_other", lambda axis: True)
    with reach, patch.object(torch.ops, "symm_mem", operators):
        found = trained(mesh, spec)
    assert gather.call_count == 2 * scatter.call_count > 0  # columns forward and rows backward; rows forward
    return found


def test_products_that_overlap_with_their_own_messages(ranks: Ranks) -> None:
    alone = spec_of(BASE, model__qkv_bias="true", model__layers=1)
    spec = spec_of(BASE, model__qkv_bias="true", model__layers=1, layout__tp=2, train__compile="true")
    wanted = ranks.run(alone.layout, trained, alone)[0]
    for found in ranks.run(spec.layout, fused, spec):
        assert found["sent"] == pytest.approx(traffic(spec), rel=1e-14)
        torch.testing.assert_close(found["numbers"], wanted["numbers"], rtol=1e-10, atol=0)


def pipelined(mesh: Mesh, spec: RunSpec) -> dict[str, Any]:
    """Steps and an evaluation, and how often the compiler was called before the first step and until here."""
    torch.compiler.reset()
    counters.clear()
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        trainer = Trainer(spec, mesh)
    trainer.initialise()
    before = {name: stored.full_tensor() for name, stored in trainer.states.parameters()}
    trainer.compile_stages(evaluate=True)
    for name, stored in trainer.states.parameters():
        assert torch.equal(stored.full_tensor(), before[name])
    calls = [_calls_of_the_compiler()]
    batches = first_batches(spec, mesh, STEPS)
    steps = [trainer.step(batch, number) for number, batch in enumerate(batches, 1)]
    nll = trainer.nll(batches[0])
    nll += trainer.nll(batches[0].rows(0, spec.micro_batch))  # as the last batch of a validation may be
    calls.append(_calls_of_the_compiler())
    return {
        "numbers": torch.tensor([[step.loss, step.grad_norm] for step in steps], dtype=torch.float64),
        "nll": nll,
        "parameters": {name: stored.full_tensor() for name, stored in trainer.states.parameters()},
        "calls": calls,
        "graphs": counters["stats"]["unique_graphs"],
        "balance": trainer.layers_balance(),
    }


def _calls_of_the_compiler() -> tuple[int, int]:
    """Frames that were compiled, and graphs that came of them, forward and backward."""
    return counters["frames"]["total"], counters["aot_autograd"]["total"]


RUNS: dict[str, dict[str, object]] = {
    "alone": {"model__layers": 12, "data__document_mask": "false"},
    "documents": {"model__layers": 12},
    "zero3": {"dp": 2, "zero": 3, "recompute__policy": "selective"},
    "lora": {"lora__rank": 4},
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "interleaved": {
        "pp": 2, "schedule": "interleaved", "virtual": 2, "model__layers": 4,
        "recompute__policy": "selective",
    },
    "interleaved-zero3": {
        "pp": 2, "dp": 2, "zero": 3, "schedule": "interleaved", "virtual": 2, "model__layers": 4,
        "recompute__policy": "selective",
    },
    "gpipe-cp2": {"pp": 2, "cp": 2, "schedule": "gpipe", "recompute__policy": "full"},
    "experts": {
        "pp": 2, "dp": 2, "ep": 2, "schedule": "1f1b", "model__moe__experts": 4, "model__moe__top_k": 2,
        "model__moe__ffn": 12, "model__moe__aux_loss": 0.1, "model__moe__bias": "true",
        "model__moe__router": "sigmoid",
    },
}  # fmt: skip


GRAPHS = {"alone": 2, "documents": 4}
"""Graphs of training and of validation, and of both where samples hold several documents."""
# `make test` has 1F1B with experts, and one device.
QUICK_RUNS = ("alone", "experts")


@pytest.mark.parametrize(
    "case",
    some(RUNS, QUICK_RUNS),
)
def test_all_blocks_compile_before_the_first_step(ranks: Ranks, case: str) -> None:
    """A compiled run equals an uncompiled one, and calls the compiler in `compile_stages` only.

    Twelve blocks share a graph, and so do validation's.
    """
    flags = {key if "__" in key else f"layout__{key}": value for key, value in RUNS[case].items()}
    spec = spec_of(BASE, **flags, train__compile="true", layout__micro_batch=1)
    plain = spec_of(BASE, **flags, layout__micro_batch=1)
    wanted = ranks.run(plain.layout, pipelined, plain, rules="nccl")
    for found, expected in zip(ranks.run(spec.layout, pipelined, spec, rules="nccl"), wanted, strict=True):
        (frames, graphs), after = found["calls"]
        assert frames > 0 and graphs > 0 and after == (frames, graphs)
        if case in GRAPHS:
            assert found["graphs"] == GRAPHS[case]
        assert expected["calls"] == [(0, 0), (0, 0)]
        torch.testing.assert_close(found["numbers"], expected["numbers"], rtol=1e-10, atol=0)
        assert found["nll"] == pytest.approx(expected["nll"], rel=1e-10)
        assert found["balance"].keys() == expected["balance"].keys()
        for layer, balance in expected["balance"].items():
            assert found["balance"][layer].load == pytest.approx(balance.load, rel=1e-12)
        for name, parameter in expected["parameters"].items():
            torch.testing.assert_close(found["parameters"][name], parameter, rtol=1e-9, atol=1e-9)
