"""Tokenizer files of an exported HF folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.hf.text_tokens import model_ids, open_published, written_config


def write_tokenizer(folder: Path, tokenizer_file: Path, max_seq_len: int, vocab_size: int) -> dict[str, Any]:
    """Copy a tokenizer into `folder`, with its `tokenizer_config.json` or else a new one.

    A config without the model's length gets it. Returns the tokens that begin and end a text, as keys of
    config.json: those of the model that was imported, where it has any, else what the tokenizer says
    (`spec/hf/text_tokens.py`). Raises `UserError`, also for an end of documents beyond the model's
    vocabulary.
    """
    found = open_published(tokenizer_file, "export")
    found.check_end(vocab_size)
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    given = tokenizer_file.with_name("tokenizer_config.json")
    target = folder / given.name
    config = read_json_object(given, "export") if given.is_file() else {}
    if "model_max_length" in config:
        shutil.copyfile(given, target)
    elif given.is_file():
        write_json(target, config | {"model_max_length": max_seq_len})
    else:
        names = [
            None if number is None else found.backend.id_to_token(number) for number in found.tokens.named
        ]
        write_json(target, written_config(*names) | {"model_max_length": max_seq_len})
    first, end = found.tokens.named
    return {"bos_token_id": first, "eos_token_id": end} | model_ids(tokenizer_file.parent, "export")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
