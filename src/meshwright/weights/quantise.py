"""Quantisation of a trained decoder's linear layers, to nearest or by GPTQ on inputs of calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.exchange.hf_quantised import (
    NearestCodes,
    Quantisation,
    further_matrices,
    quantised_tensors,
)
from meshwright.exchange.parameter_source import HeldParameters, ParameterSource
from meshwright.model.decoder import Decoder
from meshwright.model.dynamic_linear import round_inputs
from meshwright.model.linear import Linear
from meshwright.model.quantisation import DYNAMIC, Codes
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.parameters import parameters
from meshwright.spec.precision import Quantised
from meshwright.spec.quantisation import GROUPS
from meshwright.weights.gptq import gptq

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Layers of one input, which servers compute as one product."""


def plan_quantisation(
    model: ModelSpec, recipe: Quantised, group: int | None = None, keep: Sequence[str] = ()
) -> Quantisation:
    """How a model's layers are quantised: in groups of `group` columns, by default the largest that divides
    all widths, but for the layers whose names in HF files match a pattern of `keep`.

    Raises `UserError` for a family without linear layers that clients know, a group that does not divide a
    width, and a pattern that matches no layer, or a part of layers that servers compute as one.
    """
    if FAMILIES[model.family].names.transposed:
        raise UserError(
            "quantise: GPT-2's layers are stored as Conv1D, which compressed-tensors does not know; give a "
            "model of another family"
        )
    if FAMILIES[model.family].expert_names.joint is not None:
        raise UserError(
            f"quantise: {model.family} stores all experts of a layer in one tensor, which compressed-tensors "
            "does not know; give a model of another family"
        )
    if model.moe is not None and recipe in DYNAMIC:
        raise UserError(
            f"--recipe: {recipe!r} rounds the inputs of experts in vLLM and not in transformers, which would "
            f"write other text; give int8 or int4"
        )
    if recipe != "int4" and group is not None:
        raise UserError(f"--group-size: {recipe!r} has a scale for each row; remove it, or give int4")
    shapes = {each.name: each.shape for unit in parameters(model).values() for each in unit}
    widths = {_module(piece.hf): piece.shape(shapes)[1] for piece in quantised_tensors(model)}
    kept = _kept(model, widths, keep, recipe)
    if recipe != "int4":
        return Quantisation(recipe, 0, kept)
    used = {name: width for name, width in widths.items() if name not in kept}
    fits = [size for size in GROUPS if not any(width % size for width in used.values())]
    wanted = group or (fits or GROUPS[-1:])[0]
    for name, width in used.items():
        if width % wanted:
            instead = f"give {fits[0]}" if fits else f"--keep {name}, or give --recipe int8"
            raise UserError(
                f"--group-size: {wanted} columns share a scale, and {name} has {width}; {instead}"
            )
    return Quantisation(recipe, wanted, kept)


def _module(hf: str) -> str:
    return hf.removesuffix(".weight")


def _kept(
    model: ModelSpec, widths: Mapping[str, int], keep: Sequence[str], recipe: Quantised
) -> tuple[str, ...]:
    """The modules that stay as they are: the head, routers, gates of shared experts, what predicts further
    tokens, and those that match a pattern.

    Of latent attention that expands latents, too, where inputs are rounded: generation applies it to queries
    instead of to its inputs.
    """
    kept = ["lm_head"]
    if model.moe is not None:
        names = FAMILIES[model.family].expert_names
        gates = [names.router, *[f"{names.shared}_gate"] * model.moe.shared_gate]
        layers = filter(model.has_experts, range(model.layers))
        kept += [f"model.layers.{layer}.{names.module}.{gate}" for layer in layers for gate in gates]
    kept += map(_module, further_matrices(model))
    if model.mla is not None and recipe in DYNAMIC:
        kept += [name for name in widths if name.endswith(".kv_b_proj")]
    for pattern in keep:
        found = [name for name in (*widths, "lm_head") if fnmatchcase(name, pattern)]
        if not found:
            raise UserError(
                f"--keep: {pattern!r} matches no linear layer; give a name such as {next(iter(widths))}, "
                f"or a pattern such as '*.down_proj'"
            )
        kept += [name for name in found if name not in kept]
    for name in kept:
        stem, _, leaf = name.rpartition(".")
        for leaves in TOGETHER:
            others = [f"{stem}.{other}" for other in leaves if leaf in leaves]
            apart = [other for other in others if other in widths and other not in kept]
            if apart:
                raise UserError(
                    f"--keep: {name} is kept and {apart[0]} is not, which vLLM computes as one product; keep "
                    f"both, or none"
                )
    if set(widths) <= set(kept):
        raise UserError("--keep: every linear layer is kept, so that none is quantised; give fewer patterns")
    return tuple(kept)


def nearest(model: ModelSpec, tensors: Mapping[str, Tensor], how: Quantisation) -> dict[str, Codes]:
    """The codes of a model's layers by name of their weight in HF files, each number rounded to nearest."""
    return dict(NearestCodes(model, HeldParameters(tensors), how))


