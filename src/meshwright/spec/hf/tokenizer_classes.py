"""Classes of transformers 5 that read texts by steps of their own, whatever steps a tokenizer.json has.

Those of `_steps` take the vocabulary and the post-processor of tokenizer.json, and of its special tokens
those that tokenizer_config.json lists. Others, such as RobertaTokenizer, put tokens of their own around
texts, too. Meshwright follows tokenizer.json, as other programs do; where a class makes other tokens, or may,
it is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OF_MODEL = {
    model: kind
    for kind, models in {
        "CodeLlamaTokenizer": "code_llama",
        "CohereTokenizer": "cohere cohere2",
        "GPT2Tokenizer": "codegen gpt2 gpt_neo gptj",
        "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt",
        "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text",
        "Qwen2Tokenizer": "qwen2 qwen3 qwen3_moe",
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text",
    }.items()
    for model in models.split()
}
"""Model types that have a class where tokenizer_config.json names none."""
_WHATEVER_IS_NAMED = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types whose tokenizer is opened with the class of `_OF_MODEL` even if another is named."""
_GENERIC_MODELS = ("mistral", "mixtral")
"""Model types whose tokenizer.json is followed whatever class is named."""
_GENERIC = ("", "PreTrainedTokenizer", "PythonBackend", "TokenizersBackend")
"""Classes that follow tokenizer.json, by name without Fast."""
_BUILDERS = ("GPT2Tokenizer", "GemmaTokenizer", "LlamaTokenizer", "Qwen2Tokenizer")
"""Classes whose steps are those of `_steps`."""
_PROBES = (
    "the cat sat", " It's 12345, don't  WE'LL\n\n  x = 7;\t# 3.14\r\n", "naïve ☃ 漢字 e\u0301", "a1b22 (c)  ",
    "a\n\nb", "a\nb\n\n\nc", "end.\n\n\tThe  cat", "\n\n \nx",
)  # fmt: skip


def class_of(names: Mapping[str, Any], model_type: Any) -> str:
    """Return the class that transformers 5 opens a folder with, without Fast; "" for one that follows
    tokenizer.json.

    `names` are keys of tokenizer_config.json, `model_type` is that of config.json.
    """
    own = _OF_MODEL.get(model_type)
    named = own if model_type in _WHATEVER_IS_NAMED else names.get("tokenizer_class") or own
    kind = named.removesuffix("Fast") if isinstance(named, str) else ""
    return "" if kind in _GENERIC or model_type in _GENERIC_MODELS else kind


def keeps_around(kind: str) -> bool:
    """Return whether a class is known to put around texts what the post-processor of tokenizer.json does."""
    return kind in _GENERIC or kind in _BUILDERS


def departs(kind: str, names: Mapping[str, Any], tree: Mapping[str, Any]) -> str | None:
    """Return what the class `kind` does to texts other than the `tree` of a tokenizer.json says; None for one
    that does as it says, as far as a few texts tell."""
    if not keeps_around(kind):
        return "may do otherwise: it may split texts by steps of its own, and put other tokens around them"
    steps = _steps(kind, names, tree)
    if steps is None:
        return None
    listed = names.get("added_tokens_decoder")
    contents = {token.get("content") for token in (listed or {}).values() if isinstance(token, dict)}
    kept = [token for token in tree["added_tokens"] if listed is None or token["content"] in contents]
    model = {**tree["model"], **({"ignore_merges": False} if "ignore_merges" in tree["model"] else {})}
    built = {**tree, **steps, "model": model, "added_tokens": kept}
    if _plain(built) == _plain(tree):
        return None
    marked = (
        form.format(token["content"]) for token in tree["added_tokens"] for form in ("cat {} x", "a{}b")
    )
    probes = [*_PROBES, *marked]
    if _ids(built, probes) == _ids(tree, probes):
        return None
    return "does not take all of it: it makes other tokens of some texts"


def _steps(kind: str, names: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the normalizer and the pre-tokenizer that a class builds; None for one that builds none."""
    spaced = bool(names.get("add_prefix_space"))
    spelled = {"type": "ByteLevel", "add_prefix_space": spaced, "trim_offsets": True}
    if kind == "GPT2Tokenizer":
        return {"normalizer": None, "pre_tokenizer": {**spelled, "use_regex": True}}
    if kind == "Qwen2Tokenizer":
        split = {"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False}
        parts = [split, {**spelled, "use_regex": False}]
        return {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        }
    if kind == "LlamaTokenizer" and '"ByteLevel"' not in json.dumps(tree):
        first = (
            "never"
            if names.get("add_prefix_space") is False
            else "always"
            if names.get("legacy")
            else "first"
        )
        mark = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": first, "split": False}
        return {"normalizer": None, "pre_tokenizer": mark}
    if kind == "GemmaTokenizer":
        mark = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        split = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
        return {"normalizer": mark, "pre_tokenizer": split}
    return None


def _plain(tree: Mapping[str, Any]) -> str:
    """Return what of a tokenizer.json decides ids."""
    parts = {name: tree[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
    return json.dumps(parts, sort_keys=True).replace('"trim_offsets": false', '"trim_offsets": true')


def _ids(tree: Mapping[str, Any], texts: list[str]) -> list[list[int]]:
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(json.dumps({**tree, "post_processor": None}))
    return [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
