"""What crosses the wire equals the formulas at the head of `parallel/data.py`, byte for byte."""

from __future__ import annotations

import pytest

from meshwright.parallel.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from ranks import Ranks
from small import first_batches, spec_of

BASE = {"model.vocab_size": 64, "data.corpus": "synthetic", "data.seq_len": 8, "train.batch_tokens": 128}


def one_step(mesh: Mesh, spec: RunSpec) -> dict[tuple[str, str], float]:
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    (batch,) = first_batches(spec, mesh, 1)
    mesh.wire.clear()
    trainer.step(batch, 1)
    return {key: sent for key, sent in mesh.wire.bytes.items() if key[0] in ("shard", "replicate")}


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("dp", "zero", "replicate"), [(4, 0, 1), (4, 1, 1), (4, 2, 1), (4, 3, 1), (2, 2, 2), (2, 3, 2), (1, 1, 1)]
)
def test_bytes_equal_the_formula(ranks: Ranks, dp: int, zero: int, replicate: int, compute: str) -> None:
    axes = {"layout__dp": dp, "layout__zero": zero, "layout__replicate": replicate}
    spec = spec_of(BASE, **axes, layout__micro_batch=2, precision__compute=compute)  # 4 divides all rows
    sizes = dict(spec.model.parameter_sizes())
    whole = spec.model.parameters
    ends = sizes["embedding"], sizes["head"] + spec.model.hidden  # the last norm is the head's
    a, b, r, f = spec.microbatches, {"fp32": 4, "bf16": 2}[compute], 4, (dp - 1) / dp
    assert a > 1
    expected: dict[tuple[str, str], float] = {}
    if dp > 1 and zero == 0:
        expected["shard", "all_reduce"] = 2 * whole * r * f
    elif dp > 1:
        gathered = {1: whole, 2: whole, 3: a * (2 * whole - sum(ends))}[zero]
        expected["shard", "all_gather"] = gathered * b * f
        expected["shard", "reduce_scatter"] = (1 if zero == 1 else a) * whole * r * f
        expected["shard", "scalars"] = 2 * 8 * f  # the gradient norm
    if replicate > 1:
        expected["replicate", "all_reduce"] = 2 * (whole / dp) * 4 * (replicate - 1) / replicate
    for sent in ranks.run(spec.layout, one_step, spec):
        assert sent == pytest.approx(expected, rel=1e-15)