def put_back(decoder: Decoder, how: Quantisation, codes: Mapping[str, Codes]) -> None:
    """Give a decoder the weights that the codes stand for, as `load_hf` does for a folder.

    Layers round their inputs from then on, if the recipe says so.
    """
    pieces = [piece for piece in quantised_tensors(decoder.spec) if piece.hf in codes]
    tensors = decoder.tensors()
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    with torch.no_grad():
        for piece in pieces:
            (parameter,) = piece.parameters
            (part,) = piece.split(codes[piece.hf].values(), shapes)
            own = tensors[parameter]
            (own if piece.expert is None else own[piece.expert]).copy_(part)
    if how.recipe in DYNAMIC:
        round_inputs(decoder, how.recipe, [piece.parameters[0] for piece in pieces])


def calibrated(decoder: Decoder, how: Quantisation, batches: Sequence[Tensor]) -> dict[str, Codes]:
    """The codes of a decoder's layers by GPTQ, given tokens (B, T) of calibration.

    Blocks are quantised from the first to the last, each on what those before it, quantised, make of the
    tokens. The decoder has the quantised weights in the end. Raises `UserError` as `check_calibrated` does.
    """
    blocks = _calibrated_blocks(decoder, how, batches, lambda _: nullcontext())
    return {name: codes for found in blocks for name, codes in found.items()}


class CalibratedCodes(Mapping[str, Codes]):
    """The codes of a model's layers by GPTQ, block by block as they are asked for, in the order of files.

    Parameters are read from a source, in fp32; one block, and what the calibration makes of the tokens, is in
    memory. Those of a block are gone when one of a later block is asked for. Raises `UserError` as
    `check_calibrated` does.
    """

    def __init__(
        self, model: ModelSpec, source: ParameterSource, how: Quantisation, batches: Sequence[Tensor]
    ) -> None:
        with torch.device("meta"):
            decoder = Decoder(model)
        self._names = dict.fromkeys(NearestCodes(model, source, how))
        self._blocks = _calibrated_blocks(decoder, how, batches, partial(_held, decoder, source))
        self._found: dict[str, Codes] = {}

    def __getitem__(self, name: str, /) -> Codes:
        """Return the codes of a layer, by the name of its weight in HF files."""
        while name not in self._found:
            self._found = {}  # gone before the next ones are there
            self._found = next(self._blocks)
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def _held(decoder: Decoder, source: ParameterSource, part: str) -> Iterator[None]:
    """Context in which a module of a decoder on the meta device has its parameters, in fp32."""
    module = decoder.get_submodule(part)
    module.to_empty(device="cpu")
    for name, parameter in module.named_parameters():
        parameter.copy_(source[f"{part}.{name}"])
    try:
        yield
    finally:
        module.to("meta")


@torch.no_grad()
def _calibrated_blocks(
    decoder: Decoder,
    how: Quantisation,
    batches: Sequence[Tensor],
    held: Callable[[str], AbstractContextManager[None]],
) -> Iterator[dict[str, Codes]]:
    """Yield the codes of each block's layers; `held` is a context in which a module has its parameters."""
    check_calibrated(decoder.spec)
    with held("embed"):
        xs = [decoder.embed(tokens, torch.arange(tokens.shape[1])) for tokens in batches]
    for layer in range(decoder.spec.layers):
        pieces = {
            piece.parameters[0]: piece
            for piece in quantised_tensors(decoder.spec)
            if piece.parameters[0].startswith(f"blocks.{layer}.") and _module(piece.hf) not in how.kept
        }
        linears = {name: decoder.get_submodule(_module(name)) for name in pieces}
        with held(f"blocks.{layer}"):
            with _hessians(linears) as hessians:
                for x in xs:
                    _through(decoder, layer, x)
            tensors = decoder.tensors()
            found = {
                piece.hf: gptq(piece.join(tensors, torch.float32), hessians[name], how.recipe, how.group)
                for name, piece in pieces.items()
            }
            put_back(decoder, how, found)
            xs = [_through(decoder, layer, x) for x in xs]
        yield found


def check_calibrated(model: ModelSpec) -> None:
    """Raise `UserError` for a model that GPTQ is not computed for: one with experts."""
    if model.moe is not None:
        raise UserError(
            "--algorithm: 'gptq' needs many inputs of every linear layer, and an expert gets few; give rtn"
        )


def _through(decoder: Decoder, layer: int, x_BTD: Tensor) -> Tensor:
    length = x_BTD.shape[1]
    return decoder.through(range(layer, layer + 1), x_BTD, length, torch.arange(length), None)


@contextmanager
def _hessians(linears: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Context in which the sum of x x^T (I, I) over the inputs x (I,) of layers is taken, by name."""
    sums: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> None:
        rows = x.flatten(0, -2).float()
        sums[name] = torch.addmm(sums[name], rows.T, rows) if name in sums else rows.T @ rows

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, inputs: note(name, inputs[0])

    handles = []
    for name, linear in linears.items():
        assert isinstance(linear, Linear)
        handles.append(linear.register_forward_pre_hook(hook(name)))
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()
