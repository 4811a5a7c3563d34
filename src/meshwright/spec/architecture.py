"""The architecture of a model: every field that the decoder, the planner and the HF converters read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field, model_validator

from meshwright.spec.base import MAX_HEADS, MAX_LAYERS, MAX_LENGTH, MAX_WIDTH, FrozenModel
from meshwright.spec.errors import UserError
from meshwright.spec.hf.config_read import has_weights, read_hf_config
from meshwright.spec.hf.families import FamilyName
from meshwright.spec.layers import Activation, LayerKind, LayerType, RopeScaling, RopeSpec
from meshwright.spec.model_names import preset_named, why_unknown
from meshwright.spec.moe_mla import MlaSpec, MoeSpec
from meshwright.spec.presets import PRESETS

RANDOM = "random"
"""The value of `model.weights` of a run that draws its initial weights."""


class Architecture(FrozenModel):
    """Fields of a decoder-only transformer, and dimensions that follow from them directly.

    `preset` or `hf` fill the fields; those that are given take precedence. Use `ModelSpec`, which
    adds the counts of parameters and FLOPs.
    """

    preset: str | None = Field("tiny", description="a preset, or another name of its model (`spec presets`)")
    hf: str | None = Field(
        None,
        description="a folder with an HF config.json, or the file itself: its architecture; train also takes "
        "the weights and the tokenizer that the folder has",
    )
    weights: str = Field(
        RANDOM,
        min_length=1,
        description="what a run starts from: 'random', the folder of an HF model or of a run, or that of one "
        "of its checkpoints; default model.hf where that folder has weights",
    )
    family: FamilyName = Field("llama", description="names used by HF export")
    layers: int = Field(ge=1, le=MAX_LAYERS)
    hidden: int = Field(ge=1, le=MAX_WIDTH)
    ffn: int = Field(ge=1, le=MAX_WIDTH)
    heads: int = Field(ge=1, le=MAX_HEADS)
    kv_heads: int = Field(ge=1, le=MAX_HEADS)
    head_dim: int = Field(ge=1, le=MAX_HEADS)
    vocab_size: int = Field(ge=2, le=MAX_LENGTH)
    max_seq_len: int = Field(2048, ge=1, le=MAX_LENGTH, description="a hard limit for learned positions only")
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = Field(1e-5, gt=0)
    norm_bias: bool = Field(True, description="a bias in each LayerNorm")
    norm_unit_offset: bool = Field(False, description="an RMSNorm multiplies by 1 + its weight")
    norm_placement: Literal["pre", "post", "both"] = Field(
        "pre", description="norms before attention and the feed-forward layer, after them, or both"
    )
    parallel_block: bool = Field(
        False, description="attention and the feed-forward layer have one input, and their outputs are added"
    )
    activation: Activation = "swiglu"
    embedding_scale: float = Field(1.0, gt=0, description="factor on the embeddings of tokens")
    residual_scale: float = Field(1.0, gt=0, description="factor on what a layer adds to the residual stream")
    logit_scale: float = Field(1.0, gt=0, description="factor on the logits")
    attention_scale: float | None = Field(
        None, gt=0, description="factor on the scores of attention; default 1 / sqrt(head_dim)"
    )
    attention_softcap: float | None = Field(
        None, gt=0, description="c of c tanh(score / c), which takes the place of a score of attention"
    )
    logit_softcap: float | None = Field(
        None, gt=0, description="c of c tanh(logit / c), which takes the place of a logit"
    )
    attention_sinks: bool = Field(
        False, description="a learned logit of each head in the sum of its softmax, without a value"
    )
    position: Literal["rope", "learned"] = "rope"
    rope_theta: float = Field(10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    rope_dim: int | None = Field(
        None, ge=2, description="channels of a head that carry the position; default all of head_dim"
    )
    rope_layers: tuple[bool, ...] | None = Field(
        None,
        min_length=1,
        description="for each layer whether it has rotary positions; fewer than layers repeat; default all",
    )
    sliding_window: int | None = Field(
        None, ge=1, description="attend to this many positions, one's own included"
    )
    layer_types: tuple[LayerType, ...] | None = Field(
        None,
        min_length=1,
        description="for each layer 'sliding_attention', which is by the window, or 'full_attention'; fewer "
        "types than layers repeat; by default the window is that of all layers",
    )
    rope_local_base_freq: float | None = Field(
        None,
        gt=0,
        description="rope_theta of layers with sliding_attention, whose positions are then not scaled",
    )
    qk_norm: bool = Field(False, description="RMSNorm of queries and keys")
    qk_norm_over: Literal["head", "all"] = Field(
        "head", description="the channels that such a norm is over: those of a head, or of all heads"
    )
    qkv_bias: bool = False
    out_bias: bool = Field(False, description="a bias on the attention's output projection")
    mlp_bias: bool = False
    tied: bool = Field(False, description="the embedding is also the output head")
    init_std: float = Field(0.02, gt=0)
    mup_base_hidden: int | None = Field(
        None,
        ge=1,
        le=MAX_WIDTH,
        description="muP (Yang et al. 2022): the hidden that train.lr and init_std were found at",
    )
    mtp_num_layers: int = Field(
        0,
        ge=0,
        description="layers after the last that predict one more token each in training, with the embedding "
        "and the head of the model (DeepSeek-V3): 0 or 1",
    )
    moe: MoeSpec | None = Field(None, description="experts in place of the feed-forward layer")
    mla: MlaSpec | None = Field(None, description="attention over latents in place of grouped queries")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        if not isinstance(given, dict) or cls.model_fields.keys() <= given.keys():
            return given  # a whole record, such as run.json's: it needs no file that may have moved since
        hf, preset = given.get("hf"), given.get("preset", "tiny")
        base: dict[str, Any] = {}
        if hf is not None:
            if given.get("preset") is not None:
                raise UserError(
                    f"model.preset: {preset!r} is given together with model.hf = {hf!r}; give one of them"
                )
            if not given.keys() >= {*_REQUIRED, "preset"}:  # a resolved spec needs the folder no more
                weights = hf if has_weights(hf) else RANDOM
                base = {"preset": None, **read_hf_config(hf), "weights": weights}
        elif preset is not None:
            given = {**given, "preset": _preset(preset)}
            base = dict(PRESETS[given["preset"]])
        for table in ("moe", "mla"):  # keys given for a preset's table win one by one
            if isinstance(given.get(table), dict) and isinstance(base.get(table), dict):
                given = {**given, table: {**base[table], **given[table]}}
        full = {**base, **given}
        return {**full, **_derived(full, given)}

    @property
    def norms_before(self) -> bool:
        """True if norms stand before attention and the feed-forward layer."""
        return self.norm_placement != "post"

    @property
    def norms_after(self) -> bool:
        """True if norms stand after attention and the feed-forward layer, before their outputs are added."""
        return self.norm_placement != "pre"

    @property
    def rereads_outputs(self) -> bool:
        """True if the backward reads what feed-forward layers return: for norms after them, or for gates."""
        return self.norms_after or (self.moe is not None and self.moe.shared_gate)

    @property
    def block_norms(self) -> int:
        """Number of norms of the residual stream in a block."""
        return 1 if self.parallel_block else 2 * (self.norms_before + self.norms_after)

    @property
    def gated(self) -> bool:
        """True if the feed-forward layer multiplies by a gate."""
        return self.activation in ("swiglu", "geglu_tanh")

    @property
    def v_dim(self) -> int:
        """Channels of the values of a head."""
        return self.head_dim if self.mla is None else self.mla.v_dim

    @property
    def mtp_layers(self) -> range:
        """Numbers of the layers after the last that predict further tokens; each is of the last's kind."""
        return range(self.layers, self.layers + self.mtp_num_layers)

    @property
    def head_embeds(self) -> bool:
        """True if the weight of the embedding is read beside the head, too: as its matrix, or for the tokens
        after which further ones are predicted. Then embedding and head are one unit."""
        return self.tied or self.mtp_num_layers > 0

    def has_experts(self, layer: int) -> bool:
        """True if layer `layer` (from 0) has experts."""
        return self.moe is not None and self.moe.has_experts(min(layer, self.layers - 1))

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer, also of those that predict further tokens."""
        return self.layer_kinds[min(layer, self.layers - 1)]

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return _layer_kinds(self)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of its layers: those without experts first, then in order of appearance."""
        return tuple(sorted(self.last_layers, key=lambda kind: kind.has_experts))

    @property
    def last_layers(self) -> Mapping[LayerKind, int]:
        """The number of the last layer of each kind, in order of each kind's first layer."""
        return _last_layers(self)

    @property
    def kind_numbers(self) -> tuple[int, ...]:
        """For each layer, where its kind stands in `last_layers`: quicker to look up than the kind itself."""
        return _kind_numbers(self)


