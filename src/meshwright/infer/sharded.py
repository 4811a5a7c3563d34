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
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.collectives import gather_rows
from meshwright.comm.mesh import Axis, Mesh
from meshwright.infer.forward import DecoderPart
from meshwright.model.decoder import Decoder
from meshwright.model.hooks import MoeHooks
from meshwright.parallel.parallelize import parallelize
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.layout import GENERATION_KEYS
from meshwright.spec.load import Overrides, fixed_layout, from_tree
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.sections import DataSpec
from meshwright.spec.stages import stages
from meshwright.weights.load import load_tensors

MOST_TOKENS = 8192
"""Tokens of a microbatch of an evaluation."""


def spec_to_generate(model: ModelSpec, trained: PrecisionSpec, overrides: Overrides) -> RunSpec:
    """The spec of a generation by a model on the layout of flags, by default on one device.

    It computes in the format of the weights that a run with the precision `trained` has stored. Raises
    `UserError`, also for keys of other tables, and for keys of the layout that are about training.
    """
    for key, _ in overrides:
        if not key.startswith("layout."):
            raise UserError(f"--{key}: of a run, this command takes keys of [layout] only; remove it")
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


def spec_to_evaluate(
    model: ModelSpec, trained: PrecisionSpec, overrides: Overrides, data: DataSpec
) -> RunSpec:
    """Return the spec of an evaluation, that of a generation but for its data and its batches."""
    spec = spec_to_generate(model, trained, overrides)
    rows = max(1, MOST_TOKENS // data.seq_len)
    ahead = 2 * spec.layout.pp if spec.layout.pp > 1 else 1  # microbatches that keep all stages at work
    tree = spec.to_json()
    tree["data"] = data.model_dump(mode="json")
    tree["train"] = {"batch_tokens": rows * ahead * data.seq_len * spec.layout.data_ranks}
    tree["layout"]["micro_batch"] = rows
    return from_tree(tree)


class ShardedDecoder:
    """This rank's part of a decoder on a mesh; its weights are those of the last `load`."""

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        self.spec, self.mesh = spec, mesh
        built = parallelize(spec, mesh)
        self.decoder, self.pipeline = built.decoder, built.pipeline
        self._states, self._balance = built.states, built.balance
        _route_any_number(self.decoder.eval(), mesh.tensor)
        every = stages(spec.model, spec.layout, spec.data.seq_len)
        self.part = DecoderPart(every[mesh.pipeline.rank], mesh, self._states.formats.compute)

    def load(
        self, run: Path, trained: RunSpec, average: bool = False, step: int | None = None
    ) -> dict[str, Any]:
        """Take the weights of a run's checkpoint, by default the newest, and return its state.

        All ranks call this. Raises `UserError` as `load_tensors` does.
        """
        parameters, biases = dict(self._states.parameters()), dict(self._balance.biases())
        state = load_tensors(run, trained, parameters, biases, average, self.mesh.control, step)
        for unit in self._states.units:
            unit.expire()
        return state


def load_sharded(
    run: Path,
    trained: RunSpec,
    spec: RunSpec,
    mesh: Mesh,
    average: bool = False,
    step: int | None = None,
) -> tuple[Decoder, DecoderPart]:
    """This rank's part of the decoder of a run's checkpoint, by default the newest.

    All ranks call this. Raises `UserError` as `load_run` does.
    """
    model = ShardedDecoder(spec, mesh)
    model.load(run, trained, average, step)
    return model.decoder, model.part


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
