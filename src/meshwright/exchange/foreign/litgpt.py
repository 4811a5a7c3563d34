"""litgpt's `lit_model.pth`: names of its GPT model, and its model_config.yaml as a config.

Up to version 0.4 rows of queries, keys and values are by group of heads (`attn.attn`), later by kind
(`attn.qkv`). Source: litgpt 0.5, `litgpt/model.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from meshwright.checkpoint.weights import ReadBytes
from meshwright.exchange.foreign.caller import Caller
from meshwright.exchange.foreign.naming import Naming
from meshwright.exchange.foreign.query_groups import by_kind
from meshwright.exchange.hf_state_dict import HfTensor
from meshwright.exchange.tensor_store import TensorStore, WholeTensors
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.files import MAX_JSON, read_text
from meshwright.spec.sharded_tensor import Rectangle

WEIGHTS = "lit_model.pth"
CONFIG = "model_config.yaml"
_MLP = {"fc_1": "gate", "fc_2": "up", "proj": "down"}


class LitgptStore(WholeTensors):
    """Tensors of a model, whose fused rows are in the order of queries, keys and values (`TensorStore`)."""

    def __init__(self, store: TensorStore, spec: ModelSpec) -> None:
        self._store, self._spec = store, spec
        self.headers = store.headers

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises `UserError` for damage."""
        value = self._store.read(name)
        return by_kind(value, self._spec) if _is_by_group(name) else value

    def parts(self, name: str, rectangles: Sequence[Rectangle]) -> Iterator[Tensor]:
        """Yield the values of rectangles of a tensor, in their order."""
        return super().parts(name, rectangles) if _is_by_group(name) else self._store.parts(name, rectangles)

    def reading(self, name: str, rectangles: Sequence[Rectangle]) -> ReadBytes:
        """Return what `parts` of these would take, without reading them."""
        if _is_by_group(name):
            return super().reading(name, rectangles)
        return self._store.reading(name, rectangles)


def _is_by_group(name: str) -> bool:
    return ".attn.attn." in name


