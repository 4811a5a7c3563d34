"""Which tokens begin and end a text, and which end a generation, by the files of a published tokenizer.

This is the one place that says so, for training, generation, evaluation and both exports. It answers as
transformers 5 does with its generic class (spec/hf/tokenizer_classes.py), but for the last answer:

- `tokenizer.json` alone says what is put before and after a text, by its post-processor. `add_bos_token` and
  `add_eos_token` of `tokenizer_config.json` act where there is no tokenizer.json, which is not read here.
- `special_tokens_map.json` names tokens before `tokenizer_config.json` does, unless the latter has
  `added_tokens_decoder`, beside which the map is not read.
- `generation_config.json` lists what ends a generation, else `config.json` does, also where the former is
  there and names none: transformers would then never end one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.spec.errors import UserError
from meshwright.spec.files import is_lfs_pointer
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.hf.tokenizer_classes import class_of, departs, keeps_around
from meshwright.spec.hf.tokenizer_json import library_errors, read_tree
from meshwright.spec.records import show

if TYPE_CHECKING:
    import tokenizers

KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "<|im_end|>")
"""Names of the token that ends a document in published tokenizers, for a tokenizer that does not name it."""
MODEL_IDS = "meshwright_token_ids.json"
"""File of a run with those of `ID_KEYS` that the config.json of an imported model has, as they were."""
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that transformers knows by these keys, in its order."""


@dataclass(frozen=True)
class TextTokens:
    """Ids of the tokens around texts; by default a text ends with `end`, and nothing is put before it."""

    end: int
    """Ends a document."""
    before: tuple[int, ...] = ()
    """Are put before a text."""
    after: tuple[int, ...] = ()
    """Are put after a text."""
    stops: tuple[int, ...] = ()
    """End a generation; those of a published model may lack `end`. None of them means `end` alone."""
    bos: int | None = None
    """Is named as the first token, whether it is put before a text or not."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a generation."""
        return self.stops or (self.end,)

    @property
    def named(self) -> tuple[int | None, int]:
        """The first and the last token as configs name them; None for one that is neither named nor put."""
        first = self.before[0] if self.before else None
        return (first if self.bos is None else self.bos), self.end


@dataclass(frozen=True)
class PublishedTokenizer:
    """A tokenizer.json with what the files beside it say about it. Errors start with `key`."""

    file: Path
    key: str
    backend: tokenizers.Tokenizer
    """The library's tokenizer, with the tokens that the other files add."""
    tree: dict[str, Any]
    """The content of tokenizer.json itself."""
    names: dict[str, Any]
    """Keys of tokenizer_config.json and special_tokens_map.json."""

    @cached_property
    def tokens(self) -> TextTokens:
        """The tokens around texts. Raises `UserError` where nothing ends a text."""
        before, after = self._around
        ids = self.backend.get_vocab(with_added_tokens=True)
        stops = _stops(self.file, self.key)
        end = _find_end(self.names, stops, ids, self.file, self.key)
        begin = token_name(self.names.get("bos_token"))
        if not before and not after and begin is not None and self.is_written_here:
            before = (end,) if begin == token_name(self.names["eos_token"]) else ()
        return TextTokens(end, before, after, stops, None if begin is None else ids.get(begin))

    @property
    def named_tokens(self) -> dict[str, str]:
        """The special tokens that are known by a name, such as bos_token, in transformers' order."""
        names = {name: token_name(self.names.get(name)) for name in _NAMES}
        return {name: token for name, token in names.items() if token is not None}

    @property
    def is_written_here(self) -> bool:
        """True for one that was trained here: the config beside it is as `written_config` makes it."""
        return _is_written_here(self.names)

    @property
    def puts_by_itself(self) -> bool:
        """True if its post-processor puts before a text all that is put there."""
        return self._around[0] == self.tokens.before

    @property
    def splits_special(self) -> bool:
        """True if special tokens that a text spells are never read."""
        return self.names.get("split_special_tokens") is True

    @property
    def remarks(self) -> Iterator[str]:
        """Sentences about files that contradict each other or that transformers follows in part."""
        path = self.file.with_name("config.json")
        config = read_json_object(path, self.key) if path.is_file() else {}
        kind = class_of(self.names, config.get("model_type"))
        before, after = self._around
        for name, put, place in (("add_bos_token", before, "before"), ("add_eos_token", after, "after")):
            asked = self.names.get(name)
            if isinstance(asked, bool) and asked != bool(put):
                yield (
                    f"{self.file.with_name('tokenizer_config.json')}: {name} is {json.dumps(asked)}, but "
                    f"the post-processor of {self.file.name} puts {'tokens' if put else 'none'} {place} a "
                    f"text; the post-processor is followed{', as transformers does' * keeps_around(kind)}"
                )
        otherwise = departs(kind, self.names, self.tree)
        if otherwise is not None:
            yield f"{self.file} is followed; {kind}, the class that transformers 5 opens it with, {otherwise}"

    def check_names(self) -> None:
        """Raise `UserError` for a first or last token that is not a name, at which transformers fails."""
        for name in ("eos_token", "bos_token"):
            if self.names.get(name) is not None and token_name(self.names[name]) is None:
                raise UserError(
                    f"{self.key}: {name} in {self.file.with_name('tokenizer_config.json')} is "
                    f"{json.dumps(self.names[name])[:80]}, not the name of a token; give one of the "
                    "tokenizer's tokens as a string"
                )

    def check_end(self, vocab_size: int) -> None:
        """Raise `UserError` for an end of documents that a model of so many embeddings has no row for."""
        if self.tokens.end >= vocab_size:
            raise UserError(
                f"{self.key}: {self.backend.id_to_token(self.tokens.end)!r}, which ends documents by the "
                f"files beside {self.file}, is number {self.tokens.end}, and model.vocab_size is "
                f"{vocab_size}; name another eos_token in its tokenizer_config.json"
            )

    @cached_property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return _put_around(self.tree["post_processor"], self.file, self.key)


