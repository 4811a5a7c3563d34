"""Tokenizer files of an exported HF folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers

from meshwright.spec.hf_json import read_json_object
from meshwright.spec.special_tokens import find_bos, find_end
from meshwright.spec.tokenizer_json import library_errors, read_tree


def write_tokenizer(folder: Path, tokenizer_file: Path, max_seq_len: int) -> dict[str, int | None]:
    """Copy a tokenizer into `folder`, with its `tokenizer_config.json` or else a new one.

    A config without the model's length gets it. Returns the tokens that begin and end a text, as keys of
    config.json: those that the tokenizer's config names; else the end has a known name, and the beginning is
    the token that the tokenizer's post-processor puts first. Raises `UserError`.
    """
    with library_errors(f"export: {tokenizer_file} is not a tokenizer.json"):
        backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tree = read_tree(backend, f"export: {tokenizer_file}")
    given = tokenizer_file.with_name("tokenizer_config.json")
    config = read_json_object(given, "export") if given.is_file() else {}
    eos = find_end(config, backend.token_to_id, tokenizer_file, "export")
    bos = find_bos(config, tree["post_processor"], backend.token_to_id, tokenizer_file, "export")
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    target = folder / given.name
    if "model_max_length" in config:
        shutil.copyfile(given, target)
    elif given.is_file():
        write_json(target, config | {"model_max_length": max_seq_len})
    else:
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None if bos is None else backend.id_to_token(bos),
            "eos_token": backend.id_to_token(eos),
            "model_max_length": max_seq_len,
            "clean_up_tokenization_spaces": False,
        }
        write_json(target, config)
    return {"bos_token_id": bos, "eos_token_id": eos}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
