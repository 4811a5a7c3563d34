"""Finds the files that `data.corpus` names, on a disk or by fsspec, and the reader of them."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from meshwright.data.hub_source import HUB, HubSource
from meshwright.data.manifest import MANIFEST, TOKENS_FILE
from meshwright.data.megatron import INDEX, TOKENS, MegatronSource, Pair, is_index
from meshwright.data.publish import readable
from meshwright.data.readers import SYNTHETIC, FileSource, TextSource
from meshwright.data.row_files import NAMED_ROWS, READABLE
from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.files import MAX_JSON, parse_json, user_path
from meshwright.storage.compressed import COMPRESSED, CompressedFile
from meshwright.storage.remote import is_url, remote_files, without_scheme
from meshwright.storage.stored_file import LocalFile, StoredFile

UNPACKED = frozenset({".txt", ".jsonl", ".jsonlines", ".ndjson", *NAMED_ROWS})
"""Suffixes before .gz or .zst of files that are unpacked; their rows are read where they lie, too."""

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_NOT_STDLIB = _TEST_FOLDERS | {"site-packages", "dist-packages", "__pycache__"}


def open_source(corpus: str, text_key: str) -> TextSource:
    """Return the reader of 'stdlib', 'hf:NAME[:CONFIG]', a file, a folder, or a URL of one.

    Raises `UserError`.
    """
    if corpus == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk(root, _NOT_STDLIB) if path.suffix == ".py" and not path.is_symlink()]
        return FileSource("stdlib", [LocalFile(path, root) for path in paths], text_key="", named=False)
    if corpus == SYNTHETIC:
        raise UserError(
            f"data.corpus: '{SYNTHETIC}' has no text to tokenize; train on it as it is, or give text"
        )
    if corpus.startswith(HUB) and not is_url(corpus):
        return HubSource(corpus, text_key)
    if not corpus:
        raise UserError(
            f"data.corpus: '' names nothing; give 'stdlib', '{SYNTHETIC}', '{HUB}NAME', a file or a folder"
        )
    found = _find(corpus)
    if pairs := _pairs(corpus, found):
        return MegatronSource(corpus, pairs)
    if found is None:
        raise _missing(corpus)
    files = found.files
    if not found.named:
        files = _rows_of_data_sets(corpus, files)
        _refuse_tokens(corpus, files)
    files = [_unpacked(file) for file in files]
    return FileSource(corpus, files, text_key, named=found.named, links=found.links)


class _Found(NamedTuple):
    """The files that a name stands for: the one that is `named`, or those of a folder, sorted."""

    files: Sequence[StoredFile]
    named: bool
    links: int = 0
    """Links, which are left out."""


def _find(corpus: str) -> _Found | None:
    """Return the files of a path or URL; None where nothing is there. Raises `UserError`."""
    if is_url(corpus):
        remote = remote_files(corpus)
        return None if remote is None else _Found(remote, [file.name for file in remote] == [corpus])
    path = user_path(without_scheme(corpus), "data.corpus")
    if path.is_file():
        return _Found([LocalFile(path)], named=True)
    if path.is_dir():
        found = _walk(path)
        files = [LocalFile(each, path) for each in found if not _leads_out(each)]
        return _Found(files, named=False, links=len(found) - len(files))
    if path.exists():
        raise UserError(
            f"data.corpus: {corpus} is neither a file nor a folder but a pipe, a socket or a device, and "
            "text is read more than once; write it to a file first"
        )
    return None


def _missing(corpus: str) -> UserError:
    """Return the error to raise for a name that names nothing."""
    hint = ""
    if not is_url(corpus):
        path = Path(without_scheme(corpus)).expanduser()
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings)
    return UserError(
        f"data.corpus: there is no file or folder {corpus}{hint}; 'stdlib', '{SYNTHETIC}' and '{HUB}NAME' "
        "need none"
    )


def _walk(root: Path, without: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files below `root`, sorted, without hidden ones, hidden folders and links to folders."""
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        visible = [Path(folder, name) for name in files if not name.startswith(".")]
        paths += [path for path in visible if path.is_file()]
    return sorted(paths, key=lambda path: path.relative_to(root).parts)


