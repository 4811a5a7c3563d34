"""Whole tensors that are put together on rank 0 are those that DTensor gathers."""

from __future__ import annotations

import pytest
import torch

from meshwright.checkpoint.gather_full import gather_full
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from ranks import Ranks
from small import spec_of

BASE = {
    "model.vocab_size": 61, "data.corpus": "synthetic", "data.seq_len": 16, "train.batch_tokens": 16 * 12,
}  # fmt: skip
MOE = {"model.moe.experts": 4, "model.moe.top_k": 2, "model.moe.ffn": 12}


def gathered(mesh: Mesh, spec: RunSpec) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(what `gather_full` returns, this rank's stages by `full_tensor`)."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    whole = gather_full(trainer.states.parameters(), mesh)
    return whole, {name: tensor.full_tensor() for name, tensor in trainer.states.parameters()}


@pytest.mark.parametrize(
    "flags",
    [
        {"layout.dp": 3, "layout.tp": 2, "layout.zero": 3},
        {"layout.dp": 2, "layout.tp": 4, "layout.zero": 1, "model.kv_heads": 2},
        {"layout.dp": 2, "layout.tp": 2, "layout.pp": 2, "layout.zero": 2, "model.tied": "true"},
        {"layout.dp": 2, "layout.replicate": 2, "layout.tp": 2, "layout.ep": 2, "layout.zero": 3} | MOE,
        {"layout.dp": 2, "layout.tp": 4, "layout.ep": 2, "layout.etp": 2, "layout.zero": 3} | MOE,
    ],
    ids=str,
)
def test_gathered_tensors_are_those_of_dtensor(ranks: Ranks, flags: dict[str, object]) -> None:
    spec = spec_of(
        {
            "data.corpus": "synthetic",
            "data.seq_len": 16,
            "model.vocab_size": 61,
            "train.batch_tokens": 16 * 12,
        }
        | flags
    )
    results = ranks.run(spec.layout, gathered, spec)
    whole = results[0][0]
    assert [others for others, _ in results[1:]] == [{}] * (spec.layout.world_size - 1)
    assert whole.keys() == {name for _, stage in results for name in stage}
    for _, stage in results:
        for name, tensor in stage.items():
            assert torch.equal(whole[name], tensor), name
