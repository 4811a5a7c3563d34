"""Folders with a tokenizer and special tokens of every kind, as others publish them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")
END, START, STOP, LAST = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[END]"]
VOCAB = 300  # rows of the model's embedding; the tokenizer has 279 tokens
NAMED = {"bos_token": START, "eos_token": STOP}


def token(content: str, **options: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **plain, "special": True, **options}


def every(**changed: dict[str, Any]) -> dict[str, Any]:
    """An added_tokens_decoder with all special tokens, some of them changed, and others."""
    known = {str(number): token(content) for number, content in enumerate(SPECIAL)}
    return {"added_tokens_decoder": known | {key.removeprefix("at"): value for key, value in changed.items()}}


PUTS = {
    "nothing": None, "bos": f"{START} $A", "eos": f"$A {STOP}", "both": f"{START} $A {STOP}",
    "other": f"{LAST} $A", "two": f"{LAST} {START} $A",
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "add bos": ({"add_bos_token": True}, {}),
    "no bos": ({"add_bos_token": False, "add_eos_token": False}, {}),
    "add eos": ({"add_bos_token": True, "add_eos_token": True}, {}),
    "no names": ({"bos_token": None, "eos_token": None}, {}),
    "pad": ({"pad_token": "[PAD]"}, {}),
    "unknown names": ({"unk_token": "<unk>", "mask_token": "[MASK]"}, {}),
    "extra list": ({"extra_special_tokens": ["<tool>"]}, {}),
    "extra names": ({"extra_special_tokens": {"tool_token": "<tool>"}}, {}),
    "additional": ({"additional_special_tokens": ["<tool>", LAST]}, {}),
    "new end": ({"eos_token": "[EOS]"}, {}),
    "new begin": ({"bos_token": "[BOS]"}, {}),
    "own name": ({"image_token": "<tool>"}, {}),
    "strips": (every(at1=token(START, lstrip=True, rstrip=True)), {}),
    "single word": (every(at3=token(LAST, single_word=True)), {}),
    "not special": (every(at3=token(LAST, special=False)), {}),
    "new": (every(at279=token("<tool>")), {}),
    "new word": (every(at279=token("<tool>", special=False, normalized=True, lstrip=True)), {}),
    "added": ({}, {"added_tokens.json": {"<tool>": 300, "[PAD]": 279}}),
    "added and named": ({"pad_token": "[PAD]"}, {"added_tokens.json": {"[PAD]": 279}}),
    "map": ({}, {"special_tokens_map.json": {"eos_token": LAST}}),
    "map of nothing": ({}, {"special_tokens_map.json": {"eos_token": None}}),
    "map of tokens": (
        {},
        {"special_tokens_map.json": {
            "eos_token": token(LAST, lstrip=True), "pad_token": "[PAD]",
            "additional_special_tokens": ["<tool>"],
        }},
    ),
    "map beside a table": (every(), {"special_tokens_map.json": {"eos_token": LAST}}),
    "both lists": (
        {"extra_special_tokens": ["[PAD]"]},
        {"special_tokens_map.json": {"extra_special_tokens": ["<tool>"]}},
    ),
    "a word ends": ({"eos_token": "at"}, {}),
    "split": ({"split_special_tokens": True}, {}),
    "token objects": ({"eos_token": token(LAST) | {"__type": "AddedToken"}}, {}),
}  # fmt: skip
CLASSES = [None, "PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast"]


def save_variants(folder: Path) -> Path:
    """Save a tokenizer.json of each of PUTS."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the cat sat on the mat, naively " * 50], trainer)
    for name, single in PUTS.items():
        if single is not None:
            special = [(content, backend.token_to_id(content)) for content in SPECIAL]
            backend.post_processor = processors.TemplateProcessing(
                single, f"{single} $B:1", special_tokens=special
            )
        backend.save(str(folder / f"{name}.json"))
    return folder


def write(folder: Path, file: Path, config: dict[str, Any] | None, **beside: Any) -> Path:
    folder.mkdir()
    shutil.copyfile(file, folder / "tokenizer.json")
    files = {"tokenizer_config.json": config, "config.json": {"model_type": "llama"}, **beside}
    for name, content in files.items():
        if content is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def cases() -> Iterator[Any]:
    for number, (name, put) in enumerate((name, put) for name in CONFIGS for put in PUTS):
        for kind in dict.fromkeys((CLASSES[number % 4], CLASSES[number // 6 % 4])):
            if (name, kind) == ("not special", "GPT2Tokenizer"):
                continue  # this class takes no token's options from tokenizer.json
            yield pytest.param(name, put, kind, id=f"{name}-puts {put}-{kind}")
