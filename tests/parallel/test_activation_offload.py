"""Activations in the host's memory until the backward give the numbers, to the bit, of those that stay."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import small
from covering import marked
from equality import equal_to_one_device
from meshwright.comm.mesh import Mesh
from meshwright.optim import offload
from meshwright.optim.offload import check_offload
from meshwright.parallel.activation_offload import HostMemory
from meshwright.spec import RunSpec, UserError
from meshwright.spec.tiling import tiled, tiling
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from meshwright.verify.covering import Case
from ranks import Ranks

BASE = {
    "model.layers": 4, "model.vocab_size": 61, "data.corpus": "synthetic", "data.seq_len": 16,
    "train.batch_tokens": 4 * 16, "layout.micro_batch": 2,
}  # fmt: skip
DATA = {"layout__dp": 2, "train__batch_tokens": 8 * 16}
PIPELINE = {"layout__pp": 2, "model__layers": 6, "train__batch_tokens": 8 * 16}
EXPERTS = {"model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 12}
LAYOUTS: list[dict[str, object]] = [
    {},
    {"layout__tp": 2},
    PIPELINE,
    {"layout__cp": 2},
    DATA | {"layout__zero": 3},
    PIPELINE | {"layout__schedule": "zb-h1", "layout__tp": 2},
    PIPELINE | {"layout__schedule": "zb-v", "model__layers": 12},
    DATA | {"layout__ep": 2} | EXPERTS,
    {"layout__cp": 2, "layout__context_mode": "ulysses", "precision__compute": "bf16"},
]
POLICIES = ("none", "selective", "full")
CASES: list[Case] = [layout | {"recompute__policy": policy} for layout in LAYOUTS for policy in POLICIES]
QUICK = [case for place, case in enumerate(CASES) if place < 3 or place % 3 == place // 3 % 3]
"""One device with every policy, and every layout with one of them."""
spec_of = partial(small.spec_of, BASE)


class Counted(HostMemory):
    """Counts the bytes that go to the host's memory and those that come back."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.back = 0

    def home(self, here: Tensor) -> Tensor:
        self.sent += here.nbytes
        return super().home(here)

    def room(self, home: Tensor, device: torch.device) -> Tensor:
        self.back += home.nbytes
        return super().room(home, device)


def trained(
    mesh: Mesh, spec: RunSpec, backend: str = "inductor"
) -> tuple[list[float], list[Tensor], int, int]:
    """The losses of two steps, this rank's gradients of each, and the bytes that left and that came back."""
    losses, gradients, host = [], list[Tensor](), Counted()
    compiler = patch.object(torch, "compile", partial(torch.compile, backend=backend))
    with tiled(replace(tiling(), offload_bytes=1)), compiler:
        trainer = Trainer(spec, mesh)
        trainer.initialise()
        if trainer.offload is not None:
            trainer.offload.host = host
        for number, batch in enumerate(small.first_batches(spec, mesh, 2), 1):
            loss = trainer.gradients(batch)
            found = [
                getattr(grad, "padded", grad).to_local().clone() for _, grad in trainer.states.gradients()
            ]
            gradients += found
            losses.append(trainer.apply(trainer.sums(loss), number).loss)
    return losses, gradients, host.sent, host.back


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_offloaded_activations_change_no_bit(ranks: Ranks, case: Case) -> None:
    assert_equal_to_the_bit(ranks, case)


@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_offloaded_activations_of_compiled_blocks_change_no_bit(
    ranks: Ranks, policy: str, backend: str
) -> None:
    """`aot_eager` saves for the backward what the default partition of a graph does, `inductor` less."""
    case = {"train__compile": "true", "train__batch_tokens": 2 * 16, "recompute__policy": policy}
    assert_equal_to_the_bit(ranks, case, backend)


def assert_equal_to_the_bit(ranks: Ranks, case: Case, *backend: str) -> None:
    spec, away = spec_of(**case), spec_of(**case, train__offload_activations="host")
    found = ranks.run(away.layout, trained, away, *backend)
    wanted = ranks.run(spec.layout, trained, spec, *backend)
    for mine, other in zip(found, wanted, strict=True):
        assert mine[0] == other[0]
        assert len(mine[1]) == len(other[1]) > 20
        assert all(map(torch.equal, mine[1], other[1]))
        sent, back = mine[2:]
        assert 0 < back <= sent and other[2] == 0


def test_offloaded_activations_equal_one_device(ranks: Ranks) -> None:
    given = {"layout__tp": 2, "layout__pp": 2, "layout__dp": 2, "layout__zero": 2, "layout__micro_batch": 1}
    equal_to_one_device(ranks, spec_of(**given, train__offload_activations="host"), 1e-10)


def refused(mesh: Mesh, spec: RunSpec, out: Path) -> str:
    with pytest.raises(UserError) as raised:
        open_run(spec, mesh, out, Observers([]))
    return str(raised.value)


def test_the_host_of_a_cpu_is_where_activations_are(ranks: Ranks, tmp_path: Path) -> None:
    spec = spec_of(layout__pp=2, train__offload_activations="host")
    for words in ranks.run(spec.layout, refused, spec, tmp_path):
        assert (
            words.startswith("train.offload_activations: 'host' has no effect on a CPU") and "'none'" in words
        )


def test_too_little_memory_of_the_host_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"data__seq_len": 1024, "train__batch_tokens": 8192, "layout__micro_batch": 8}
    spec = spec_of(**sizes, train__offload_activations="host")
    check_offload(spec, torch.device("cuda"), 0)
    monkeypatch.setattr(offload, "free_memory", lambda: 1000)
    with pytest.raises(UserError) as raised:
        check_offload(spec, torch.device("cuda"), 0)
    words = str(raised.value)
    assert words.startswith("train.offload_activations: the activations of this rank, ")
    assert "of which 1 KB are free; give recompute.policy = 'full'" in words
