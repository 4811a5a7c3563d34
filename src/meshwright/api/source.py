"""The keys that `--from` stands for: those of a run that starts from a trained model, wherever that is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.spec import UserError
from meshwright.spec.files import user_path
from meshwright.spec.hf.config_read import has_weights
from meshwright.spec.hf.text_tokens import tokens_of
from meshwright.spec.load import Overrides, given_keys
from meshwright.spec.lora_source import adapter_source, base_of
from meshwright.spec.weights import given_weights, is_foreign, own_tokenizer, weight_source

KEY = "--from"


def keys_of_source(source: str, given: Mapping[str, Any] = MappingProxyType({}), key: str = KEY) -> Overrides:
    """Return the dotted keys, with their texts, of a run that starts from a model.

    `source` is an HF folder, the folder of a run or of one of its checkpoints, a checkpoint of another
    program, or the id of a model on the hub, org/name, whose files are fetched where the cache lacks them.
    `given` are dotted keys that the run has beside it: where its tokenizer has more tokens than the model's
    embedding has rows, and it gives no `model.vocab_size`, that is one of the keys. Raises `UserError` where
    `source` is none of these, and for weights that cannot be had; it starts with `key`.
    """
    keys = _keys(source, key)
    return [*keys, *_rows_for_tokens(keys, given, key)]


def keys_of_adapters(folder: str, given: Mapping[str, Any], key: str = "--adapter") -> Overrides:
    """Return the dotted keys of a run that goes on from adapters, on the base model that they name.

    Raises `UserError`, which starts with `key`, where they name none, or one that is not here.
    """
    source = adapter_source(folder, key)
    if source is None or (base := base_of(source, key)) is None:
        raise UserError(f"{key}: {folder} names no base model; give it, as --from FOLDER")
    try:
        keys = keys_of_source(base, given, key)
    except UserError as error:
        raise UserError(f"{error}; {folder} names it as its base model, another is --from FOLDER") from None
    return [*keys, ("lora.weights", folder)]


def _keys(source: str, key: str) -> list[tuple[str, str]]:
    from meshwright.exchange.hub import hub_folder, is_hub_id

    path = user_path(source, key)
    if not path.exists():
        if not is_hub_id(source):
            raise UserError(
                f"{key}: {path} is not there; give the folder of a model or of a run, or a model of the hub "
                "as org/name"
            )
        path = hub_folder(source, key)
    if is_foreign(path):
        return list(_foreign(path, key))
    found = weight_source(str(path), key)
    assert found is not None  # a path is there, so it is not the word that stands for random weights
    if found.is_run:
        return [("model.weights", str(path))]
    if not has_weights(path):
        raise UserError(
            f"{key}: {path} has a config.json and no weights; give a folder that has them, or, for the "
            f"architecture alone, --model.hf {path}"
        )
    return [("model.hf", str(path))]


def _rows_for_tokens(keys: Overrides, given: Mapping[str, Any], key: str) -> Iterator[tuple[str, str]]:
    """Yield the key of a vocabulary with a row for each token, where the model's own lacks some."""
    if "model.vocab_size" in given:
        return
    model = {name.removeprefix("model."): text for name, text in keys}
    named = given.get("data.tokenizer", dict(keys).get("data.tokenizer"))
    file = own_tokenizer(given_weights(model)) if named is None else _named_tokenizer(str(named))
    tokens = 0 if file is None else tokens_of(file, key)
    if tokens > given_keys("model", {}, keys)["vocab_size"]:
        yield "model.vocab_size", str(tokens)


def _named_tokenizer(setting: str) -> Path | None:
    """Return the file that a `data.tokenizer` names; None for one that is made here."""
    if setting == "byte" or setting.partition(":")[0] == "bpe":
        return None
    from meshwright.data.tokenizer import tokenizer_file

    return tokenizer_file(user_path(setting, "data.tokenizer"))


def _foreign(path: Path, key: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of a checkpoint of another program, by its config.json or by what it says itself."""
    from meshwright.exchange.foreign.caller import Caller
    from meshwright.exchange.foreign.source import open_source

    instead = f"--model.weights {path} --model.hf"
    model, _, folder, *_ = open_source(path, Caller(key, instead, instead))
    yield "model.weights", str(path)
    if (folder / "config.json").is_file():
        yield "model.hf", str(folder)
    else:
        fields = model.model_dump(mode="json", exclude={"hf", "weights"})
        yield from ((f"model.{name}", text) for name, text in _flat(fields))
    if (tokenizer := folder / "tokenizer.json").is_file():
        yield "data.tokenizer", str(tokenizer)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and the texts of their values, as flags have them."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, _text(value)


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "none"
    return json.dumps(value)
