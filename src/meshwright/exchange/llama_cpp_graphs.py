"""The graphs of llama.cpp, by what they compute: one row for each architecture of GGUF files.

Source: llama.cpp's graphs and its lists of tensors (src/models, release b11549 of October 2026).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from meshwright.spec import ModelSpec, MoeSpec
from meshwright.spec.layers import LinearRope, Llama3Rope, LongRope, YarnRope


@dataclass(frozen=True)
class LlamaCppExperts:
    """How a graph of llama.cpp computes mixtures of experts."""

    renormalises: bool | None = True
    """True if the weights of a token's experts add up to 1, False if not; None where files say it."""
    dense_first: bool = False
    """True if the first layers may be without experts."""
    shared: Literal["none", "needed"] = "none"
    """`needed` if all layers with experts must have a shared one; `none` if they may not."""
    sigmoids: bool = False
    """True if files say how logits become scores, and which groups a token chooses from."""


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
    windows_only: bool = True
    """True for a graph with windows if a model must have some."""
    window_rope: bool = False
    """True if layers with a window have positions of their own, which are not scaled."""
    rope_period: int | None = None
    """Each n-th layer has no rotary positions."""
    scales: tuple[str, ...] = ()
    """The factors that files give, by the keys of a model."""
    softcaps: bool = False
    """True if it caps scores and logits."""
    experts: LlamaCppExperts | None = None
    """None for a graph without mixtures of experts."""


_BIASES = {
    "qkv_bias": "biases of queries, keys and values",
    "out_bias": "a bias after attention",
    "mlp_bias": "biases of the feed-forward layer",
}
_ALL = tuple(_BIASES)
_DEEPSEEK = LlamaCppExperts(None, dense_first=True, shared="needed", sigmoids=True)

GRAPHS = {
    "llama": LlamaCppGraph(rotary_pairs=True, biases=_ALL, llama3_rope=True, experts=LlamaCppExperts()),
    "gpt2": LlamaCppGraph(biases=_ALL, requires_biases=True),
    "qwen2": LlamaCppGraph(biases=("qkv_bias",), wide_heads=False),
    "qwen3": LlamaCppGraph(biases=("qkv_bias",)),
    "qwen3moe": LlamaCppGraph(biases=("qkv_bias",), experts=LlamaCppExperts()),
    "qwen2moe": LlamaCppGraph(
        biases=("qkv_bias",), wide_heads=False, experts=LlamaCppExperts(False, shared="needed")
    ),
    "olmoe": LlamaCppGraph(wide_heads=False, experts=LlamaCppExperts(False)),
    "deepseek2": LlamaCppGraph(experts=_DEEPSEEK),
    "glm4moe": LlamaCppGraph(biases=("qkv_bias",), partial_rotation=True, experts=_DEEPSEEK),
    "gpt-oss": LlamaCppGraph(
        head="untied", biases=("qkv_bias", "out_bias"), requires_biases=True, window_period=2,
        experts=LlamaCppExperts(),
    ),
    "smollm3": LlamaCppGraph(rotary_pairs=True, biases=("qkv_bias",), rope_period=4),
    "granite": LlamaCppGraph(
        rotary_pairs=True, biases=_ALL, llama3_rope=True,
        scales=("embedding_scale", "residual_scale", "attention_scale", "logit_scale"),
    ),
    "granitemoe": LlamaCppGraph(
        rotary_pairs=True, biases=("qkv_bias", "out_bias"), llama3_rope=True,
        scales=("embedding_scale", "residual_scale", "attention_scale", "logit_scale"),
        experts=LlamaCppExperts(),
    ),
    "phi3": LlamaCppGraph(wide_heads=False, partial_rotation=True),
    "starcoder2": LlamaCppGraph(wide_heads=False, biases=_ALL, requires_biases=True),
    "gemma2": LlamaCppGraph(head="tied", window_period=2, softcaps=True),
    "gemma3": LlamaCppGraph(window_period=6, window_rope=True),
    "glm4": LlamaCppGraph(rotary_pairs=True, biases=("qkv_bias",), partial_rotation=True),
    "cohere2": LlamaCppGraph(
        rotary_pairs=True, head="tied", wide_heads=False, biases=("qkv_bias",), window_period=4,
        scales=("logit_scale",),
    ),
    "olmo2": LlamaCppGraph(head="untied", wide_heads=False, window_period=4, windows_only=False),
}  # fmt: skip
"""`general.architecture` of a GGUF file -> its graph."""

