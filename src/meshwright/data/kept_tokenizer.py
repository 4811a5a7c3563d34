"""The files of a run that reading and writing text needs: of its corpus's tokenizer and of its weights."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

from meshwright.data.tokenize import bpe_size
from meshwright.data.tokenizer import Tokenizer, file_sha256, tokenizer_file
from meshwright.spec import RunSpec, UserError
from meshwright.spec.files import user_path
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.hf.special_tokens import (
    MODEL_FILES,
    TOKENIZER,
    TOKENIZER_FILES,
    copy_side_files,
    keep_side_files,
    side_files,
)
from meshwright.spec.hf.text_tokens import ID_KEYS, MODEL_IDS, model_ids, open_published
from meshwright.spec.weights import own_tokenizer, weights_folder


def keep_tokenizer(spec: RunSpec, tokenizer: Tokenizer | None, out: Path) -> None:
    """Save the corpus's tokenizer in the run's folder `out`, where `generate` and `export` look for it.

    A published one comes with the other files of its folder, such as a chat template, and beside it the ids
    and the generation_config.json of the weights that the run starts from. A corpus without text has no
    tokenizer: that of the weights comes along. Raises `UserError`.
    """
    own = own_tokenizer(spec.model.weights)
    file = own if tokenizer is None else _published_file(spec, tokenizer, own)
    try:
        if tokenizer is None or file is not None:
            _keep_weights_files(spec, own is not None and file == own, out)
        if file is not None and file != own:
            _copy_published(file, out)
            _drop_others_ids(own, file, out)
    except OSError as error:
        raise UserError(f"{out}: the tokenizer cannot be written there ({error.strerror})") from error
    if tokenizer is not None and file is None:
        tokenizer.save(out, spec.model.max_seq_len)
    elif tokenizer is not None:
        _name_end(tokenizer, out)


def _published_file(spec: RunSpec, tokenizer: Tokenizer, own: Path | None) -> Path | None:
    """Return the file that the corpus's tokenizer was read from; None for one that was trained."""
    setting = spec.data.tokenizer
    if setting != "byte" and bpe_size(setting, spec.model.vocab_size) is None:
        return tokenizer_file(user_path(setting, "data.tokenizer"))
    return own if own is not None and file_sha256(own) == tokenizer.content_sha256 else None


def _keep_weights_files(spec: RunSpec, with_tokenizer: bool, out: Path) -> None:
    folder = weights_folder(spec.model.weights)
    if folder is not None:
        patterns = MODEL_FILES + (TOKENIZER_FILES if with_tokenizer else ())
        keep_side_files(side_files(folder, "model.weights", patterns), folder, out, "model.weights")


def _copy_published(file: Path, out: Path) -> None:
    """Copy a tokenizer's file, which may have another name, and the files of a tokenizer beside it."""
    beside = tuple(pattern for pattern in TOKENIZER_FILES if pattern != TOKENIZER)
    copy_side_files(side_files(file.parent, "data.tokenizer", beside), file.parent, out)
    shutil.copyfile(file, out / TOKENIZER)


def _drop_others_ids(own: Path | None, file: Path, out: Path) -> None:
    """Drop the ids of the weights' configs from the run's folder where they are other tokens in `file`.

    `own` is the tokenizer.json of the weights. Generations then end with the token that ends documents.
    """
    if own is None:
        return
    ids = [*model_ids(out, "model.weights").values()]
    generation = out / "generation_config.json"
    settings = read_json_object(generation, "model.weights") if generation.is_file() else {}
    ids += [settings[name] for name in ID_KEYS if settings.get(name) is not None]
    listed = {each for value in ids for each in (value if isinstance(value, list) else [value])}
    numbers = sorted(each for each in listed if isinstance(each, int) and each >= 0)  # -1 stands for none
    before, now = (open_published(each, "data.tokenizer").backend for each in (own, file))
    others = [each for each in numbers if before.id_to_token(each) != now.id_to_token(each)]
    if not others:
        return
    warnings.warn(
        f"data.tokenizer: {file} has other tokens than {own} at {', '.join(map(str, others))}, ids that the "
        f"configs of these weights name; this run keeps those that its tokenizer names",
        stacklevel=2,
    )
    (out / MODEL_IDS).unlink(missing_ok=True)
    kept = {name: value for name, value in settings.items() if name not in ID_KEYS}
    if settings:
        generation.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _name_end(tokenizer: Tokenizer, out: Path) -> None:
    """Name the token that ends the corpus's documents where other files of the run say another.

    A tokenizer that does not name it takes it from the configs beside it, which may be other models'.
    """
    if open_published(out / TOKENIZER, "data.tokenizer").tokens.end == tokenizer.end_id:
        return
    path = out / "tokenizer_config.json"
    config = read_json_object(path, "data.tokenizer") if path.is_file() else {}
    name = next(name for name, number in tokenizer.vocabulary.items() if number == tokenizer.end_id)
    path.write_text(json.dumps(config | {"eos_token": name}, indent=2) + "\n", encoding="utf-8")
