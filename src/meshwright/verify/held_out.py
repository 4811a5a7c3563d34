"""The validation loss of a layout, by the functions of training's validation, beside that of one device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch, SplitReader
from meshwright.spec import RunSpec
from meshwright.train.held_out import likelihoods, total
from meshwright.train.step import Trainer
from meshwright.verify.kinds import model_in
from meshwright.verify.reference.data import held_out_batch
from meshwright.verify.reference.decoder import ReferenceDecoder
from meshwright.verify.reference.groups import is_frozen
from meshwright.verify.reference.low_precision import ReferenceLinears
from meshwright.verify.reference.preference import ReferencePreference, twos_of
from meshwright.verify.reference.steps import mean_loss

AVERAGE = " of the moving average"
OF = {"": "", "ema": AVERAGE}
"""Name of `Trainer.models` -> words after "loss"."""


def targets_of(spec: RunSpec) -> int:
    """The held-out targets that are compared: those of a batch, and of half a sample of the next one."""
    return spec.train.batch_tokens + spec.data.seq_len // 2


def validation_losses(trainer: Trainer, reader: SplitReader, mesh: Mesh) -> dict[str, Tensor]:
    """The losses on held-out text, of the weights and of their moving average; collective over the mesh.

    Empty where no text is held out.
    """
    if reader.split.target_tokens == 0:
        return {}
    mesh.heartbeat.phase("evaluate")
    most, found = targets_of(trainer.run_spec), {}
    for name, weights in trainer.models():
        with weights:
            found[f"loss{OF[name]}"] = total(likelihoods(reader, trainer.nll, mesh, most)).loss
    return {name: torch.tensor(loss, dtype=torch.float64) for name, loss in found.items()}


@torch.no_grad()
def reference_losses(
    spec: RunSpec,
    weights: Mapping[str, Mapping[str, Tensor]],
    linears: ReferenceLinears,
    device: torch.device,
    targets: int | None = None,
) -> dict[str, Tensor]:
    """Losses on the same text of one device, in float64, from the tensors of `weights` by kind and name.

    The held-out `targets` are by default those of `targets_of`.
    """
    batch = held_out_batch(spec, targets or targets_of(spec))
    found: dict[str, Tensor] = {}
    if batch is None:
        return found
    moved = batch.to(device)
    of_model = model_in(weights)
    biases = weights.get("router bias", {})
    own = {name.split("/")[-1]: tensor for name, tensor in weights["parameter"].items()}  # of any group
    frozen = {name: tensor for name, tensor in own.items() if is_frozen(spec, name)}
    for of, held in (("", of_model), (AVERAGE, weights.get("ema"))):
        if held is not None:
            tensors = {name: tensor.double() for name, tensor in {**biases, **frozen, **held}.items()}
            decoder = ReferenceDecoder(spec.model, tensors, linears=linears, lora=spec.lora)
            logits = decoder(moved.tokens, moved.positions, moved.documents).logits
            found[f"loss{of}"] = _loss(spec, moved, logits, tensors).cpu()
    return found


def _loss(spec: RunSpec, batch: Batch, logits: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """The mean loss of a batch, by these weights, of targets or of pairs."""
    if spec.preference is None:
        return mean_loss(logits, batch.targets)
    loss, counted, summed = ReferencePreference(spec, spec.preference, weights), 0, logits.new_zeros(())
    for first in range(
        0, len(logits), spec.batch_sequences
    ):  # KTO's estimate of a divergence is one of a batch
        rows = slice(first, first + spec.batch_sequences)
        part = batch.rows(rows.start, rows.stop)
        count = sum(1 for _ in twos_of(part, logits[rows]))
        summed, counted = summed + count * loss(part, logits[rows]), counted + count
    return summed / max(counted, 1)
