"""Megatron-Core's `torch_dist` directories: names of its GPT model, and its arguments as a config.

The directories are torch's distributed checkpoints. A tensor of all layers is one, stacked in dim 0; rows of
queries, keys and values of a group of heads are consecutive; the embedding may have rows beyond the
vocabulary, which pad it. Source: Megatron-Core 0.16, `megatron/core/dist_checkpointing`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.exchange.foreign.caller import Caller
from meshwright.exchange.foreign.dcp import DcpStore
from meshwright.exchange.foreign.naming import Naming
from meshwright.exchange.foreign.query_groups import by_kind
from meshwright.exchange.hf_state_dict import HfTensor, Rotary
from meshwright.exchange.restricted_pickle import load_torch_file
from meshwright.exchange.tensor_store import Header, WholeTensors
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.hf.families import FAMILIES

COMMON = "common.pt"
NEWEST = "latest_checkpointed_iteration.txt"
ROOTS = ("embedding.", "decoder.", "output_layer.")
_STACK = "decoder.layers."
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class MegatronStore(WholeTensors):
    """A directory's tensors, those of each layer by themselves: `decoder.layers.0.mlp...` (`TensorStore`).

    Rows of queries, keys and values are in that order, and padding of the vocabulary of `spec` is cut off.
    """

    def __init__(self, store: DcpStore, spec: ModelSpec) -> None:
        self._store, self._spec = store, spec
        self._stored: dict[str, tuple[str, int | None]] = {}
        self.headers: dict[str, Header] = {}
        prefix = _prefix(store)
        for stored, (place, shape, dtype) in store.headers.items():
            name = stored.removeprefix(prefix)
            others = not stored.startswith(prefix) or not name.startswith(ROOTS)
            if others or stored.endswith("_extra_state"):
                continue
            stacked = re.match(rf"{re.escape(_STACK)}(?!\d+\.)", name)
            layers = range(shape[0]) if stacked and shape else (None,)
            for layer in layers:
                alone = name if layer is None else f"{_STACK}{layer}.{name.removeprefix(_STACK)}"
                self._stored[alone] = stored, layer
                self.headers[alone] = place, self._cut(alone, shape if layer is None else shape[1:]), dtype

    def read(self, name: str) -> Tensor:
        """Return a whole tensor of one layer on the CPU. Raises `UserError` for damage."""
        stored, layer = self._stored[name]
        value = self._store.read(stored) if layer is None else self._store.row(stored, layer)
        if ".linear_qkv." in name and not name.endswith(("layer_norm_weight", "layer_norm_bias")):
            return by_kind(value, self._spec)
        return value[: self.headers[name][1][0]] if name in _VOCABULARY else value

    def _cut(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows = self._spec.vocab_size
        return (rows, *shape[1:]) if name in _VOCABULARY and shape[:1] > (rows,) else shape


def _prefix(store: DcpStore) -> str:
    ends = [name for name in store.headers if name.endswith(_VOCABULARY[0])]
    return min(ends, key=len).removesuffix(_VOCABULARY[0])


def _pieces(spec: ModelSpec, names: Collection[str], where: str) -> Iterator[HfTensor]:
    """Yield the tensors of a model. Raises `UserError` for what Megatron's GPT model does not compute."""
    if spec.mla is not None or spec.norm_placement != "pre" or spec.parallel_block:
        raise UserError(
            f"{where}: of Megatron-Core models those with grouped queries and a norm before each sublayer "
            f"are read, and the config is of a {spec.family}; convert it to an HF folder by Megatron-Bridge"
        )
    norms = ("weight", "bias") if spec.norm == "layernorm" and spec.norm_bias else ("weight",)
    yield HfTensor(_VOCABULARY[0], ("embed.weight",))
    if spec.position == "learned":
        yield HfTensor("embedding.position_embeddings.weight", ("embed.positions",))
    for layer in range(spec.layers):
        ours, theirs = f"blocks.{layer}", f"{_STACK}{layer}"
        yield from _attention(spec, ours, f"{theirs}.self_attention")
        yield from _norm(names, theirs, "input_layernorm.", "self_attention.linear_qkv.layer_norm_",
                         f"{ours}.attn_norm", norms)  # fmt: skip
        yield from _norm(names, theirs, "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_",
                         f"{ours}.mlp_norm", norms)  # fmt: skip
        if spec.has_experts(layer):
            yield from _experts(f"{theirs}.mlp", f"{ours}.mlp", bool(spec.moe and spec.moe.bias))
        else:
            gated = not spec.activation.startswith("gelu")
            first = ("gate", "up") if gated else ("up",)
            for module, parts in (("linear_fc1", first), ("linear_fc2", ("down",))):
                for leaf in ("weight", "bias") if spec.mlp_bias else ("weight",):
                    parameters = tuple(f"{ours}.mlp.{part}.{leaf}" for part in parts)
                    yield HfTensor(f"{theirs}.mlp.{module}.{leaf}", parameters)
    for leaf in norms:
        yield HfTensor(f"decoder.final_layernorm.{leaf}", (f"head.norm.{leaf}",))
    if not spec.tied:
        yield HfTensor("output_layer.weight", ("head.weight",))