@lru_cache(maxsize=64)
def _kind_numbers(model: Architecture) -> tuple[int, ...]:
    numbers = {kind: number for number, kind in enumerate(model.last_layers)}
    return tuple(numbers[kind] for kind in model.layer_kinds)


@lru_cache(maxsize=64)
def _last_layers(model: Architecture) -> Mapping[LayerKind, int]:
    return {kind: layer for layer, kind in enumerate(model.layer_kinds)}


@lru_cache(maxsize=64)
def _layer_kinds(model: Architecture) -> tuple[LayerKind, ...]:
    rope = local = None
    if model.position == "rope":
        turning = (model.rope_dim or model.head_dim) if model.mla is None else model.mla.rope_dim
        rope = local = RopeSpec(model.rope_theta, turning, model.rope_scaling)
        if model.rope_local_base_freq is not None:
            local = RopeSpec(model.rope_local_base_freq, turning, None)
    types, rotary = model.layer_types or ("sliding_attention",), model.rope_layers or (True,)
    found = []
    for layer in range(model.layers):
        slides = types[layer % len(types)] == "sliding_attention"
        own = local if slides else rope
        found.append(
            LayerKind(
                attention="gqa" if model.mla is None else "mla",
                window=model.sliding_window if slides else None,
                rope=own if rotary[layer % len(rotary)] else None,
                mlp="experts" if model.has_experts(layer) else "dense",
            )
        )
    return tuple(found)


_REQUIRED = frozenset(name for name, field in Architecture.model_fields.items() if field.is_required())
"""The fields that a preset or an HF config gives."""


def _preset(name: str) -> str:
    """The preset of a model's name. Raises `UserError`."""
    if (preset := preset_named(name)) is None:
        raise UserError(f"model.preset: {name!r} {why_unknown(name, 'is not the name of a preset')}")
    return preset


def _derived(full: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return fields that follow from others if they are not given: kv_heads, and head_dim from hidden.

    The head_dim of a preset is dropped if the user changes hidden or heads but does not give head_dim.
    """
    derived: dict[str, Any] = {}
    heads, hidden = full.get("heads"), full.get("hidden")
    resized = "head_dim" not in given and ("heads" in given or "hidden" in given)
    if (full.get("head_dim") is None or resized) and isinstance(heads, int) and isinstance(hidden, int):
        if heads < 1 or hidden % heads:
            raise UserError(
                f"model.heads: {heads} heads do not divide hidden {hidden}; "
                f"give model.head_dim, or heads that divide {hidden}"
            )
        derived["head_dim"] = hidden // heads
    if full.get("kv_heads") is None and heads is not None:
        derived["kv_heads"] = heads
    return derived
