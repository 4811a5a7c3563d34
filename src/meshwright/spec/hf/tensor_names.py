"""Names of tensors in HF files: how a family calls the layers of a block, and which of them it joins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TensorNames:
    """Names of the modules of a causal model, the head's apart, which is `lm_head`."""

    norms: Mapping[str, str]
    """Norm of a block -> its module in a layer of the file."""
    linears: Mapping[str, tuple[str, ...]]
    """Module in a layer of the file -> the layers of a block that it joins, in the order of its rows."""
    model: str = "model"
    """The module of all but the head."""
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None
    """Learned positions."""
    final_norm: str = "norm"
    transposed: bool = False
    """True for files that store matrices transposed (GPT-2's Conv1D)."""

    @property
    def embedding_weight(self) -> str:
        """Name of the embedding's weight."""
        return f"{self.model}.{self.embedding}.weight"


LATENTS = {"q_a": "q_a_proj", "kv_a": "kv_a_proj_with_mqa", "kv": "kv_b_proj", "o": "o_proj"}
"""Linear layer of latent attention -> its module in a layer's attention; that of queries has two names."""


def latents_query(has_rank: bool) -> str:
    """Module of the queries of latent attention, which may have a latent of their own."""
    return "q_b_proj" if has_rank else "q_proj"


_ATTENTION = {f"self_attn.{x}_proj": (f"attn.{x}",) for x in "qkvo"}
_MLP = {f"mlp.{x}_proj": (f"mlp.{x}",) for x in ("gate", "up", "down")}

LLAMA = TensorNames(
    {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}, {**_ATTENTION, **_MLP}
)
PARALLEL = replace(LLAMA, norms={"attn_norm": "input_layernorm"})
"""One norm before attention and the feed-forward layer."""
GEMMA = replace(
    LLAMA,
    norms={
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
)
OLMO2 = replace(
    LLAMA,
    norms={"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
)
JOINT_GATE_UP = {**_ATTENTION, "mlp.gate_up_proj": ("mlp.gate", "mlp.up"), "mlp.down_proj": ("mlp.down",)}
GLM4 = TensorNames(
    {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
    JOINT_GATE_UP,
)
PHI3 = replace(
    LLAMA,
    linears={
        "self_attn.qkv_proj": ("attn.q", "attn.k", "attn.v"),
        "self_attn.o_proj": ("attn.o",),
        "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
        "mlp.down_proj": ("mlp.down",),
    },
)
STARCODER2 = replace(LLAMA, linears={**_ATTENTION, "mlp.c_fc": ("mlp.up",), "mlp.c_proj": ("mlp.down",)})
GPT2 = TensorNames(
    {"attn_norm": "ln_1", "mlp_norm": "ln_2"},
    {
        "attn.c_attn": ("attn.q", "attn.k", "attn.v"),
        "attn.c_proj": ("attn.o",),
        "mlp.c_fc": ("mlp.up",),
        "mlp.c_proj": ("mlp.down",),
    },
    model="transformer",
    layers="h",
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    transposed=True,
)