def _attention(spec: ModelSpec, ours: str, theirs: str) -> Iterator[HfTensor]:
    for leaf in ("weight", "bias") if spec.qkv_bias else ("weight",):
        parameters = tuple(f"{ours}.attn.{x}.{leaf}" for x in "qkv")
        yield HfTensor(f"{theirs}.linear_qkv.{leaf}", parameters, rotary=_rotary(spec))
    for leaf in ("weight", "bias") if spec.out_bias else ("weight",):
        yield HfTensor(f"{theirs}.linear_proj.{leaf}", (f"{ours}.attn.o.{leaf}",))
    for x in "qk" if spec.qk_norm else "":
        yield HfTensor(f"{theirs}.{x}_layernorm.weight", (f"{ours}.attn.{x}_norm.weight",))


def _rotary(spec: ModelSpec) -> tuple[Rotary | None, ...]:
    """The orders of rows of queries and keys.

    Channels that turn come first in each head, in halves, or in pairs in families that have them so.
    """
    channels, pairs = spec.rope_dim or spec.head_dim, FAMILIES[spec.family].rope_pairs
    if channels == spec.head_dim and not pairs:
        return ()
    return (*(Rotary(heads, channels, pairs, True) for heads in (spec.heads, spec.kv_heads)), None)


def _norm(
    names: Collection[str], layer: str, alone: str, fused: str, ours: str, leaves: tuple[str, ...]
) -> Iterator[HfTensor]:
    """Yield a norm's tensors: a module's own, or a part of the linear layer that follows it."""
    stem = alone if f"{layer}.{alone}weight" in names else fused
    for leaf in leaves:
        yield HfTensor(f"{layer}.{stem}{leaf}", (f"{ours}.{leaf}",))


def _experts(theirs: str, ours: str, bias: bool) -> Iterator[HfTensor]:
    yield HfTensor(f"{theirs}.router.weight", (f"{ours}.router.weight",))
    if bias:
        yield HfTensor(f"{theirs}.router.expert_bias", (f"{ours}.router.bias",), exact=True)
    both = (f"{ours}.experts.gate", f"{ours}.experts.up")
    yield HfTensor(f"{theirs}.experts.experts.linear_fc1.weight", both, dim=1)
    yield HfTensor(f"{theirs}.experts.experts.linear_fc2.weight", (f"{ours}.experts.down",))


MEGATRON = Naming(
    "Megatron-Core",
    _VOCABULARY[0],
    ROOTS,
    _pieces,
    heads=("output_layer.weight",),
)


