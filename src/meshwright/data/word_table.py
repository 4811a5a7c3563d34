"""Texts as numbers of their words, and words as ids.

`CompiledWordTable` does this in C++ (`word_table.cpp`), `WordTable` in Python where there is no compiler.
Imports little, as processes start with it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cpp_library import CppLibrary
from meshwright.data.word_rule import WordRule

LIBRARY = CppLibrary("word_table", (Path(__file__).with_suffix(".cpp"),))
MOST_KNOWN = 2**26
"""Bytes of texts that are remembered, about; if there are more they are forgotten and learnt anew."""


def library_path() -> str:
    """The compiled library; "" where it cannot be had, or is not wanted."""
    library = LIBRARY.load("text is tokenized half as fast as it could be")
    return library._name if library else ""


class _Rows:
    """Rows of numbers, of different lengths."""

    def __init__(self, dtype: str) -> None:
        self._lengths, self._starts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._values = np.zeros(0, dtype)

    def add(self, lengths: Iterable[int], values: Iterable[int]) -> None:
        """Add rows of these lengths, whose numbers are `values` one after another."""
        self._lengths = np.append(self._lengths, np.fromiter(lengths, np.int64))
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._values = np.append(self._values, np.fromiter(values, self._values.dtype))

    def rows(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return the rows with these numbers, one after another."""
        lengths = self._lengths[numbers]
        before = np.cumsum(lengths) - lengths
        return self._values[np.arange(lengths.sum()) + np.repeat(self._starts[numbers] - before, lengths)]


class _Numbers(dict[str, int]):
    """Numbers of texts, in the order in which they came up; `fresh` are those since `fresh` was emptied.

    `bytes` is about what they take.
    """

    def __init__(self) -> None:
        self.fresh: list[str] = []
        self.bytes = 0

    def __missing__(self, text: str) -> int:
        self.fresh.append(text)
        self.bytes += 64 + len(text)
        return self.setdefault(text, len(self))


class WordTable:
    """The words of texts by one rule, numbered as they come up, and their ids."""

    def __init__(self, rule: WordRule) -> None:
        self._cut, self._split = rule.units(), rule.ascii_words()
        self._word = _Numbers()
        self._ids_of_word = _Rows("<u4")
        self._forget_units()

    def _forget_units(self) -> None:
        self._unit, self._words_of_unit = _Numbers(), _Rows("<u4")

    @property
    def known_bytes(self) -> int:
        """About how many bytes the words take, and the units, which repeat less often."""
        return self._unit.bytes + self._word.bytes

    def numbers(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the numbers of each text's words."""
        if self._unit.bytes > MOST_KNOWN:
            self._forget_units()
        units = [np.fromiter(map(self._unit.__getitem__, self._cut(text)), np.uint32) for text in texts]
        words = [self._split(unit) if unit.isascii() else [unit] for unit in self._unit.fresh]
        self._unit.fresh.clear()
        values = map(self._word.__getitem__, chain.from_iterable(words))
        self._words_of_unit.add(map(len, words), values)
        return [self._words_of_unit.rows(own) for own in units]

    def words(self, first: int = 0) -> list[str]:
        """Return the words with the numbers from `first` on."""
        return list(islice(self._word, first, None))

    def add_ids(self, lengths: NDArray[np.int64], ids: NDArray[Any]) -> None:
        """Set the ids of the next words, so many of each."""
        self._ids_of_word.add(lengths, ids)

    def forget_ids(self, dtype: str) -> None:
        """Forget the ids of all words. Later ones are of this type."""
        self._ids_of_word = _Rows(dtype)

    def ids(self, numbers: NDArray[np.uint32]) -> bytes:
        """Return the ids of words, one after another."""
        return self._ids_of_word.rows(numbers).tobytes()


class CompiledWordTable:
    """A `WordTable` by the library at `path`."""

    def __init__(self, rule: WordRule, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.word_table_new.restype = ctypes.c_void_p
        self._pointer = ctypes.c_void_p(self._library.word_table_new(rule.joins_lines, rule.most_digits))
        weakref.finalize(self, self._library.word_table_free, self._pointer)
        self._dtype = "<u4"

    @property
    def known_bytes(self) -> int:
        """How many bytes the words take."""
        return self._call("known_bytes")

    def numbers(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the numbers of each text's words."""
        return list(map(self._numbers, texts))

    def _numbers(self, text: str) -> NDArray[np.uint32]:
        letters = text.encode()
        numbers = np.empty(len(letters), np.uint32)
        return numbers[: self._call("numbers", letters, len(letters), numbers)].copy()

    def words(self, first: int = 0) -> list[str]:
        """Return the words with the numbers from `first` on."""
        letters, ends = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_int64)()
        count = self._call("words", ctypes.byref(letters), ctypes.byref(ends))
        if first >= count:
            return []
        places = [ends[first - 1] if first else 0, *ends[first:count]]
        spelled = ctypes.string_at((letters.value or 0) + places[0], places[-1] - places[0])
        return [spelled[start - places[0] : end - places[0]].decode() for start, end in pairwise(places)]

    def add_ids(self, lengths: NDArray[np.int64], ids: NDArray[Any]) -> None:
        """Set the ids of the next words, so many of each."""
        written = ids.astype(self._dtype)
        self._call("add_ids", len(lengths), np.cumsum(lengths) * written.itemsize, written.nbytes, written)

    def forget_ids(self, dtype: str) -> None:
        """Forget the ids of all words. Later ones are of this type."""
        self._dtype = dtype
        self._call("forget_ids")

    def ids(self, numbers: NDArray[np.uint32]) -> bytes:
        """Return the ids of words, one after another."""
        ids = ctypes.c_void_p()
        length = self._call("ids", numbers, len(numbers), ctypes.byref(ids))
        return ctypes.string_at(ids, length)

    def _call(self, name: str, *given: Any) -> int:
        function = getattr(self._library, f"word_table_{name}")
        function.restype = ctypes.c_int64
        found: int = function(self._pointer, *map(_argument, given))
        return found


def _argument(given: Any) -> Any:
    if isinstance(given, np.ndarray):
        return given.ctypes.data_as(ctypes.c_void_p)
    return ctypes.c_int64(given) if isinstance(given, int) else given
