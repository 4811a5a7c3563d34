"""Tensors of an HF state dict by name, each as a `HfTensor`: how it is made of parameters, and split back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshwright.spec import ModelSpec
from meshwright.spec.hf.families import FAMILIES, ExpertNames

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class HfTensor:
    """One tensor of an HF file, called `hf`: the parameters that it joins along `dim`.

    It may be `transposed` (GPT-2's Conv1D stores its weights transposed), or the part of a parameter that
    belongs to one `expert`, an index of the parameter's dim 0. With `rotary` (heads, channels) the last
    channels of each head's rows are in pairs for rotary positions, where the decoder has halves. An `exact`
    tensor is fp32 whatever the others are.
    """

    hf: str
    parameters: tuple[str, ...]
    dim: int = 0
    transposed: bool = False
    expert: int | None = None
    rotary: tuple[int, int] | None = None
    exact: bool = False

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return its shape in the file, from those of the parameters."""
        shape = self._part(shapes[self.parameters[0]])
        shape[self.dim] = sum(self._sizes(shapes))
        return tuple(shape[::-1] if self.transposed else shape)

    def elements(self, shapes: Shapes) -> int:
        """Return the number of its elements."""
        return prod(self.shape(shapes))

    def split(self, tensor: Tensor, shapes: Shapes) -> list[Tensor]:
        """Return the parts of `parameters` that the file's tensor holds."""
        tensor = tensor.T if self.transposed else tensor
        if self.rotary is not None:
            tensor = _reorder_channels(tensor, *self.rotary, pairs=False)
        return [part.contiguous() for part in tensor.split(self._sizes(shapes), self.dim)]

    def join(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the file's tensor, on the CPU."""
        dtype = torch.float32 if self.exact else dtype
        wholes = [tensors[name].detach() for name in self.parameters]
        parts = wholes if self.expert is None else [whole[self.expert] for whole in wholes]
        parts = [part.to(device="cpu", dtype=dtype) for part in parts]
        joined = torch.cat(parts, self.dim) if len(parts) > 1 else parts[0]
        if self.rotary is not None:
            joined = _reorder_channels(joined, *self.rotary, pairs=True)
        return (joined.T if self.transposed else joined).contiguous()

    def _part(self, shape: Sequence[int]) -> list[int]:
        return list(shape if self.expert is None else shape[1:])

    def _sizes(self, shapes: Shapes) -> list[int]:
        return [self._part(shapes[name])[self.dim] for name in self.parameters]


def _reorder_channels(rows: Tensor, heads: int, channels: int, pairs: bool) -> Tensor:
    """Reorder the last `channels` rows of each head from halves to pairs (0, 1), (2, 3), ..., or back."""
    per_head = rows.unflatten(0, (heads, -1))
    plain, rotary = per_head.split([per_head.shape[1] - channels, channels], 1)
    rotary = rotary.unflatten(1, (2, -1) if pairs else (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([plain, rotary], 1).flatten(0, 1)


def hf_tensors(spec: ModelSpec, stacked: bool = False, paired: bool = True) -> Iterator[HfTensor]:
    """Yield every tensor of the family's files in the model's order, those of one parameter consecutively.

    Published files have a tensor for each expert; with `stacked` they are those of transformers 5, one for
    all. `paired` is True if DeepSeek's rotary channels are in pairs.
    """
    return _gpt2(spec) if FAMILIES[spec.family].conv1d else _llama(spec, stacked, paired)


def _llama(spec: ModelSpec, stacked: bool, paired: bool) -> Iterator[HfTensor]:
    yield HfTensor("model.embed_tokens.weight", ("embed.weight",))
    norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for layer in range(spec.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        if spec.mla is None:
            yield from _attention(spec, f"{ours}.attn", f"{theirs}.self_attn")
        else:
            yield from _latents(spec, f"{ours}.attn", f"{theirs}.self_attn", paired)
        for name, hf in norms.items():
            yield from _leaves(f"{theirs}.{hf}", f"{ours}.{name}")
        if spec.has_experts(layer):
            yield from _mixture(spec, f"{ours}.mlp", theirs, stacked)
        else:
            yield from _mlp(f"{ours}.mlp", f"{theirs}.mlp", spec.mlp_bias)
    yield HfTensor("model.norm.weight", ("head.norm.weight",))
    if not spec.tied:
        yield HfTensor("lm_head.weight", ("head.weight",))


def _leaves(hf: str, ours: str, bias: bool = False) -> Iterator[HfTensor]:
    for leaf in ("weight", "bias") if bias else ("weight",):
        yield HfTensor(f"{hf}.{leaf}", (f"{ours}.{leaf}",))


def _attention(spec: ModelSpec, ours: str, theirs: str) -> Iterator[HfTensor]:
    for x in "qkvo":
        yield from _leaves(f"{theirs}.{x}_proj", f"{ours}.{x}", spec.out_bias if x == "o" else spec.qkv_bias)
    for x in "qk" if spec.qk_norm else "":
        yield from _leaves(f"{theirs}.{x}_norm", f"{ours}.{x}_norm")


def _latents(spec: ModelSpec, ours: str, theirs: str, paired: bool) -> Iterator[HfTensor]:
    assert spec.mla is not None
    names = {"kv_a_norm": "kv_a_layernorm", "kv": "kv_b_proj", "o": "o_proj"}
    if spec.mla.q_rank is not None:
        names |= {"q_a": "q_a_proj", "q_a_norm": "q_a_layernorm"}
    for name, hf in names.items():
        yield from _leaves(f"{theirs}.{hf}", f"{ours}.{name}")
    query = "q_proj" if spec.mla.q_rank is None else "q_b_proj"
    for name, hf, heads in (("q", query, spec.heads), ("kv_a", "kv_a_proj_with_mqa", 1)):
        rotary = (heads, spec.mla.rope_dim) if paired else None
        yield HfTensor(f"{theirs}.{hf}.weight", (f"{ours}.{name}.weight",), rotary=rotary)


def _mlp(ours: str, theirs: str, bias: bool) -> Iterator[HfTensor]:
    for x in ("gate", "up", "down"):
        yield from _leaves(f"{theirs}.{x}_proj", f"{ours}.{x}", bias)


def _mixture(spec: ModelSpec, ours: str, layer: str, stacked: bool) -> Iterator[HfTensor]:
    assert spec.moe is not None
    names = ExpertNames() if stacked else FAMILIES[spec.family].expert_names
    theirs = f"{layer}.{names.module}"
    yield from _leaves(f"{theirs}.gate", f"{ours}.router")
    if spec.moe.bias:
        yield HfTensor(f"{theirs}.gate.e_score_correction_bias", (f"{ours}.router.bias",), exact=True)
    if stacked:
        both = (f"{ours}.experts.gate", f"{ours}.experts.up")
        yield HfTensor(f"{theirs}.experts.gate_up_proj", both, dim=1)
        yield HfTensor(f"{theirs}.experts.down_proj", (f"{ours}.experts.down",))
    else:
        for name, hf in zip(("gate", "up", "down"), names.linears, strict=True):
            for expert in range(spec.moe.experts):
                of_one = f"{theirs}.experts.{expert}.{hf}.weight"
                yield HfTensor(of_one, (f"{ours}.experts.{name}",), expert=expert)
    if spec.moe.shared_ffn:
        yield from _mlp(f"{ours}.shared", f"{theirs}.shared_experts", False)


def _gpt2(spec: ModelSpec) -> Iterator[HfTensor]:
    yield HfTensor("transformer.wte.weight", ("embed.weight",))
    yield HfTensor("transformer.wpe.weight", ("embed.positions",))
    norms = {"ln_1": "attn_norm", "ln_2": "mlp_norm"}
    linears = {
        "attn.c_attn": ("attn.q", "attn.k", "attn.v"),
        "attn.c_proj": ("attn.o",),
        "mlp.c_fc": ("mlp.up",),
        "mlp.c_proj": ("mlp.down",),
    }
    for layer in range(spec.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        for hf, name in norms.items():
            yield from _leaves(f"{theirs}.{hf}", f"{ours}.{name}", bias=True)
        for leaf in ("weight", "bias"):
            for hf, names in linears.items():
                joined = tuple(f"{ours}.{name}.{leaf}" for name in names)
                yield HfTensor(f"{theirs}.{hf}.{leaf}", joined, transposed=leaf == "weight")
    yield from _leaves("transformer.ln_f", "head.norm", bias=True)
    if not spec.tied:
        yield HfTensor("lm_head.weight", ("head.weight",))
