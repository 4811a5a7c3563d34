"""Classes of transformers 5 that read texts by steps of their own, whatever steps a tokenizer.json has.

They take the vocabulary and the post-processor of tokenizer.json, and of its special tokens those that
tokenizer_config.json lists. Meshwright follows tokenizer.json, as other programs do; where that makes other
tokens it is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OF_MODEL = {"gpt2": "GPT2Tokenizer", **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer")}
"""Model types that have a class where tokenizer_config.json names none."""
_GENERIC_MODELS = ("mistral", "mixtral")
"""Model types whose tokenizer.json is followed whatever class is named."""
_PROBES = (
    "the cat sat", " It's 12345, don't  WE'LL\n\n  x = 7;\t# 3.14\r\n", "naïve ☃ 漢字 e\u0301", "a1b22 (c)  ",
)  # fmt: skip


def builds_otherwise(names: Mapping[str, Any], model_type: Any, tree: Mapping[str, Any]) -> str | None:
    """Return the class that would make other tokens of some texts than the `tree` of a tokenizer.json; None
    for one that would not, as far as a few texts tell.

    `names` are keys of tokenizer_config.json, `model_type` is that of config.json.
    """
    named = names.get("tokenizer_class") or _OF_MODEL.get(model_type)
    kind = named.removesuffix("Fast") if isinstance(named, str) else ""
    steps = None if model_type in _GENERIC_MODELS else _steps(kind, names, tree)
    if steps is None:
        return None
    listed = names.get("added_tokens_decoder")
    contents = {token.get("content") for token in (listed or {}).values() if isinstance(token, dict)}
    kept = [token for token in tree["added_tokens"] if listed is None or token["content"] in contents]
    model = {**tree["model"], **({"ignore_merges": False} if "ignore_merges" in tree["model"] else {})}
    built = {**tree, **steps, "model": model, "added_tokens": kept}
    if _plain(built) == _plain(tree):
        return None
    probes = [*_PROBES, *(f"cat {token['content']} x" for token in tree["added_tokens"])]
    return kind if _ids(built, probes) != _ids(tree, probes) else None


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
