"""A plain decoder on one device, written from the papers: the reference of `meshwright verify`.

It imports nothing that it checks, but only the spec. Masks are dense, every head attends by itself, and every
expert computes by itself.

Shapes: n sequences of T tokens, V vocabulary, D hidden, H heads, K key-value heads, d channels of a head (r
of them rotary), v those of its values, E experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright.spec import ModelSpec, MoeSpec
from meshwright.spec.layers import LayerKind
from meshwright.spec.lora import LoraSpec
from meshwright.verify.reference.lora import Drop, added, added_by_expert, no_dropout
from meshwright.verify.reference.rope import rotate, rotations, score_factor

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents in DeepSeek's models, whatever `ModelSpec.norm_eps` is."""

MOST_SCORES = 2**28
"""Bytes of scores and probabilities, of all heads and layers, that are kept for the backward; more are
computed again in it."""

Tap = Callable[[str, Tensor], Tensor]
"""(path of a submodule of `Decoder`, its output) -> the output that is used from there on."""


Linears = Callable[[str, Tensor, Tensor], Tensor]
"""(name, x (..., I), matrix (O, I)) -> x by the matrix of this name, (..., O)."""


class ReferenceRouting(NamedTuple):
    """One layer's routing of a batch: router logits and scores (n, T, E), chosen experts (n, T, k), and
    which of these copies (n, T, k) are within the experts' capacity."""

    logits: Tensor
    scores: Tensor
    experts: Tensor
    admitted: Tensor


class Predictions(NamedTuple):
    """Logits (n, T, V), the routing of each layer with experts, and the logits (n, T, V) of further tokens,
    where these are asked for."""

    logits: Tensor
    routings: dict[int, ReferenceRouting]
    further: Tensor | None


