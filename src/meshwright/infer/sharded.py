"""A trained decoder cut over the ranks of a layout, whatever layout it was trained on, and its forward.

Splits        heads, channels and vocabulary over tp, blocks over pp, experts over ep and etp, as in training;
              and requests over dp. Caches of keys and values lie with the heads and the blocks.
Wire          for B rows of a turn with T tokens of D channels: 2 all-reduces of B T D a block over tp, B T D
              from stage to stage, B V logits over tp, B tokens from the last stage to all; experts as in
              training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.infer.forward import Part
from meshwright.infer.load import load_tensors
from meshwright.model.decoder import Decoder
from meshwright.model.hooks import MoeHooks
from meshwright.parallel.collectives import gather_rows
from meshwright.parallel.mesh import Axis, Mesh
from meshwright.parallel.parallelize import parallelize
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.layout import GENERATION_KEYS
from meshwright.spec.load import Overrides, fixed_layout, from_tree
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.sections import DataSpec
from meshwright.spec.stages import stages


def spec_to_generate(model: ModelSpec, trained: PrecisionSpec, overrides: Overrides) -> RunSpec:
    """The spec of a generation by a model on the layout of flags, by default on one device.

    It computes in the format of the weights that a run with the precision `trained` has stored. Raises
    `UserError`, also for keys of other tables, and for keys of the layout that are about training.
    """
    for key, _ in overrides:
        if not key.startswith("layout."):
            raise UserError(f"--{key}: generation takes keys of [layout] only; remove it")
        if key not in GENERATION_KEYS:
            raise UserError(
                f"--{key}: has no effect on generation, which takes {', '.join(GENERATION_KEYS)}; remove it"
            )
    given = fixed_layout(overrides)
    ways = given.get("dp", 1) * given.get("pp", 1)
    compute = "fp64" if trained.base == "fp64" else trained.master
    length = min(model.max_seq_len, DataSpec().seq_len)  # rules ask for a batch, which generation has not
    tree = {
        "model": model.model_dump(mode="json"),
        "layout": {"sequence_parallel": False, "micro_batch": 1},
        "data": {"seq_len": length},
        "train": {"batch_tokens": length * ways},
        "recompute": {"policy": "none"},
        "precision": {"compute": compute, "master": "bf16" if compute == "bf16" else "fp32"},
    }
    return from_tree(tree, overrides)


def load_sharded(
    run: Path, trained: RunSpec, spec: RunSpec, mesh: Mesh, average: bool = False
) -> tuple[Decoder, Part]:
    """This rank's part of the decoder of a run's newest checkpoint.

    All ranks call this. Raises `UserError` as `load_run` does.
    """
    decoder, states, balance, _, _ = parallelize(spec, mesh)
    load_tensors(run, trained, dict(states.parameters()), dict(balance.biases()), average, mesh.control)
    for unit in states.units:
        unit.expire()
    _route_any_number(decoder, mesh.tensor)
    every = stages(spec.model, spec.layout, spec.data.seq_len)
    return decoder.eval(), Part(every[mesh.pipeline.rank], mesh, states.formats.compute)


def _route_any_number(decoder: Decoder, tensor: Axis) -> None:
    """Let tensor ranks, which all hold the tokens of a turn, share their routing whatever their number."""
    if tensor.size == 1:
        return
    for _, mixture in decoder.each_mixture():
        mixture.hooks = _sharing(mixture.hooks, tensor)


def _sharing(hooks: MoeHooks, tensor: Axis) -> MoeHooks:
    shapes: list[torch.Size] = []

    def scatter(x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> this rank's (1, N/n, D) of the N = B T tokens, with zeros after the last."""
        shapes.append(x_BTD.shape)
        x_ND = x_BTD.flatten(0, 1)
        share = -(-len(x_ND) // tensor.size)
        padded = torch.nn.functional.pad(x_ND, (0, 0, 0, share * tensor.size - len(x_ND)))
        return padded[tensor.rank * share : (tensor.rank + 1) * share].unsqueeze(0)

    def gather(y_1ND: Tensor) -> Tensor:
        shape = shapes.pop()
        return gather_rows(y_1ND[0], tensor).flatten(0, 1)[: shape[:2].numel()].view(shape)

    return replace(hooks, scatter_tokens=scatter, gather_tokens=gather)