_BETAS = (32.0, 1.0)
"""YaRN's `beta_fast` and `beta_slow` in llama.cpp, which reads them for other families only."""
_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""The layers of the largest Gemmas, by which llama.cpp finds that their scores have another factor."""


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
        if graph.requires_biases and bias in graph.biases and not getattr(spec, bias):
            yield bias, "a model without biases"
    if spec.activation == "gelu":
        yield "activation", "the exact GELU (it has gelu_tanh)"
    if graph.head == "tied" and not spec.tied:
        yield "tied", "a head of its own"
    if graph.head == "untied" and spec.tied:
        yield "tied", "a head that is the embedding"
    if arch in _LARGE_GEMMA:
        yield from _gemma(spec, _LARGE_GEMMA[arch])
    yield from _positions(spec, graph)
    if arch == "olmo2" and spec.rope_local_base_freq not in (None, spec.rope_theta):
        yield "rope_local_base_freq", "another base of positions in layers with a window"
    if arch == "olmoe" and spec.kv_heads != spec.heads:
        yield "kv_heads", "fewer heads of keys than of queries"
    if spec.moe is not None:
        yield from _experts(spec, spec.moe, graph.experts or LlamaCppExperts())


def _experts(spec: ModelSpec, moe: MoeSpec, graph: LlamaCppExperts) -> Iterator[tuple[str, str]]:
    if graph.renormalises is not None and moe.renormalise != graph.renormalises:
        adds = "do not add up" if graph.renormalises else "add up"
        yield "moe.renormalise", f"experts whose weights {adds} to 1"
    first = moe.dense_first if graph.dense_first else 0
    if [spec.has_experts(layer) for layer in range(spec.layers)] != [n >= first for n in range(spec.layers)]:
        yield "moe", "layers without experts" + (" after the first ones" if graph.dense_first else "")
    if graph.shared == "needed" and not moe.shared_ffn:
        yield "moe.shared_ffn", "a mixture without a shared expert"
    if moe.top_groups < moe.groups and moe.group_score != "top2":
        yield "moe.group_score", "groups that are chosen by their best score"


def _layers(spec: ModelSpec, graph: LlamaCppGraph) -> Iterator[tuple[str, str]]:
    if graph.window_period is None:
        if len({kind.window for kind in spec.kinds}) > 1:
            yield "layer_types", "layers with different windows"
    elif window_period(spec) is None or (window_period(spec) == 1 and graph.windows_only):
        yield "layer_types", "layers whose windows do not skip each n-th layer"
    turning = [kind.rope is not None for kind in spec.layer_kinds]
    if graph.rope_period is not None:
        wanted = [(layer + 1) % graph.rope_period != 0 for layer in range(spec.layers)]
        if turning != wanted:
            yield "rope_layers", f"rotary positions in other layers than all but each {graph.rope_period}-th"


def _gemma(spec: ModelSpec, largest: int) -> Iterator[tuple[str, str]]:
    usual = (spec.hidden // spec.heads if spec.layers == largest else spec.head_dim) ** -0.5
    if abs((spec.attention_scale or spec.head_dim**-0.5) / usual - 1) > 1e-6:
        yield "attention_scale", f"another factor of scores than {usual:.6g} here"
    if abs(spec.embedding_scale / sqrt(spec.hidden) - 1) > 1e-6:
        yield "embedding_scale", "another factor of embeddings than the root of model.hidden"


def _positions(spec: ModelSpec, graph: LlamaCppGraph) -> Iterator[tuple[str, str]]:
    scaling = spec.rope_scaling
    if spec.rope_dim is not None and spec.rope_dim != spec.head_dim and not graph.partial_rotation:
        yield "rope_dim", "channels of a head that do not turn"
    if isinstance(scaling, LongRope):
        yield "rope_scaling", "LongRoPE whose factors depend on the length of a text alone"
    if isinstance(scaling, Llama3Rope) and not graph.llama3_rope:
        yield "rope_scaling", "Llama 3's scaling of positions"
    if scaling is not None and graph.window_rope and not isinstance(scaling, LinearRope):
        yield "rope_scaling", "another scaling of positions than a linear one"
    if isinstance(scaling, YarnRope) and not scaling.truncate:
        yield "rope_scaling.truncate", "YaRN with a ramp between fractions of channels"
    if isinstance(scaling, YarnRope) and (scaling.beta_fast, scaling.beta_slow) != _BETAS:
        yield "rope_scaling", "YaRN with another beta_fast than 32 or another beta_slow than 1"
