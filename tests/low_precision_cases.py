"""Models whose products can be computed in 8 and 4 bits with every recipe, and the losses of a short run."""

from __future__ import annotations

from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from small import first_batches

BASE: dict[str, object] = {
    "model.hidden": 128, "model.ffn": 256, "model.heads": 8, "model.kv_heads": 4, "model.head_dim": 64,
    "model.vocab_size": 61, "data.seq_len": 512, "train.steps": 3, "train.warmup_steps": 1,
    "train.batch_tokens": 2 * 512, "layout.micro_batch": 1,
}  # fmt: skip
RECIPES = ("fp8", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4")
EXPERTS = {
    "model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 256, "data__seq_len": 256,
    "train__batch_tokens": 4 * 256,
}  # fmt: skip
MLA = {
    "model__mla__kv_rank": 32, "model__mla__rope_dim": 16, "model__mla__v_dim": 64, "model__mla__q_rank": 48,
    "model__kv_heads": 8, "model__head_dim": 80,
}  # fmt: skip


def losses(mesh: Mesh, spec: RunSpec) -> list[float]:
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    return [trainer.step(batch, number).loss for number, batch in enumerate(first_batches(spec, mesh, 3), 1)]


def losses_and_norms(mesh: Mesh, spec: RunSpec) -> list[float]:
    """Losses of two steps, in the second of which all scales are known, and the norms of their gradients."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    steps = [trainer.step(batch, number) for number, batch in enumerate(first_batches(spec, mesh, 2), 1)]
    return [*(step.loss for step in steps), *(step.grad_norm for step in steps)]