def hf_config(folder: Path, caller: Caller) -> dict[str, Any]:
    """Return the keys of a config.json for the arguments in a directory's common.pt.

    Raises `UserError` where there are none, and for arguments that no family here computes.
    """
    file, key, remedy = folder / COMMON, caller.key, caller.needs_config
    found = load_torch_file(file, key) if file.is_file() else {}
    args = vars(found["args"]) if isinstance(found, dict) and hasattr(found.get("args"), "__dict__") else {}
    if "num_layers" not in args:
        raise UserError(f"{key}: {folder} has no arguments of Megatron-LM in {COMMON}; {remedy}")
    refused: dict[str, Any] = {
        "apply_layernorm_1p": False, "rotary_interleaved": False, "multi_latent_attention": False,
        "window_size": None, "moe_shared_expert_intermediate_size": None, "mtp_num_layers": None,
        "moe_router_pre_softmax": False, "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False, "squared_relu": False, "quick_geglu": False,
        "heterogeneous_layers_config_path": None,
    }  # fmt: skip
    for name, value in refused.items():
        if args.get(name, value) not in (value, None):
            raise UserError(f"{key}: {file} has {name} {args[name]!r}, which is not translated; {remedy}")
    gpt2 = args.get("position_embedding_type") == "learned_absolute"
    wanted: dict[str, Any] = (
        {"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True}
        if gpt2
        else {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
              "add_bias_linear": False, "rotary_percent": 1.0}
    )  # fmt: skip
    for name, value in wanted.items():
        if args.get(name, value) != value:
            raise UserError(f"{key}: {file} has {name} {args[name]!r}, which is not translated; {remedy}")
    return _gpt2(args) if gpt2 else _llama_like(args, file, key, remedy)


def _gpt2(args: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_layer": args["num_layers"], "n_embd": args["hidden_size"],
        "n_head": args["num_attention_heads"], "n_inner": args.get("ffn_hidden_size"),
        "vocab_size": args["padded_vocab_size"], "n_positions": args["max_position_embeddings"],
        "layer_norm_epsilon": args.get("norm_epsilon", 1e-5),
        "activation_function": "gelu_new" if args.get("bias_gelu_fusion", True) else "gelu",
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False),
    }  # fmt: skip


def _llama_like(args: Mapping[str, Any], file: Path, key: str, remedy: str) -> dict[str, Any]:
    experts, qk_norm = args.get("num_experts"), bool(args.get("qk_layernorm"))
    family = {(False, False): "llama", (False, True): "qwen3", (True, False): "mixtral",
              (True, True): "qwen3_moe"}[bool(experts), qk_norm]  # fmt: skip
    if args.get("add_qkv_bias"):
        if family != "llama":
            raise UserError(f"{key}: {file} has add_qkv_bias beside {family}'s layers; {remedy}")
        family = "qwen2"
    heads = args["num_attention_heads"]
    grouped = args.get("group_query_attention")
    config = {
        "model_type": family, "num_hidden_layers": args["num_layers"], "hidden_size": args["hidden_size"],
        "intermediate_size": args["ffn_hidden_size"], "num_attention_heads": heads,
        "num_key_value_heads": args["num_query_groups"] if grouped else heads,
        "head_dim": args.get("kv_channels") or args["hidden_size"] // heads,
        "vocab_size": args["padded_vocab_size"], "max_position_embeddings": args["max_position_embeddings"],
        "rms_norm_eps": args.get("norm_epsilon", 1e-5), "rope_theta": args.get("rotary_base", 10000),
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "sliding_window": None,
    }  # fmt: skip
    if args.get("use_rope_scaling"):
        config["rope_scaling"] = {
            "rope_type": "llama3", "factor": args.get("rope_scaling_factor", 8.0), "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
    if experts:
        width = args.get("moe_ffn_hidden_size") or args["ffn_hidden_size"]
        config |= {"num_local_experts": experts, "num_experts": experts, "norm_topk_prob": True,
                   "num_experts_per_tok": args.get("moe_router_topk", 2), "intermediate_size": width,
                   "moe_intermediate_size": width}  # fmt: skip
        if args.get("moe_layer_freq", 1) != 1:
            raise UserError(f"{key}: {file} has moe_layer_freq {args['moe_layer_freq']!r}; {remedy}")
    return config
