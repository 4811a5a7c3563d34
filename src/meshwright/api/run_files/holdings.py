"""Text, chats, models and runs that somebody has to begin with, told apart by what their files are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from meshwright.data.chat_formats import KEYS
from meshwright.data.chat_source import ChatSource, with_chats
from meshwright.data.hub_source import HUB
from meshwright.data.manifest import shards_of
from meshwright.data.readers import SYNTHETIC
from meshwright.data.shards import read_manifest
from meshwright.data.sources import open_source
from meshwright.exchange.hub import is_hub_id
from meshwright.spec import UserError
from meshwright.spec.errors import did_you_mean
from meshwright.spec.files import user_path
from meshwright.spec.load import load
from meshwright.spec.presets import PRESETS
from meshwright.spec.sections import DataSpec
from meshwright.spec.weights import is_foreign
from meshwright.storage.remote import is_url
from meshwright.units import gigabytes, short

KEY = "--have"
AS_THEY_ARE = DataSpec()
"""Rows with the key 'text', or chats if their keys say so."""
BYTES_PER_TOKEN = 4.0
"""Bytes of English text or of code that a token of a trained tokenizer stands for, about."""
_FORMATS = {name: " and ".join(keys) for name, keys in KEYS.items()}
_NOUNS = {"text": "text", "chats": "a file of chats", "model": "a model", "run": "a run"}
_NO_TEXT = (".toml", ".yaml", ".yml")
"""Suffixes of files that say how to train, and are no text to train on, where they are named."""


@dataclass(frozen=True)
class Holding:
    """One thing that somebody has: its `kind` is "text", "chats", "model" or "run".

    `told` says in words what it is. `tokens` are those of a text, by its bytes where it has not been
    tokenized; None where nobody can tell without reading it all.
    """

    kind: str
    source: str
    told: str
    tokens: int | None = None
    is_one_document: bool = False
    """True for a text of which no document can be held out."""


@dataclass(frozen=True)
class Holdings:
    """All that somebody has: at most one model or run, and at most one text or file of chats."""

    text: Holding | None = None
    model: Holding | None = None

    @property
    def is_run(self) -> bool:
        """True if the model is that of a run."""
        return self.model is not None and self.model.kind == "run"

    @property
    def has_chats(self) -> bool:
        """True if what there is to train on are chats."""
        return self.text is not None and self.text.kind == "chats"

    @property
    def all(self) -> Sequence[Holding]:
        """Whatever there is."""
        return [each for each in (self.text, self.model) if each is not None]


def holdings(names: Sequence[str], rows: DataSpec = AS_THEY_ARE) -> Holdings:
    """Return what `names` are: paths, URLs, 'stdlib', data sets or models of the hub.

    `rows` says with its `text_key` and `format` how rows are read. Raises `UserError` for one that is nothing
    to train on or from, and for two of a kind.
    """
    found: dict[str, Holding] = {}
    for name in names:
        each = holding(name, rows)
        place = "model" if each.kind in ("model", "run") else "text"
        if place in found:
            raise UserError(
                f"{KEY}: {name} is {_NOUNS[each.kind]}, and {found[place].source} is "
                f"{_NOUNS[found[place].kind]}, too; give "
                f"one {'model or run' if place == 'model' else 'text'}"
                + ("; several texts are the table [data.mixture] of a run file" if place == "text" else "")
            )
        found[place] = each
    return Holdings(found.get("text"), found.get("model"))


def holding(name: str, rows: DataSpec = AS_THEY_ARE) -> Holding:
    """Return what one name is, with rows read as `rows` says. Raises `UserError`."""
    if name in PRESETS:
        raise UserError(
            f"{KEY}: {name} is the shape of a model and has no weights; give it as --preset {name}"
        )
    if name == "stdlib" or name.startswith(HUB) or is_url(name):
        return corpus_of(name, rows)
    if not name.strip():
        raise UserError(f"{KEY}: '' names nothing; give a text, a model or a run")
    path = user_path(name, KEY)
    if not path.exists():
        return _not_here(name, path)
    if path.suffix in _NO_TEXT:
        raise UserError(
            f"{KEY}: {name} is a file of settings, not of text; give the text, and this to meshwright train"
        )
    if (path / "run.json").is_file():
        return _run(path)
    if (path / "manifest.json").is_file() and path.name.startswith("step-"):
        return Holding("run", str(path), "a checkpoint of a run")
    if (path / "config.json").is_file():
        return Holding("model", str(path), "a model as an HF folder")
    if is_foreign(path):
        return Holding("model", str(path), "a checkpoint of another program")
    return corpus_of(str(path), rows)


def _run(path: Path) -> Holding:
    """Return a run. Raises `UserError` for one that has saved no weights."""
    folder = load(path).checkpoint.folder(path)
    if next(folder.glob("step-*"), None) is None:
        raise UserError(f"{KEY}: {path} is a run without any checkpoint in {folder}; give one that has saved")
    return Holding("run", str(path), "the folder of a run")


def _not_here(name: str, path: Path) -> Holding:
    """Return a model of the hub; raise `UserError` for what is nowhere."""
    if is_hub_id(name) and not path.parent.is_dir():
        return Holding("model", name, "a model of the Hugging Face hub")
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = did_you_mean(path.name, siblings) or did_you_mean(name, ["stdlib", SYNTHETIC, *PRESETS])
    raise UserError(
        f"{KEY}: {name} is not there{hint}; give a file or folder of text, a model's folder, org/name of "
        "the hub, a run's folder, or stdlib, the sources of Python's own library"
    )


def corpus_of(name: str, rows: DataSpec) -> Holding:
    """Return the chats or the text that `data.corpus` names.

    A data set of the hub is taken for text unless `rows.format` says what it is, as it would have to be
    fetched. Raises `UserError`.
    """
    told = rows.format != "auto"
    if rows.format == "text" or shards_of(name) is not None or (name.startswith(HUB) and not told):
        return text_of(name, rows.text_key)
    source = with_chats(open_source(name, rows.text_key), rows)
    if not isinstance(source, ChatSource):
        return text_of(name, rows.text_key)
    how = "as data.format says" if told else f"by the keys of its first row: {_FORMATS[source.format]}"
    return Holding("chats", name, f"chats, {how}")


def text_of(name: str, text_key: str = "text") -> Holding:
    """Return the text that `data.corpus` names, with its tokens where they can be told without reading it.

    Raises `UserError`.
    """
    shards = shards_of(name)
    if shards is not None:
        tokens = read_manifest(shards, "tokenize the text again").tokens
        return Holding("text", name, f"{short(tokens)} tokens", tokens)
    source = open_source(name, text_key)
    documents = 2
    if source.is_text and not name.startswith(HUB):
        documents = sum(1 for _ in islice(source.documents(), 2))
    if not documents:
        raise UserError(f"{KEY}: {name} holds no text; give a file or folder that does")
    size = source.size()
    if size is None:
        return Holding("text", name, "text")
    tokens = max(1, int(size / BYTES_PER_TOKEN))
    told = f"{gigabytes(size)} of text, about {short(tokens)} tokens"
    if documents == 1:
        told += (
            " in one document, so that nothing is held out for validation: several files, or <|endoftext|> "
            "between texts in a .txt file, would allow it"
        )
    return Holding("text", name, told, tokens, documents == 1)