class ReferenceDecoder:
    """A decoder as a function of its weights, which have the names of `Decoder.tensors`.

    `tap` is called with every submodule's path and output; the outputs of a mixture's router are its logits,
    those of its experts (n, T, D) the sum over each token's experts, and those of the head the logits. The
    experts of a layer are `chosen` (n, T, k), where that is given, and not those of the largest scores. With
    `lora` the weights have adapters, too, whose inputs `drop` changes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        tap: Tap | None = None,
        linears: Linears | None = None,
        chosen: Mapping[int, Tensor] | None = None,
        lora: LoraSpec | None = None,
    ) -> None:
        self.spec, self.weights, self.chosen, self.lora = spec, weights, chosen or {}, lora
        self.linears: Linears = linears or (lambda _name, x, weight: x @ weight.T)
        self.drop: Drop = no_dropout
        self.tap: Tap = tap or (lambda _path, x: x)

    def __call__(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, following: Tensor | None = None
    ) -> Predictions:
        """The predictions for tokens, positions and document ids (n, T); with the tokens `following` each (n,
        T) also those of the tokens after them (DeepSeek-AI 2024, DeepSeek-V3, equations 21 to 23)."""
        spec = self.spec
        x = F.embedding(tokens, self.weights["embed.weight"])
        if spec.position == "learned":
            x = x + F.embedding(positions, self.weights["embed.positions"])
        x = self.tap("embed", x * spec.embedding_scale)
        places = documents.to(x.device)
        visible = {kind.window: visible_keys(places, kind.window) for kind in spec.kinds}
        turns = {
            kind.rope: None if kind.rope is None else rotations(kind.rope, positions, x.dtype)
            for kind in spec.kinds
        }
        routings: dict[int, ReferenceRouting] = {}

        def block(layer: int, kind: LayerKind, x: Tensor) -> Tensor:
            path = f"blocks.{layer}"
            normed = self._norm(f"{path}.attn_norm", x)
            y = self._attention(f"{path}.attn", normed, kind, turns[kind.rope], visible[kind.window])
            x = x + spec.residual_scale * self._norm(f"{path}.attn_post_norm", y)
            normed = normed if spec.parallel_block else self._norm(f"{path}.mlp_norm", x)
            if kind.has_experts:
                y, routings[layer] = self._mixture(f"{path}.mlp", normed)
            else:
                y = self._mlp(f"{path}.mlp", normed)
            return self.tap(path, x + spec.residual_scale * self._norm(f"{path}.mlp_post_norm", y))

        for layer, kind in enumerate(spec.layer_kinds):
            x = block(layer, kind, x)
        hidden = self._norm("head.norm", x)
        logits = self.tap("head", self._logits(hidden))
        if following is None:
            return Predictions(logits, routings, None)
        last = f"blocks.{spec.layers}"
        embedded = spec.embedding_scale * F.embedding(following, self.weights["embed.weight"])
        both = [self._norm(f"{last}.enorm", embedded), self._norm(f"{last}.hnorm", hidden)]
        joined = torch.cat(both, -1) @ self.weights[f"{last}.eh_proj.weight"].T
        x = block(spec.layers, spec.layer_kinds[-1], self.tap(f"{last}.eh_proj", joined))
        further = self.tap("head", self._logits(self._norm("head.mtp_norm", x)))
        return Predictions(logits, routings, further)

    # Layers -----------------------------------------------------------------------------------------

    def _logits(self, hidden: Tensor) -> Tensor:
        weight = self.weights["embed.weight" if self.spec.tied else "head.weight"]
        return _capped(self.spec.logit_scale * (hidden @ weight.T), self.spec.logit_softcap)

    def _linear(self, path: str, x: Tensor) -> Tensor:
        name = f"{path}.weight"

        def linear(x: Tensor) -> Tensor:
            return self.linears(name, x, self.weights[name])

        y = linear(x) + added(self.lora, name, x, self.weights, self.drop, linear)
        bias = self.weights.get(f"{path}.bias")
        return self.tap(path, y if bias is None else y + bias)

    def _rms_norm(self, path: str, x: Tensor, eps: float) -> Tensor:
        """x over its root mean square (Zhang and Sennrich 2019)."""
        scale = (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        weight = self.weights[f"{path}.weight"]
        return self.tap(path, x / scale * (1 + weight if self.spec.norm_unit_offset else weight))

    def _norm(self, path: str, x: Tensor) -> Tensor:
        """The norm of the residual stream, RMSNorm or LayerNorm (Ba et al. 2016); x where there is none."""
        eps = self.spec.norm_eps
        if f"{path}.weight" not in self.weights:
            return x
        if self.spec.norm == "rmsnorm":
            return self._rms_norm(path, x, eps)
        centred = x - x.mean(-1, keepdim=True)
        unit = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        bias = self.weights[f"{path}.bias"] if self.spec.norm_bias else 0
        return self.tap(path, unit * self.weights[f"{path}.weight"] + bias)

    def _attention(
        self, path: str, x: Tensor, kind: LayerKind, turns: Tensor | None, visible: Tensor
    ) -> Tensor:
        """softmax(q k^T / sqrt(d)) v of each head by itself (Vaswani et al. 2017), x (n, T, D) -> (n, T,
        D)."""
        spec = self.spec
        scale = 1 / math.sqrt(spec.head_dim) if spec.attention_scale is None else spec.attention_scale
        if kind.attention == "gqa":
            q, k, v = self._grouped_heads(path, x, turns)
        else:
            assert turns is not None and kind.rope is not None
            q, k, v = self._latent_heads(path, x, turns)
            scale *= score_factor(kind.rope)
        group = spec.heads // k.shape[2]
        computed: Callable[..., Tensor] = attend
        if 2 * spec.layers * spec.heads * visible.numel() * x.itemsize > MOST_SCORES:
            computed = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        sinks = self.weights[f"{path}.sinks"] if spec.attention_sinks else [None] * spec.heads
        mixed = [
            computed(
                *(q[:, :, head], k[:, :, head // group], v[:, :, head // group]),
                *(visible, scale, spec.attention_softcap, sinks[head]),
            )
            for head in range(spec.heads)
        ]
        return self.tap(path, self._linear(f"{path}.o", torch.cat(mixed, -1)))

    def _grouped_heads(self, path: str, x: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (n, T, H, d), keys and values (n, T, K, d) (Ainslie et al. 2023)."""
        spec = self.spec
        q, k, v = (self._linear(f"{path}.{which}", x) for which in ("q", "k", "v"))
        if spec.qk_norm and spec.qk_norm_over == "head":
            q, k = (each.unflatten(-1, (-1, spec.head_dim)) for each in (q, k))
        if spec.qk_norm:
            q = self._rms_norm(f"{path}.q_norm", q, spec.norm_eps)
            k = self._rms_norm(f"{path}.k_norm", k, spec.norm_eps)
        q, k, v = (each.reshape(*x.shape[:2], -1, spec.head_dim) for each in (q, k, v))
        if turns is not None:
            q, k = rotate(q, turns), rotate(k, turns)
        return q, k, v

    def _latent_heads(self, path: str, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (n, T, H, d) and values (n, T, H, v) (DeepSeek-AI 2024, DeepSeek-V2, equations 9
        to 19 and 37 to 47): the rotary channels of a head are its last, those of all keys are one vector."""
        spec, mla = self.spec, self.spec.mla
        assert mla is not None
        plain = spec.head_dim - mla.rope_dim
        latent_q = x
        if mla.q_rank is not None:
            latent_q = self._rms_norm(f"{path}.q_a_norm", self._linear(f"{path}.q_a", x), LATENT_EPS)
        q = self._linear(f"{path}.q", latent_q).unflatten(-1, (spec.heads, spec.head_dim))
        kv_a = self._linear(f"{path}.kv_a", x)
        latent = self._rms_norm(f"{path}.kv_a_norm", kv_a[..., : mla.kv_rank], LATENT_EPS)
        kv = self._linear(f"{path}.kv", latent).unflatten(-1, (spec.heads, plain + mla.v_dim))
        rotary = rotate(kv_a[..., mla.kv_rank :].unsqueeze(2), turns)
        q = torch.cat([q[..., :plain], rotate(q[..., plain:], turns)], -1)
        k = torch.cat([kv[..., :plain], rotary.expand(-1, -1, spec.heads, -1)], -1)
        return q, k, kv[..., plain:]

    def _mlp(self, path: str, x: Tensor) -> Tensor:
        """The feed-forward layer: SwiGLU or GEGLU (Shazeer 2020), GELU or its tanh form (Hendrycks and Gimpel
        2016)."""
        activation = _ACTIVATIONS[self.spec.activation]
        inner = self._linear(f"{path}.up", x)
        if self.spec.activation in ("swiglu", "geglu_tanh"):
            inner = activation(self._linear(f"{path}.gate", x)) * inner
        else:
            inner = activation(inner)
        return self.tap(path, self._linear(f"{path}.down", inner))

    def _mixture(self, path: str, x: Tensor) -> tuple[Tensor, ReferenceRouting]:
        """Each token's experts, weighted, plus the shared experts (Shazeer et al. 2017; Dai et al. 2024)."""
        moe = self.spec.moe
        assert moe is not None
        logits = x @ self.weights[f"{path}.router.weight"].T + self.weights.get(
            f"{path}.router.logit_bias", 0
        )
        logits = self.tap(f"{path}.router", logits)
        scores = torch.sigmoid(logits) if moe.router == "sigmoid" else torch.softmax(logits, -1)
        experts = self.chosen.get(int(path.split(".")[1]))
        if experts is None:
            experts = choose_experts(moe, scores.detach(), self.weights.get(f"{path}.router.bias"))
        routing = ReferenceRouting(logits, scores, experts, within_capacity(moe, experts))
        weights = scores.gather(-1, experts)
        if moe.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = moe.scale * weights * routing.admitted
        activation = _clamped_swiglu if moe.activation == "clamped_swiglu" else _swiglu

        def drop(name: str, some: Tensor, expert: int) -> Tensor:
            every = some.new_zeros(*x.shape[:2], some.shape[1])
            placed = every.flatten(0, 1).index_copy(0, rows, some).view_as(every)
            return self.drop(name, placed, expert).flatten(0, 1)[rows]

        def linear(which: str, x: Tensor, scale: Tensor | float = 1) -> Tensor:
            name = f"{path}.experts.{which}"
            y = self.linears(name, x, self.weights[name][expert])
            y = y + added_by_expert(self.lora, name, expert, x, self.weights, drop)
            return y + scale * self.weights[f"{name}_bias"][expert] if moe.expert_bias else y

        tokens = x.flatten(0, 1)
        y = torch.zeros_like(tokens)
        for expert in range(moe.experts):
            sent = (experts == expert) & routing.admitted
            rows = sent.any(-1).flatten().nonzero().squeeze(1)
            inner = activation(linear("gate", tokens[rows]), linear("up", tokens[rows]))
            weight = (weights * sent).sum(-1).flatten()[rows].unsqueeze(1)
            y = y.index_add(0, rows, linear("down", inner * weight, weight))
        y = self.tap(f"{path}.experts", y.view_as(x))
        if moe.shared_ffn:
            shared = self._mlp(f"{path}.shared", x)
            if moe.shared_gate:
                logit = self.tap(f"{path}.shared_gate", x @ self.weights[f"{path}.shared_gate.weight"].T)
                shared = torch.sigmoid(logit) * shared
            y = y + shared
        return self.tap(path, y), routing


# Activations ---------------------------------------------------------------------------------------------


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _silu(gate) * up


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The activation of gpt-oss's experts (OpenAI 2025, its model card and code)."""
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


_ACTIVATIONS = {"swiglu": _silu, "geglu_tanh": _gelu_tanh, "gelu": _gelu, "gelu_tanh": _gelu_tanh}

# Attention -----------------------------------------------------------------------------------------------


def visible_keys(documents: Tensor, window: int | None) -> Tensor:
    """Mask (n, T, T) of the keys that each query attends to, given document ids (n, T).

    A token sees itself and earlier tokens of its document, at most `window` of them, itself included.
    """
    place = torch.arange(documents.shape[1], device=documents.device)
    distance = place.unsqueeze(1) - place
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return near & (documents.unsqueeze(2) == documents.unsqueeze(1))


def _capped(x: Tensor, softcap: float | None) -> Tensor:
    """Logits that stay between -softcap and softcap (Gemma Team 2024, Gemma 2, §2)."""
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Attention (n, T, v) of one head: q and k (n, T, d), v (n, T, v), `visible` (n, T, T). A `sink` is one
    key more, with this score for all queries and the value 0 (OpenAI 2025, gpt-oss)."""
    seen = _capped(q @ k.transpose(1, 2) * scale, softcap).masked_fill(~visible, -math.inf)
    if sink is None:
        return torch.softmax(seen, -1) @ v
    with_sink = torch.cat([seen, sink.expand(*seen.shape[:2], 1)], -1)
    return torch.softmax(with_sink, -1)[..., :-1] @ v


# Experts -------------------------------------------------------------------------------------------------


def choose_experts(moe: MoeSpec, scores: Tensor, bias: Tensor | None) -> Tensor:
    """The experts (n, T, k) with the largest scores (n, T, E) plus `bias` (E,), within the best groups.

    A group counts by the sum of its two best (DeepSeek-AI 2024, DeepSeek-V3, §2.1.2), or by its best
    (DeepSeek-AI 2024, DeepSeek-V2, §2.2.2). Among equal values `torch.topk` chooses by their places in the
    row alone, so here as in every layout.
    """
    values = scores if bias is None else scores + bias
    if moe.top_groups < moe.groups:
        grouped = values.unflatten(-1, (moe.groups, -1))
        best = (
            F.one_hot(scores_of_groups(moe, values).topk(moe.top_groups).indices, moe.groups).sum(-2).bool()
        )
        values = grouped.masked_fill(~best.unsqueeze(-1), -math.inf).flatten(-2)
    return values.topk(moe.top_k).indices


def scores_of_groups(moe: MoeSpec, values: Tensor) -> Tensor:
    """The value (n, T, groups) that each group counts by, from those of its experts (n, T, E)."""
    grouped = values.unflatten(-1, (moe.groups, -1))
    if moe.group_score == "max":
        return grouped.amax(-1)
    return grouped.sort(-1, descending=True).values[..., :2].sum(-1)


def within_capacity(moe: MoeSpec, experts: Tensor) -> Tensor:
    """Mask (n, T, k) of the copies that are among the first `capacity` of their sequence at their expert, in
    the order of tokens (Lepikhin et al. 2021); all, where there is no capacity."""
    capacity = moe.capacity(experts.shape[1])
    if capacity is None:
        return torch.ones_like(experts, dtype=torch.bool)
    copies = experts.flatten(1)
    sent_so_far = F.one_hot(copies, moe.experts).cumsum(1)
    return (sent_so_far.gather(2, copies.unsqueeze(2)) <= capacity).view_as(experts)
