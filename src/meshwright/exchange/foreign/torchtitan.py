"""Names of torchtitan's Llama 3 and Qwen3, in `step-N` directories of torch's distributed checkpoints.

Llama 3's queries and keys have the channels that turn together in pairs, as in Meta's files, Qwen3's in
halves. Names up to version 0.2 (`attention.wq`, `output`, `moe.experts.w1`) and from 0.3 on
(`attention.qkv_linear.wq`, `lm_head`, `moe.routed_experts.inner_experts.w1_EFD`) are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshwright.exchange.foreign.naming import Naming
from meshwright.exchange.hf_state_dict import HfTensor, Rotary
from meshwright.spec import ModelSpec, UserError

_PAIRED = {"llama": True, "qwen3": False, "qwen3_moe": False}
"""Families -> whether rotary channels are in pairs."""
_MLP = {"feed_forward.w1": "mlp.gate", "feed_forward.w3": "mlp.up", "feed_forward.w2": "mlp.down"}
_EXPERTS = {"w1": ("gate", "EFD"), "w3": ("up", "EFD"), "w2": ("down", "EDF")}


def _pieces(spec: ModelSpec, names: Collection[str], where: str) -> Iterator[HfTensor]:
    """Yield the tensors of a model. Raises `UserError` for families whose torchtitan names are not known."""
    if spec.family not in _PAIRED:
        raise UserError(
            f"{where}: torchtitan's names are read for {', '.join(_PAIRED)}, and the config.json is of a "
            f"{spec.family}; export the model by torchtitan's own `convert_to_hf.py`, and give that folder"
        )
    projections = "attention"
    if any(".attention.qkv_linear." in name for name in names):
        projections += ".qkv_linear"
    yield HfTensor("tok_embeddings.weight", ("embed.weight",))
    for layer in range(spec.layers):
        theirs, ours = f"layers.{layer}", f"blocks.{layer}"
        heads = {"q": spec.heads, "k": spec.kv_heads, "v": 0}
        for x, count in heads.items():
            rotary = (Rotary(count, spec.head_dim, first=True),) if count and _PAIRED[spec.family] else ()
            for leaf in ("weight", "bias") if spec.qkv_bias else ("weight",):
                parameter = f"{ours}.attn.{x}.{leaf}"
                yield HfTensor(f"{theirs}.{projections}.w{x}.{leaf}", (parameter,), rotary=rotary)
        yield HfTensor(f"{theirs}.attention.wo.weight", (f"{ours}.attn.o.weight",))
        for x in "qk" if spec.qk_norm else "":
            yield HfTensor(f"{theirs}.attention.{x}_norm.weight", (f"{ours}.attn.{x}_norm.weight",))
        yield HfTensor(f"{theirs}.attention_norm.weight", (f"{ours}.attn_norm.weight",))
        yield HfTensor(f"{theirs}.ffn_norm.weight", (f"{ours}.mlp_norm.weight",))
        if spec.has_experts(layer):
            yield from _experts(f"{theirs}.moe", f"{ours}.mlp", names)
        else:
            for name, mine in _MLP.items():
                yield HfTensor(f"{theirs}.{name}.weight", (f"{ours}.{mine}.weight",))
    yield HfTensor("norm.weight", ("head.norm.weight",))
    if not spec.tied:
        head = "output" if "output.weight" in names else "lm_head"
        yield HfTensor(f"{head}.weight", ("head.weight",))


def _experts(theirs: str, ours: str, names: Collection[str]) -> Iterator[HfTensor]:
    yield HfTensor(f"{theirs}.router.gate.weight", (f"{ours}.router.weight",))
    newer = any(name.startswith(f"{theirs}.routed_experts.") for name in names)
    for name, (mine, dims) in _EXPERTS.items():
        stored = f"routed_experts.inner_experts.{name}_{dims}" if newer else f"experts.{name}"
        yield HfTensor(f"{theirs}.{stored}", (f"{ours}.experts.{mine}",))


TORCHTITAN = Naming(
    "torchtitan",
    "tok_embeddings.weight",
    ("tok_embeddings.", "layers.", "norm.", "output.", "lm_head."),
    _pieces,
    heads=("output.weight", "lm_head.weight"),
    unused=(".tokens_per_expert", ".tokens_per_expert_E"),
)
