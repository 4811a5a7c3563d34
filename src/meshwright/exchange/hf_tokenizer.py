"""Tokenizer files of an exported HF folder, which put the same tokens around a text as `generate` does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.hf.text_tokens import PublishedTokenizer, model_ids, open_published, written_config


def write_tokenizer(folder: Path, tokenizer_file: Path, max_seq_len: int, vocab_size: int) -> dict[str, Any]:
    """Copy a tokenizer into `folder`, with its `tokenizer_config.json` or else a new one.

    A tokenizer of this program's own puts the end-of-document token before a text by its config alone, which
    no other program knows: its copy has a post-processor that puts it there, and names it as the padding,
    too. Such a config is written anew; that of a published tokenizer stays, but gets the model's length if
    it has none. Returns the tokens that begin, end and pad a text, as keys of config.json: those of the model
    that was imported, where it has any, else what the tokenizer says (`spec/hf/text_tokens.py`). Raises
    `UserError`, also for an end of documents beyond the model's vocabulary.
    """
    found = open_published(tokenizer_file, "export")
    found.check_end(vocab_size)
    given = tokenizer_file.with_name("tokenizer_config.json")
    target = folder / given.name
    config = read_json_object(given, "export") if given.is_file() else {}
    first, end = found.tokens.named
    ends: dict[str, Any] = {"bos_token_id": first, "eos_token_id": end}
    if found.is_written_here or not given.is_file():
        names = [None if number is None else found.backend.id_to_token(number) for number in (first, end)]
        length = config.get("model_max_length", max_seq_len)
        write_json(target, {**written_config(*names), "pad_token": names[1], "model_max_length": length})
        ends["pad_token_id"] = end
    elif "model_max_length" in config:
        shutil.copyfile(given, target)
    else:
        write_json(target, config | {"model_max_length": max_seq_len})
    _copy_tokenizer(found, folder / "tokenizer.json")
    return ends | model_ids(tokenizer_file.parent, "export")


def _copy_tokenizer(found: PublishedTokenizer, target: Path) -> None:
    """Copy a tokenizer.json, with a post-processor where its own does not put what is put before a text."""
    if found.puts_by_itself:
        shutil.copyfile(found.file, target)
        return
    from tokenizers import Tokenizer, processors

    ids = found.tokens.before
    special = [(str(found.backend.id_to_token(number)), number) for number in ids]
    before = [name for name, _ in special]
    template = processors.TemplateProcessing(
        single=[*before, "$A"], pair=[*before, "$A", *before, "$B:1"], special_tokens=special
    )
    copy = Tokenizer.from_file(str(found.file))
    own = copy.post_processor
    copy.post_processor = template if own is None else processors.Sequence([own, template])
    copy.save(str(target))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