def _leads_out(path: Path) -> bool:
    """Return True for a link, unless a cache of the hub has it from snapshots/REVISION/ into its blobs/."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    caches = [each.parent.parent for each in path.absolute().parents if each.parent.name == "snapshots"]
    return not any(target.is_relative_to(cache.resolve() / "blobs") for cache in caches)


def _unpacked(file: StoredFile) -> StoredFile:
    """Return what a file in gzip or zstd unpacks to, if that is text or rows; any other file as it is."""
    inside = PurePosixPath(PurePosixPath(file.parts[-1]).stem).suffix.lower()
    return CompressedFile(file) if file.suffix in COMPRESSED and inside in UNPACKED else file


def _pairs(corpus: str, found: _Found | None) -> list[Pair]:
    """Return the index and the tokens of each data set of Megatron that a prefix, a file or a folder names.

    Raises `UserError` for half a pair, and for a folder that holds other files, too.
    """
    if found is not None and not found.named:
        return _pairs_in(corpus, found.files)
    stem = corpus
    for suffix in (INDEX, TOKENS):
        stem = stem.removesuffix(suffix)
    if found is not None and stem == corpus:
        return []
    halves = [_find(stem + suffix) for suffix in (INDEX, TOKENS)]
    index, tokens = (half.files[0] if half is not None and half.named else None for half in halves)
    if index is not None and not is_index(index):
        index = None
    if index is not None and tokens is not None:
        return [(index, tokens)]
    if index is not None:
        raise UserError(
            f"data.corpus: {index} is an index of Megatron, and {stem}{TOKENS} is missing beside it"
        )
    return []


def _pairs_in(corpus: str, files: Sequence[StoredFile]) -> list[Pair]:
    at = {file.parts: file for file in files}
    pairs: list[Pair] = []
    for file in files:
        parts = (*file.parts[:-1], file.parts[-1].removesuffix(INDEX) + TOKENS)
        if file.parts[-1].endswith(INDEX) and parts in at and is_index(file):
            pairs.append((file, at[parts]))
    if pairs and 2 * len(pairs) < len(files):
        of_pairs = {file.parts for pair in pairs for file in pair}
        other = next(file for file in files if file.parts not in of_pairs)
        raise UserError(
            f"data.corpus: {corpus} holds data sets of Megatron and other files, such as {other.parts[-1]}; "
            f"give one of them, such as {pairs[0][0].name.removesuffix(INDEX)}"
        )
    return pairs


def _rows_of_data_sets(corpus: str, files: Sequence[StoredFile]) -> list[StoredFile]:
    """Return the files without those that describe data sets which the package datasets saved.

    Of a folder that `Dataset.save_to_disk` made, the Arrow files that its state.json lists stay. Raises
    `UserError` for one of `DatasetDict`, which holds several.
    """
    arrow: dict[tuple[str, ...], list[StoredFile]] = {
        file.parts[:-1]: [] for file in files if file.suffix == ".arrow"
    }
    for file in files:
        if file.parts[:-1] in arrow:
            arrow[file.parts[:-1]].append(file)
    left_out: set[tuple[str, ...]] = set()
    for file in files:
        *above, name = file.parts
        folder = tuple(above)
        below = [each for each in arrow if len(each) > len(folder) and each[: len(folder)] == folder]
        if name == "dataset_dict.json" and below:
            root = "/".join((corpus.rstrip("/"), *folder))
            splits = sorted(each[-1] for each in below if len(each) == len(folder) + 1)
            raise UserError(
                f"data.corpus: {root} is a data set with the splits {', '.join(splits)}; give the folder of "
                f"one, such as {root}/{splits[0]}"
            )
        if folder in arrow and name == "dataset_info.json":
            left_out.add(file.parts)
        if folder in arrow and name == "state.json":
            listed = _arrow_files(file)
            left_out |= {each.parts for each in arrow[folder] if each.parts[-1] not in listed}
    return [file for file in files if file.parts not in left_out]


def _arrow_files(state: StoredFile) -> list[str]:
    """Return the names of files that the state.json of a saved data set lists. Raises `UserError`."""
    with readable(f"data.corpus: {state}", READABLE):
        content = state.head(MAX_JSON)
    try:
        listed = parse_json(content)["_data_files"] or ()
        return [file["filename"] for file in listed]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"data.corpus: {state} does not list the files of a data set ({error}); save it again with "
            "save_to_disk"
        ) from error


def _refuse_tokens(corpus: str, files: Sequence[StoredFile]) -> None:
    """Raise `UserError` if a folder of token shards is among these files of a folder: it holds no text."""
    places = {file.parts for file in files}
    for file in files:
        *above, name = file.parts
        if not TOKENS_FILE.fullmatch(name):
            continue
        folder = "/".join((corpus.rstrip("/"), *above))
        if (*above, MANIFEST) not in places:
            raise UserError(
                f"data.corpus: {folder} holds tokens, and its {MANIFEST} is missing; tokenize its text again"
            )
        remedy = f"give that folder, or move it out of {corpus}"
        if is_url(corpus):
            remedy = "copy that folder to a disk, and give the copy"
        elif not above:
            remedy = "train on it as it is, or give the text it was made of"
        raise UserError(f"data.corpus: {folder} holds tokens already and not text; {remedy}")
