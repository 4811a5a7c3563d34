"""Tables of measured runs: reading them, and the values that their cells may have.

The columns are those of `data/published_runs.csv`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, prod
from pathlib import Path
from typing import TypeVar

from meshwright.spec import UserError
from meshwright.spec.errors import did_you_mean

PUBLISHED = Path(__file__).parent / "data" / "published_runs.csv"
"""303 runs from papers and public benchmark tables, each with its source."""
FRONTIER = PUBLISHED.with_name("published_runs_frontier.csv")
"""151 runs on newer hardware, in 8 and 4 bits, and with experts."""

INTEGERS: Mapping[str, tuple[int, float]] = {
    "gpus": (1, 10e6),
    **dict.fromkeys(("seq_len", "ffn", "moe_ffn", "vocab"), (1, 1e8)),
    "shared_ffn": (0, 1e8),
    "head_dim": (1, 1e4),
    "gradient_bytes": (1, 8),
    "layers": (1, 10_000),
    "hidden": (1, 1e7),
    **dict.fromkeys(("heads", "kv_heads", "global_batch_seqs"), (1, 1e6)),
    **dict.fromkeys(("experts", "micro_batch"), (0, 1e6)),
    **dict.fromkeys(("top_k", "tp", "cp", "pp", "ep", "dp"), (0, inf)),
    "vp": (0, 10_000),
    "zero": (0, 3),
}
"""Columns of whole numbers -> the least (0 means "none") and the most: larger ones are slips of the pen, and
would take too long to predict."""
_MOST_PARAMETERS = 1e6
"""Largest valid `params_b`, in billions."""
FORMATS = ("nvfp4", "mxfp8", "fp8", "bf16", "fp16", "fp32")
"""Number formats that a cell of `precision` may contain, as in amp_bf16."""
CHOICES: Mapping[str, tuple[str, ...]] = {
    "precision": FORMATS,
    "attention": ("unfused", "flash1", "flash2", "flash3", "flash4", "cudnn"),
    "recompute": ("none", "full", "selective"),
    "sequence_parallel": ("yes", "no"),
}
"""Columns of words from a fixed list."""
_WORDS = (
    *("source", "program", "model", "gpu", "recompute", "sequence_parallel", "precision", "fp8_recipe"),
    *("attention", "where", "confidence"),
)
_MEASURED = ("step_seconds", "tokens_per_sec_per_gpu", "tflops_per_gpu", "mfu_pct", "peak_mem_gib")
_COLUMNS = frozenset((*_WORDS, *INTEGERS, *_MEASURED, "params_b", "network_gbps"))
_NEEDED = ("source", "gpu", "gpus", "seq_len")
_NUMBER = re.compile(
    r"[~≈]?\s*([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:e[-+]?\d+)?)(?:$|[\s(;%])", re.IGNORECASE
)
"""A number at the beginning of a cell, with words after it or without."""
_OTHER = re.compile(
    r"\s*(?:[-+x*/\u00d7\u2013]|to|or)\s*\d"
    r"|\s+\(?(?:k|[mbtg]|thousand|[mbtr]+illion|[gp]flops|[mun]s|mins?|minutes?|h|hours?|days?|fraction"
    r"|[kmt]i?b|nodes?|hosts?|racks?|pods?)\b",
    re.IGNORECASE,
)
"""After a number: another one (a range, a product, a choice), or a unit that is not its column's."""
_SHOWN = 30

V = TypeVar("V")


class PredictionError(UserError):
    """A row that cannot be predicted; the message says why."""


@dataclass(frozen=True)
class Row:
    """One measured run: the numbers and the words of its cells."""

    number: int
    """From 0, without the heading."""
    words: dict[str, str]
    numbers: dict[str, float]
    inferred: dict[str, object] = field(default_factory=dict)
    """Properties that the row does not state -> the values that were inferred."""

    def whole(self, name: str) -> int | None:
        """A whole number, or None where the cell is empty."""
        value = self.numbers.get(name)
        return None if value is None else round(value)

    def infer(self, name: str, value: V) -> V:
        """Note the value of a property that the row does not state, and return it."""
        self.inferred[name] = value
        return value

    def whole_or(self, name: str, guess: int) -> int:
        """A whole number; where the cell is empty, `guess`, which is noted as inferred."""
        value = self.whole(name)
        return self.infer(name, guess) if value is None else value

    @property
    def model_ranks(self) -> int:
        """GPUs that hold the model once: tp x cp x pp."""
        return prod(self.whole(name) or 1 for name in ("tp", "cp", "pp"))

    @property
    def told(self) -> str:
        """Source and comment of the run, in small letters."""
        return " ".join(self.words.get(name, "") for name in ("source", "where")).lower()


