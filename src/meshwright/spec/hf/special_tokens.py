"""The files of Hugging Face folders that reading and writing text needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from meshwright.spec.errors import UserError
from meshwright.spec.hf.text_tokens import MODEL_IDS, keep_model_ids

TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.model.v*", "tiktoken.model",
    "*.tiktoken", "sentencepiece.bpe.model", "spiece.model", "tekken.json",
)  # fmt: skip
"""Files of an HF folder that are its tokenizer's."""
MODEL_FILES = ("generation_config.json", MODEL_IDS)
"""Files that say which tokens a model ends a text with."""
SIDE_FILES = TOKENIZER_FILES + MODEL_FILES
"""Files of an HF folder, besides config.json and weights, that reading and writing text needs."""
MAX_SIDE_FILE = 64 << 20
"""Largest size of one of them in bytes; published tokenizers have up to 35 MB."""


def side_files(folder: Path, key: str, patterns: Iterable[str] = SIDE_FILES) -> list[Path]:
    """Return the files of these patterns that `folder` has.

    Raises `UserError`, which starts with `key`, for a link out of the folder and for a file that is too
    large: whoever made the folder could have other files of the reader's copied and published.
    """
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
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


def keep_side_files(files: Iterable[Path], folder: Path, run: Path, key: str) -> None:
    """Copy `side_files` of a model's folder into that of a run made of it, with the ids of its config.json.

    Raises `OSError`, and `UserError`, which starts with `key`, for what are no ids.
    """
    copy_side_files(files, folder, run)
    keep_model_ids(folder, run, key)
