"""Names of the special tokens and of the tokenizer files in Hugging Face folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError

KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "<|im_end|>")
"""Names of the token that ends a document in published tokenizers, for a tokenizer that does not name it."""

SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.model.v*",
    "sentencepiece.bpe.model", "spiece.model", "tekken.json", "generation_config.json",
)  # fmt: skip
"""Files of an HF folder, besides config.json and weights, that reading and writing text needs."""
MAX_SIDE_FILE = 64 << 20
"""Largest size of one of them in bytes; published tokenizers have up to 35 MB."""


def token_name(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, a string or {"content": ...}; None otherwise."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def find_end(config: dict[str, Any], id_of: Callable[[str], int | None], file: Path, key: str) -> int:
    """Return the token that ends a text: what `config`, a tokenizer_config.json, calls `eos_token`, else the
    first of `KNOWN_ENDS` that `id_of` knows.

    Raises `UserError`, which starts with `key`, where the tokenizer in `file` has no such token.
    """
    name = token_name(config.get("eos_token"))
    for known in (name,) if name else KNOWN_ENDS:
        number = id_of(known)
        if number is not None:
            return number
    wanted = repr(name) if name else f"any of {', '.join(KNOWN_ENDS)}"
    raise UserError(
        f"{key}: {file} has no end-of-document token {wanted}; name one of its tokens as eos_token in "
        "tokenizer_config.json in the same folder"
    )


def find_bos(
    config: dict[str, Any],
    post_processor: dict[str, Any] | None,
    id_of: Callable[[str], int | None],
    file: Path,
    key: str,
) -> int | None:
    """Return the id of the token that begins a text, or None if there is none that `id_of` knows.

    It is the `bos_token` of `config`, a tokenizer_config.json, or else the token that the `post_processor` of
    the tokenizer.json puts first. Raises `UserError`, which starts with `key`, where the post-processor of
    the tokenizer in `file` does not define that token.
    """
    try:
        names = (token_name(config.get("bos_token")), _put_first(post_processor or {}))
    except LookupError as error:
        raise UserError(f"{key}: the post-processor of {file} does not define its token {error}") from None
    ids = (id_of(name) for name in names if name is not None)
    return next((number for number in ids if number is not None), None)


def _put_first(processor: dict[str, Any]) -> str | None:
    """Return the special token that a post-processor of the tokenizers library puts before a text.

    Raises LookupError for one that it does not define.
    """
    kind = processor.get("type")
    if kind == "Sequence":
        names = [_put_first(part) for part in processor["processors"]]
        return next((name for name in names if name is not None), None)
    if kind in ("BertProcessing", "RobertaProcessing"):
        return str(processor["cls"][0])
    if kind != "TemplateProcessing" or not processor["single"]:
        return None
    first = processor["single"][0].get("SpecialToken")
    if first is None:
        return None
    tokens = processor["special_tokens"][first["id"]]["tokens"]
    if not tokens:
        raise LookupError(first["id"])
    return str(tokens[0])


def side_files(folder: Path, key: str) -> list[Path]:
    """Return those of `SIDE_FILES` that `folder` has.

    Raises `UserError`, which starts with `key`, for a link out of the folder and for a file that is too
    large: whoever made the folder could have other files of the reader's copied and published.
    """
    found = [path for pattern in SIDE_FILES for path in sorted(folder.glob(pattern)) if path.is_file()]
    for path in found:
        check_within(path, folder, key)
        if path.stat().st_size > MAX_SIDE_FILE:
            raise UserError(f"{key}: {path} has more than {MAX_SIDE_FILE >> 20} MiB; remove it")
    return found


def check_within(path: Path, folder: Path, key: str) -> None:
    """Raise `UserError`, which starts with `key`, if a file of an HF folder is a link to one outside of it.

    In a cache of the hub, files of snapshots/REVISION/ are links into blobs/ beside snapshots/.
    """
    home = folder.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(path.resolve().is_relative_to(each) for each in homes):
        raise UserError(
            f"{key}: {path} is a link to a file outside of its folder; put the file there instead"
        )


def copy_side_files(files: Iterable[Path], folder: Path, out: Path) -> None:
    """Copy `side_files` of a folder into the folder `out`. Raises `OSError`."""
    for path in files:
        target = out / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