def open_published(file: Path, key: str) -> PublishedTokenizer:
    """Read a tokenizer.json and the files beside it. Raises `UserError`, which starts with `key`."""
    backend, tree = read_backend(file, key)
    names = _names(file, key)
    if not _is_written_here(names):
        with library_errors(f"{key}: the tokens beside {file} cannot be added to it"):
            backend.add_tokens(list(_additions(names, tree, file, key)))
    return PublishedTokenizer(file, key, backend, tree, names)


def tokens_of(file: Path, key: str) -> int:
    """Return how many rows of an embedding a tokenizer has ids for. Raises `UserError`."""
    return 1 + max(open_published(file, key).backend.get_vocab().values(), default=-1)


def read_backend(file: Path, key: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the library's tokenizer of a tokenizer.json alone, and its tree. Raises `UserError`."""
    import tokenizers

    if is_lfs_pointer(file):
        raise UserError(f"{key}: {file} is a pointer of Git LFS; fetch the file: git lfs pull")
    with library_errors(f"{key}: {file} is not a tokenizer.json"):
        backend = tokenizers.Tokenizer.from_file(str(file))
    return backend, read_tree(backend, f"{key}: {file}")


def written_config(begin: Any, end: Any) -> dict[str, Any]:
    """Return the `tokenizer_config.json` of a tokenizer that was trained here, or has none.

    Equal names of both tokens say that `end` begins each document and is put before a prompt, which other
    programs do by a post-processor alone: exports have one (`exchange/hf_tokenizer.py`).
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "bos_token": begin,
        "clean_up_tokenization_spaces": False,
    }


def _is_written_here(names: Mapping[str, Any]) -> bool:
    """Return whether these are the keys of a config as `written_config` makes it."""
    written = written_config(names.get("bos_token"), names.get("eos_token"))
    return {name: value for name, value in names.items() if name != "model_max_length"} == written


def token_name(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, a string or {"content": ...}; None otherwise."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def model_ids(folder: Path, key: str) -> dict[str, Any]:
    """Return those of `ID_KEYS` that the config.json of an HF folder, or of an imported run, has.

    Raises `UserError`, which starts with `key`, for a value that is neither ids nor null.
    """
    kept = folder / MODEL_IDS
    path = kept if kept.is_file() else folder / "config.json"
    config = read_json_object(path, key) if path.is_file() else {}
    found = {name: config[name] for name in ID_KEYS if name in config}
    for name, value in found.items():
        _ids(value, name, path, key)
    return found


def keep_model_ids(folder: Path, run: Path, key: str) -> None:
    """Write `MODEL_IDS` in the folder of a run that is made of an HF folder. Raises `OSError`,
    and `UserError` as `model_ids` does."""
    found = model_ids(folder, key) if (folder / "config.json").is_file() else {}
    if found:
        (run / MODEL_IDS).write_text(json.dumps(found) + "\n", encoding="utf-8")


def _names(file: Path, key: str) -> dict[str, Any]:
    """Return what tokenizer_config.json and special_tokens_map.json say, the former's other keys too."""
    given = file.with_name("tokenizer_config.json")
    config = read_json_object(given, key) if given.is_file() else {}
    other = file.with_name("special_tokens_map.json")
    beside = read_json_object(other, key) if other.is_file() and "added_tokens_decoder" not in config else {}
    extra = [values.get("extra_special_tokens") for values in (config, beside)]
    if all(isinstance(each, list) for each in extra):
        beside = {**beside, "extra_special_tokens": [*extra[0], *extra[1]]}  # type: ignore[misc]
    return {**config, **beside}


def _put_around(processor: Any, file: Path, key: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a post-processor of the tokenizers library puts before and after a text.

    Raises `UserError` for one that drops the text, has it twice, or does not define one of its tokens.
    """
    kind = processor["type"] if processor else None
    if kind == "Sequence":
        found = [_put_around(part, file, key) for part in processor["processors"]]
        some = [around for around in found if any(around)]
        if len(some) > 1:
            raise UserError(
                f"{key}: the post-processor of {file} puts tokens around a text {len(some)} times, not once"
            )
        return some[0] if some else ((), ())
    if kind in ("BertProcessing", "RobertaProcessing"):
        return (int(processor["cls"][1]),), (int(processor["sep"][1]),)
    if kind != "TemplateProcessing":
        return (), ()
    sides: tuple[list[int], list[int]] = [], []
    texts = 0
    for piece in processor["single"]:
        texts += "Sequence" in piece
        if "SpecialToken" in piece:
            name = piece["SpecialToken"]["id"]
            ids = processor["special_tokens"].get(name, {}).get("ids")
            if not ids:
                raise UserError(f"{key}: the post-processor of {file} does not define its token {name!r}")
            sides[min(texts, 1)].extend(ids)
    if texts != 1:
        raise UserError(
            f"{key}: the post-processor of {file} has a text {texts} times in its template; once is read"
        )
    return tuple(sides[0]), tuple(sides[1])


def _stops(file: Path, key: str) -> tuple[int, ...]:
    """Return the tokens that end a generation, by generation_config.json or else by config.json."""
    path = file.with_name("generation_config.json")
    generation = read_json_object(path, key) if path.is_file() else {}
    own = _ids(generation.get("eos_token_id"), "eos_token_id", path, key)
    config = model_ids(file.parent, key)
    return own or _ids(config.get("eos_token_id"), "eos_token_id", file.with_name("config.json"), key)


def _ids(value: Any, name: str, path: Path, key: str) -> tuple[int, ...]:
    """Return an id or a list of ids as ids; a negative one stands for none, as in some configs."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int for each in listed):
        raise UserError(f"{key}: {path} has {name} {show(value)}; it must be an id, a list of ids or null")
    return tuple(dict.fromkeys(each for each in listed if each >= 0))


def _find_end(
    names: Mapping[str, Any], stops: Sequence[int], ids: Mapping[str, int], file: Path, key: str
) -> int:
    """Return the token that ends a text: that of the name `eos_token`, else the first that ends a generation,
    else the first of `KNOWN_ENDS`. Raises `UserError` where the tokenizer has no such token."""
    name = token_name(names.get("eos_token"))
    if name is None:
        known_stops = set(stops) & set(ids.values())
        found = [number for number in stops if number in known_stops]
        if found:
            return found[0]
    for known in (name,) if name is not None else KNOWN_ENDS:
        if known in ids:
            return ids[known]
    wanted = repr(name) if name is not None else f"any of {', '.join(KNOWN_ENDS)}"
    raise UserError(
        f"{key}: {file} has no end-of-document token {wanted}; name one of its tokens as eos_token in "
        "tokenizer_config.json in the same folder"
    )


def _additions(
    names: Mapping[str, Any], tree: Mapping[str, Any], file: Path, key: str
) -> Iterator[tokenizers.AddedToken]:
    """Yield the tokens that transformers adds to those of tokenizer.json when it opens the folder.

    They are those of `added_tokens_decoder` or added_tokens.json, and special tokens that are only named. A
    token that tokenizer.json has keeps its id, and takes the other options.
    """
    from tokenizers import AddedToken

    named = {name: names[name] for name in (*_NAMES, *_others(names)) if token_name(names.get(name))}
    extra = names.get("extra_special_tokens") or names.get("additional_special_tokens") or ()
    listed = [*named.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    special = {token_name(token): token for token in listed}
    known: dict[int, Any] = dict(_listed(names, special, file, key))
    if "added_tokens_decoder" not in names:
        known |= {token["id"]: token for token in tree["added_tokens"]}
    contents = {token_name(token) for token in [*known.values(), *tree["added_tokens"]]}
    for token in [
        *(known[number] for number in sorted(known)),
        *(token for name, token in special.items() if name not in contents),
    ]:
        content = token_name(token)
        if content is None:
            raise UserError(f"{key}: {show(token)} beside {file} is not a token; give its text as a string")
        options = {"special": True} if isinstance(token, str) else dict(token)
        options["special"] = bool(options.get("special")) or content in {*map(token_name, named.values())}
        yield AddedToken(content, **{name: options[name] for name in _OPTIONS if name in options})


def _others(names: Mapping[str, Any]) -> list[str]:
    """Return the keys of special tokens that a model has of its own, such as image_token."""
    return [
        name
        for name, value in names.items()
        if name.endswith("_token") and name not in _NAMES and token_name(value) is not None
    ]


def _listed(
    names: Mapping[str, Any], special: Mapping[str | None, Any], file: Path, key: str
) -> Iterator[tuple[int, Any]]:
    """Yield id and token of `added_tokens_decoder`, or else of added_tokens.json."""
    path = file.with_name("added_tokens.json")
    if "added_tokens_decoder" in names:
        table = names["added_tokens_decoder"]
        if not isinstance(table, dict) or not all(number.isdecimal() for number in table):
            raise UserError(
                f"{key}: added_tokens_decoder in {file.with_name('tokenizer_config.json')} is not an object "
                "of tokens by id"
            )
        yield from ((int(number), token) for number, token in table.items())
    elif path.is_file():
        for content, number in read_json_object(path, key).items():
            if type(number) is not int:
                raise UserError(f"{key}: {path} has {show(content)}: {show(number)}; give the token's id")
            known = content in special
            yield number, {"content": content, "normalized": not known, "special": known}
