"""The graphs of llama.cpp, by what they compute: one row for each architecture of GGUF files.

Source: llama.cpp's graphs and its lists of tensors (src/models, release b11549 of October 2026).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from meshwright.spec import ModelSpec
from meshwright.spec.layers import LinearRope, Llama3Rope, YarnRope


@dataclass(frozen=True)
class LlamaCppGraph:
    """A graph of llama.cpp, as far as it differs from others."""

    rotary_pairs: bool = False
    """True if the channels that turn together are in pairs, and not in halves."""
    head: Literal["any", "tied", "untied"] = "any"
    """`tied` or `untied` where a head must be the embedding or may not be; `any` otherwise."""
    biases: tuple[str, ...] = ()
    """The biases that it adds, by the keys of a model."""
    wide_heads: bool = True
    """False if the channels of all heads must be as many as those of the model."""
    requires_biases: bool = False
    """True if a model must have all of these."""
    llama3_rope: bool = False
    """True if it divides frequencies by the factors of a tensor."""
    partial_rotation: bool = False
    """True if some channels of a head may not turn."""
    window_period: int | None = None
    """Its layers but for each n-th have a window: n by default. None if it computes no windows."""
    window_rope: bool = False
    """True if layers with a window have positions of their own, which are not scaled."""
    rope_period: int | None = None
    """Each n-th layer has no rotary positions."""
    scales: tuple[str, ...] = ()
    """The factors that files give, by the keys of a model."""


_BIASES = {
    "qkv_bias": "biases of queries, keys and values",
    "out_bias": "a bias after attention",
    "mlp_bias": "biases of the feed-forward layer",
}
_ALL = tuple(_BIASES)

GRAPHS = {
    "llama": LlamaCppGraph(rotary_pairs=True, biases=_ALL, llama3_rope=True),
    "gpt2": LlamaCppGraph(biases=_ALL, requires_biases=True),
    "qwen2": LlamaCppGraph(biases=("qkv_bias",), wide_heads=False),
    "qwen3": LlamaCppGraph(biases=("qkv_bias",)),
    "qwen3moe": LlamaCppGraph(biases=("qkv_bias",)),
    "deepseek2": LlamaCppGraph(),
    "smollm3": LlamaCppGraph(rotary_pairs=True, biases=("qkv_bias",), rope_period=4),
    "granite": LlamaCppGraph(
        rotary_pairs=True, biases=_ALL, llama3_rope=True,
        scales=("embedding_scale", "residual_scale", "attention_scale", "logit_scale"),
    ),
    "phi3": LlamaCppGraph(wide_heads=False, partial_rotation=True),
    "starcoder2": LlamaCppGraph(wide_heads=False, biases=_ALL, requires_biases=True),
    "gemma3": LlamaCppGraph(window_period=6, window_rope=True),
    "glm4": LlamaCppGraph(rotary_pairs=True, biases=("qkv_bias",), partial_rotation=True),
    "cohere2": LlamaCppGraph(
        rotary_pairs=True, head="tied", wide_heads=False, biases=("qkv_bias",), window_period=4,
        scales=("logit_scale",),
    ),
    "olmo2": LlamaCppGraph(head="untied", wide_heads=False),
}  # fmt: skip
"""`general.architecture` of a GGUF file -> its graph."""

_BETAS = (32.0, 1.0)
"""YaRN's `beta_fast` and `beta_slow` in llama.cpp, which reads them for other families only."""
_LARGE_GEMMA = 62
"""The layers of the largest Gemma 3, by which llama.cpp finds that its scores have another factor."""


def window_period(spec: ModelSpec) -> int | None:
    """Return n where each n-th layer alone has no window, 1 where none has one; None for another order."""
    whole = [kind.window is None for kind in spec.layer_kinds]
    period = whole.index(True) + 1 if any(whole) else spec.layers + 1
    ordered = [(layer + 1) % period == 0 for layer in range(spec.layers)]
    return period if whole == ordered else None


def not_computed(spec: ModelSpec, arch: str) -> Iterator[tuple[str, str]]:
    """Yield keys of a model with what the graph of `arch` leaves out, but for experts and latents."""
    graph = GRAPHS[arch]
    yield from _layers(spec, graph)
    if spec.heads * spec.head_dim != spec.hidden and not graph.wide_heads:
        yield "head_dim", "heads that are not as wide together as model.hidden"
    for bias, what in _BIASES.items():
        if getattr(spec, bias) and bias not in graph.biases:
            yield bias, what
        if graph.requires_biases and not getattr(spec, bias):
            yield bias, "a model without biases"
    if spec.activation == "gelu":
        yield "activation", "the exact GELU (it has gelu_tanh)"
    if graph.head == "tied" and not spec.tied:
        yield "tied", "a head of its own"
    if graph.head == "untied" and spec.tied:
        yield "tied", "a head that is the embedding"
    if arch == "gemma3":
        yield from _gemma3(spec)
    yield from _positions(spec, graph)


def _layers(spec: ModelSpec, graph: LlamaCppGraph) -> Iterator[tuple[str, str]]:
    if graph.window_period is None:
        if len({kind.window for kind in spec.kinds}) > 1:
            yield "layer_types", "layers with different windows"
    elif window_period(spec) in (None, 1):
        yield "layer_types", "layers whose windows do not skip each n-th layer"
    turning = [kind.rope is not None for kind in spec.layer_kinds]
    if graph.rope_period is not None:
        wanted = [(layer + 1) % graph.rope_period != 0 for layer in range(spec.layers)]
        if turning != wanted:
            yield "rope_layers", f"rotary positions in other layers than all but each {graph.rope_period}-th"


def _gemma3(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    usual = (spec.hidden / spec.heads if spec.layers == _LARGE_GEMMA else spec.head_dim) ** -0.5
    if abs((spec.attention_scale or spec.head_dim**-0.5) / usual - 1) > 1e-6:
        yield "attention_scale", f"another factor of scores than {usual:.6g} here"
    if abs(spec.embedding_scale / sqrt(spec.hidden) - 1) > 1e-6:
        yield "embedding_scale", "another factor of embeddings than the root of model.hidden"


def _positions(spec: ModelSpec, graph: LlamaCppGraph) -> Iterator[tuple[str, str]]:
    scaling = spec.rope_scaling
    if spec.rope_dim is not None and spec.rope_dim != spec.head_dim and not graph.partial_rotation:
        yield "rope_dim", "channels of a head that do not turn"
    if isinstance(scaling, Llama3Rope) and not graph.llama3_rope:
        yield "rope_scaling", "Llama 3's scaling of positions"
    if scaling is not None and graph.window_rope and not isinstance(scaling, LinearRope):
        yield "rope_scaling", "another scaling of positions than a linear one"
    if isinstance(scaling, YarnRope) and not scaling.truncate:
        yield "rope_scaling.truncate", "YaRN with a ramp between fractions of channels"
    if isinstance(scaling, YarnRope) and (scaling.beta_fast, scaling.beta_slow) != _BETAS:
        yield "rope_scaling", "YaRN with another beta_fast than 32 or another beta_slow than 1"