def first_match(table: Iterable[tuple[str, V]], text: str) -> V | None:
    """The value of the first pattern of a table that occurs in `text`, or None."""
    return next((value for pattern, value in table if re.search(pattern, text)), None)


def read(path: Path) -> list[Row]:
    """The rows of a CSV file. Raises `UserError` for a file that is not a table of runs."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names, rows = list(reader.fieldnames or []), list(reader)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; give a table of runs, as CSV") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read as a table: {reason}; give a CSV file") from None
    for separator, word in ((";", "';'"), ("\t", "tabs")):
        if len(names) == 1 and separator in names[0]:
            raise UserError(f"{path}: its columns are separated by {word}; they must be by ','")
    if not names:
        raise UserError(f"{path}: is empty; a table of runs has the columns of {PUBLISHED.name}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path}: has the column '{twice[0]}' twice; leave one")
    absent = sorted(_COLUMNS.difference(names))
    for name in names:
        # Columns of a table's own, such as seq_len_note beside seq_len, are left alone.
        if name not in _COLUMNS and (hint := did_you_mean(name, absent)):
            raise UserError(f"{path}: has an unknown column '{name}'{hint}")
    if missing := [name for name in _NEEDED if name not in names]:
        raise UserError(
            f"{path}: has no column '{missing[0]}'; a table of runs has those of {PUBLISHED.name}"
        )
    if not rows:
        raise UserError(f"{path}: has no rows below its heading; give one for each run that was measured")
    return [_row(number, cells) for number, cells in enumerate(rows)]


def _row(number: int, cells: Mapping[str, str]) -> Row:
    """A row; the first invalid cell is kept as the word 'broken', so that the other rows are predicted."""
    words = {name: (cells.get(name) or "").strip() for name in _WORDS}
    numbers: dict[str, float] = {}
    for name, cell in cells.items():
        text = cell.strip() if isinstance(cell, str) else ""
        if name in words or name not in _COLUMNS or not text:
            continue
        if name == "peak_mem_gib" and text.upper() == "OOM":
            words["oom"] = "yes"
            continue
        try:
            if (found := _NUMBER.match(text)) and _OTHER.match(text, found.end(1)):
                raise ValueError
            value = float(text if found is None else found[1].replace(",", ""))
            mistake = _mistake(name, short(text), value)
        except ValueError:
            mistake = f"the cell '{name}' is '{short(text)}', which is not a number in the column's unit"
        if mistake:
            words.setdefault("broken", mistake)
        else:
            numbers[name] = value
    return Row(number, words, numbers)


def _mistake(name: str, text: str, value: float) -> str:
    """The reason why a number cannot stand in a column, or an empty text."""
    cell = f"the cell '{name}' is '{text}'"
    least, most = INTEGERS.get(name, (0, _MOST_PARAMETERS if name == "params_b" else inf))
    if name not in INTEGERS and not (isfinite(value) and value > 0):
        return f"{cell}, which is not a measurement; give a number above 0, or an empty cell"
    if name in INTEGERS and not (isfinite(value) and value >= least and value.is_integer()):
        return f"{cell}, which is not a whole number of at least {least}"
    return f"{cell}, which is implausible; give at most {most:,.0f}" if value > most else ""


def check(row: Row) -> None:
    """Raise `PredictionError` for a row with an invalid number, or a word that is not one of its column's."""
    if mistake := row.words.get("broken"):
        raise PredictionError(mistake)
    for name, known in CHOICES.items():
        word = row.words[name].lower()
        if word and not (any(choice in word for choice in known) if known is FORMATS else word in known):
            raise PredictionError(f"the {name} '{short(row.words[name])}' is not one of {', '.join(known)}")


def short(text: str) -> str:
    """A cell as a sentence quotes it: on one line, and at most 30 characters."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