def _pieces(spec: ModelSpec, names: Collection[str], where: str) -> Iterator[HfTensor]:
    """Yield the tensors of a model. Raises `UserError` for families whose litgpt names are not known."""
    known = ("llama", "mistral", "qwen2", "qwen3", "mixtral")
    if spec.family not in known:
        raise UserError(
            f"{where}: litgpt's names are read for {', '.join(known)}, and the config is of a {spec.family}; "
            "convert the checkpoint by `litgpt convert_from_litgpt`"
        )
    fused = "attn.attn" if "transformer.h.0.attn.attn.weight" in names else "attn.qkv"
    yield HfTensor("transformer.wte.weight", ("embed.weight",))
    for layer in range(spec.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        for leaf in ("weight", "bias") if spec.qkv_bias else ("weight",):
            yield HfTensor(f"{theirs}.{fused}.{leaf}", tuple(f"{ours}.attn.{x}.{leaf}" for x in "qkv"))
        for leaf in ("weight", "bias") if spec.out_bias else ("weight",):
            yield HfTensor(f"{theirs}.attn.proj.{leaf}", (f"{ours}.attn.o.{leaf}",))
        for x in "qk" if spec.qk_norm else "":
            yield HfTensor(f"{theirs}.attn.norm_{x}.weight", (f"{ours}.attn.{x}_norm.weight",))
        for name, mine in (("norm_1", "attn_norm"), ("norm_2", "mlp_norm")):
            yield HfTensor(f"{theirs}.{name}.weight", (f"{ours}.{mine}.weight",))
        if spec.has_experts(layer):
            assert spec.moe is not None
            yield HfTensor(f"{theirs}.mlp.gate.weight", (f"{ours}.mlp.router.weight",))
            for name, mine in _MLP.items():
                for expert in range(spec.moe.experts):
                    of_one = f"{theirs}.mlp.experts.{expert}.{name}.weight"
                    yield HfTensor(of_one, (f"{ours}.mlp.experts.{mine}",), expert=expert)
            continue
        for name, mine in _MLP.items():
            for leaf in ("weight", "bias") if spec.mlp_bias else ("weight",):
                yield HfTensor(f"{theirs}.mlp.{name}.{leaf}", (f"{ours}.mlp.{mine}.{leaf}",))
    yield HfTensor("transformer.ln_f.weight", ("head.norm.weight",))
    if not spec.tied:
        yield HfTensor("lm_head.weight", ("head.weight",))


LITGPT = Naming(
    "litgpt",
    "transformer.h.0.norm_1.weight",
    ("transformer.", "lm_head."),
    _pieces,
    heads=("lm_head.weight",),
)


def hf_config(file: Path, caller: Caller) -> dict[str, Any]:
    """Return the keys of a config.json for a model_config.yaml.

    Raises `UserError` for a file that cannot be read, and for a model that no family here computes.
    """
    key, remedy = caller.key, caller.needs_config
    try:
        given = yaml.safe_load(read_text(file, MAX_JSON))
    except (yaml.YAMLError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{key}: {file} cannot be read ({reason}); copy it again, or {remedy}") from error
    needed = ("n_layer", "n_head", "n_embd", "intermediate_size", "padded_vocab_size", "block_size")
    if not isinstance(given, dict) or any(given.get(name) is None for name in needed):
        raise UserError(f"{key}: {file} lacks one of {', '.join(needed)}; {remedy}")
    computed = {
        "norm_class_name": ("RMSNorm",), "mlp_class_name": ("LLaMAMLP", "LLaMAMoE"), "bias": (False,),
        "parallel_residual": (False,), "rotary_percentage": (1.0,), "lm_head_bias": (False,),
        "scale_embeddings": (False,), "sliding_window_size": (None,), "rope_condense_ratio": (1,),
        "attention_logit_softcapping": (None,), "final_logit_softcapping": (None,),
        "attention_scores_scalar": (None,), "post_attention_norm": (False,), "post_mlp_norm": (False,),
        "latent_attention": (None,), "rope_interleave": (False,), "rope_indices": (None,),
        "norm_qk_type": ("default",), "n_expert_groups": (None,), "n_shared_expert": (None,),
    }  # fmt: skip
    for name, values in computed.items():
        if given.get(name, values[0]) not in values:
            raise UserError(f"{key}: {file} has {name} {given[name]!r}, which is not translated; {remedy}")
    return _config(given, file, key, remedy)


def _config(given: dict[str, Any], file: Path, key: str, remedy: str) -> dict[str, Any]:
    experts = given.get("n_expert") if given.get("mlp_class_name") == "LLaMAMoE" else 0
    switches = bool(experts), bool(given.get("norm_qk")), bool(given.get("attn_bias"))
    families = {(False, False, False): "llama", (False, False, True): "qwen2", (False, True, False): "qwen3",
                (True, False, False): "mixtral"}  # fmt: skip
    if switches not in families:
        raise UserError(f"{key}: {file} has n_expert, norm_qk or attn_bias together; {remedy}")
    config = {
        "model_type": families[switches], "num_hidden_layers": given["n_layer"],
        "hidden_size": given["n_embd"], "intermediate_size": given["intermediate_size"],
        "num_attention_heads": given["n_head"],
        "num_key_value_heads": given.get("n_query_groups") or given["n_head"],
        "head_dim": given.get("head_size") or given["n_embd"] // given["n_head"],
        "vocab_size": given["padded_vocab_size"], "max_position_embeddings": given["block_size"],
        "rms_norm_eps": given.get("norm_eps", 1e-5), "rope_theta": given.get("rope_base", 10000),
        "tie_word_embeddings": False, "sliding_window": None,
    }  # fmt: skip
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": given["n_expert_per_token"]}
    scaling = given.get("rope_adjustments")
    if isinstance(scaling, dict):
        if "low_freq_factor" not in scaling:
            raise UserError(f"{key}: {file} has rope_adjustments {scaling!r}; {remedy}")
        config["rope_scaling"] = {
            "rope_type": "llama3", "original_max_position_embeddings": scaling.get("original_max_seq_len"),
            **{name: scaling.get(name) for name in ("factor", "low_freq_factor", "high_freq_factor")},
        }  # fmt: skip
    return config
