"""Tables of measured runs: reading them, and the values that their cells may have.

The columns are those of `data/published_runs.csv`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Any, TypeVar

from meshwright.spec import UserError
from meshwright.spec.base import MAX_HEADS, MAX_LAYERS, MAX_RANKS, MAX_WIDTH
from meshwright.spec.errors import did_you_mean
from meshwright.spec.load import one_line

PUBLISHED = Path(__file__).parent / "data" / "published_runs.csv"
"""303 runs from papers and public benchmark tables, each with its source."""
FRONTIER = PUBLISHED.with_name("published_runs_frontier.csv")
"""151 runs on newer hardware, in 8 and 4 bits, and with experts."""

INTEGERS: Mapping[str, tuple[int, float]] = {
    "gpus": (1, 10e6),
    "gpus_per_node": (1, 10e6),
    "seq_len": (1, 1e8),
    "vocab": (2, 1e8),
    "gradient_bytes": (1, 8),
    "layers": (1, MAX_LAYERS),
    **dict.fromkeys(("hidden", "ffn", "moe_ffn"), (1, MAX_WIDTH)),
    "shared_ffn": (0, MAX_WIDTH),
    **dict.fromkeys(("heads", "kv_heads", "head_dim"), (1, MAX_HEADS)),
    "global_batch_seqs": (1, 1e6),
    "micro_batch": (0, 1e6),
    **dict.fromkeys(("experts", "top_k"), (0, MAX_HEADS)),
    **dict.fromkeys(("tp", "cp", "pp", "ep", "etp", "dp"), (0, MAX_RANKS)),
    "vp": (0, MAX_LAYERS),
    "zero": (0, 3),
}
"""Columns of whole numbers -> the least (0 means "none") and the most: larger ones are slips of the pen, and
would take too long to predict."""
_MEASURES: Mapping[str, tuple[float, float]] = {
    "params_b": (1e-6, 1e6),
    "step_seconds": (1e-6, 1e6),
    "tokens_per_sec_per_gpu": (1e-3, 1e9),
    "tflops_per_gpu": (1e-3, 1e5),
    "mfu_pct": (1e-3, 100),
    "peak_mem_gib": (1e-3, 1e4),
    "network_gbps": (1e-2, 1e6),
    "power_w": (10, 1e4),
    "capacity_factor": (1e-2, MAX_HEADS),
}
"""Columns of other numbers -> the least and the most that are plausible."""
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8", "bf16", "fp16", "fp32")
"""Number formats of which a cell of `precision` contains one, as in amp_bf16."""
CHOICES: Mapping[str, tuple[str, ...]] = {
    "attention": ("unfused", "flash1", "flash2", "flash3", "flash4", "cudnn"),
    "recompute": ("none", "full", "selective"),
    "sequence_parallel": ("yes", "no"),
    "cuda_graphs": ("yes", "no"),
    "moe_pad_to_capacity": ("yes", "no"),
}
"""Columns of words from a fixed list, which are read in small letters."""
_WORDS = (
    *("source", "program", "model", "gpu", "precision", "fp8_recipe", "schedule"),
    *(*CHOICES, "where", "confidence"),
)
_COLUMNS = frozenset((*_WORDS, *INTEGERS, *_MEASURES))
_NEEDED = ("source", "gpu", "gpus", "seq_len")
_OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("step_time", "iteration_time", "iter_time", "time_per_step"), "step_seconds"),
    **dict.fromkeys(("num_gpus", "n_gpus", "world_size"), "gpus"),
    **dict.fromkeys(("sequence_length", "context_length"), "seq_len"),
    **dict.fromkeys(("stack", "framework"), "program"),
    **{
        f"{name}{more}": axis
        for axis, names in {
            "tp": ("tensor_parallel", "tensor_model_parallel", "tp"),
            "pp": ("pipeline_parallel", "pipeline_model_parallel", "pp"),
            "cp": ("context_parallel", "cp"),
            "dp": ("data_parallel", "dp"),
            "ep": ("expert_parallel", "expert_model_parallel", "ep"),
            "etp": ("expert_tensor_parallel", "etp"),
        }.items()
        for name in names
        for more in ("", "_size", "_degree")
        if f"{name}{more}" != axis
    },
    **dict.fromkeys(
        ("virtual", "vpp", "virtual_pipeline_size", "virtual_pipeline_model_parallel_size"), "vp"
    ),
    **dict.fromkeys(("zero_stage", "zero_optimization_stage"), "zero"),
    **dict.fromkeys(("activation_checkpointing", "activation_recomputation", "ac", "remat"), "recompute"),
    **dict.fromkeys(("micro_batch_size", "per_device_batch", "per_device_batch_size"), "micro_batch"),
    **dict.fromkeys(("global_batch_size", "batch_size"), "global_batch_seqs"),
    **dict.fromkeys(("tps", "tokens_per_second_per_gpu", "tok_s_gpu"), "tokens_per_sec_per_gpu"),
    **dict.fromkeys(("power_limit", "tdp"), "power_w"),
    "dtype": "precision",
    "expert_ffn": "moe_ffn",
    "device": "gpu",
    "gbs": "global_batch_seqs",
    "mbs": "micro_batch",
    "mfu": "mfu_pct",
    "tflops": "tflops_per_gpu",
    "peak_memory": "peak_mem_gib",
    "moe_expert_capacity_factor": "capacity_factor",
    "moe_pad_expert_input_to_capacity": "moe_pad_to_capacity",
}
"""Usual names of columns elsewhere -> their names here."""
_UNITS: Mapping[str, str] = {
    "params_b": "b|bn|billion",
    "step_seconds": "s|secs?|seconds?",
    "tokens_per_sec_per_gpu": "tok(?:en)?s?(?:/| per )s(?:ec(?:ond)?)?(?:/| per )gpu",
    "tflops_per_gpu": "tflops?(?:/s)?(?:(?:/| per )gpu)?",
    "mfu_pct": "%|percent",
    "peak_mem_gib": "gib",
    "network_gbps": "(?-i:[Gg]bps|[Gg][Bb]its?/s|Gb/s)",  # GB/s and GBps are bytes
    **dict.fromkeys(("seq_len", "vocab"), "tokens?"),
    "global_batch_seqs": "seqs?|sequences|samples",
    "gradient_bytes": "bytes?",
    "power_w": "w(?:atts?)?",
}
"""Columns -> their units, which may stand after a number; of others it is what the column counts."""
_NUMBER = r"[~≈]?\s*([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:e[-+]?\d+)?)"
_COMMENT = r"(?:[(\[;].*)?"
_OTHER_UNIT = re.compile(
    r"(?:^.|\bin\b|=)\s*(?:per |total )?(?:k|[mbtgp]|thousand|[mbtr]+illion|[gpe]flops?(?:/s)?|[mun]s"
    r"|(?:milli|micro|nano)s\w*|[mu]secs?|min(?:ute)?s?|h|hrs?|hours?|days?|fraction|percent|total"
    r"|[kmgt]b(?:/s)?|nodes?|hosts?|racks?|pods?)\b",
    re.IGNORECASE,
)
"""In the comment after a number: a unit that is not its column's."""
_DENIED = re.compile(
    r"(?:\b(?:not?|non|never|without|instead of|rather than|unlike|vs\.?|versus)|n't)[\s-]+"
    r"(?:(?:the|an?|in|of|with)\s+)*$",
    re.IGNORECASE,
)
"""Words that deny what follows them."""
_SHOWN = 30
_NAMED = 5
"""Most rows that a sentence lists."""

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
    derived: dict[str, object] = field(default_factory=dict)
    """Properties that its comments or its other cells tell -> their values, which widen no interval."""
    notes: list[str] = field(default_factory=list)
    """Sentences on words of its comment that are not known, without which it is predicted, and on a layout
    that its program is not known to run."""

    def whole(self, name: str) -> int | None:
        """A whole number, or None where the cell is empty."""
        value = self.numbers.get(name)
        return None if value is None else round(value)

    def infer(self, name: str, value: V) -> V:
        """Note the value of a property that the row does not state, and return it."""
        self.inferred[name] = value
        return value

    def derive(self, name: str, value: V) -> V:
        """Note the value of a property that a comment or other cells tell, and return it."""
        self.derived[name] = value
        return value

    def whole_or(self, name: str, guess: int) -> int:
        """A whole number; where the cell is empty, `guess`, which is noted as inferred."""
        value = self.whole(name)
        return self.infer(name, guess) if value is None else value

    @property
    def model_ranks(self) -> int:
        """GPUs that hold the model once: tp x cp x pp."""
        return prod(self.whole(name) or 1 for name in ("tp", "cp", "pp"))

    def says(self, pattern: str) -> re.Match[str] | None:
        """Where the row's source or comment has a pattern as whole words that no word before them denies."""
        return phrase(pattern, f"{self.words['source']}; {self.words['where']}")


def rows_in_words(numbers: Sequence[int]) -> str:
    """Rows by number, the first few of many: 'row 3', 'rows 3 and 8', 'rows 3, 8, 9, 12, 40 and 7 more'."""
    shown = [str(number) for number in numbers[:_NAMED]]
    if more := len(numbers) - len(shown):
        shown.append(f"{more} more")
    if len(shown) == 1:
        return f"row {shown[0]}"
    return f"rows {', '.join(shown[:-1])} and {shown[-1]}"


def by_reason(told: Iterable[Mapping[str, Any]], words: str = "reason") -> dict[str, list[int]]:
    """Reason (or another of the `words`) -> numbers of the rows that have it, the most frequent first."""
    found: dict[str, list[int]] = {}
    for each in told:
        found.setdefault(each[words], []).append(each["row"])
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def phrase(pattern: str, text: str) -> re.Match[str] | None:
    """Where a text has a pattern as whole words, in letters of any case, that no word before them denies."""
    found = re.finditer(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", text, re.IGNORECASE)
    return next((each for each in found if not _DENIED.search(text[: each.start()])), None)


def first_match(table: Iterable[tuple[str, V]], text: str) -> V | None:
    """The value of the first pattern of a table that occurs in `text`, or None."""
    return next((value for pattern, value in table if re.search(pattern, text)), None)


def unread_columns(path: Path) -> list[str]:
    """Columns of a table that `read` has read, which say nothing here."""
    names = [name.strip() for name in _lines(path)[0]]
    return [short(name) for name in names if name and name.lower() not in _COLUMNS]


def _lines(path: Path) -> list[list[str]]:
    """The cells of each line of a CSV file. Raises `UserError`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if "\0" in text:
            raise csv.Error("it has NUL bytes")
        return [cells for cells in csv.reader(io.StringIO(text, newline=""), strict=True) if cells]
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; give a table of runs, as CSV") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read as a table: {reason}; give a CSV file in UTF-8") from None


def read(path: Path) -> list[Row]:
    """The rows of a CSV file. Raises `UserError` for a file that is not a table of runs."""
    lines = _lines(path)
    names = [name.strip().lower() for name in lines[0]] if lines else []
    for separator, word in ((";", "';'"), ("\t", "tabs")):
        if len(names) == 1 and separator in lines[0][0]:
            raise UserError(f"{path}: its columns are separated by {word}; they must be by ','")
    if not names:
        raise UserError(f"{path}: is empty; a table of runs has the columns of {PUBLISHED.name}")
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise UserError(f"{path}: has the column '{twice[0]}' twice; leave one")
    absent = sorted(_COLUMNS.difference(names))
    for name in names:
        # Columns of a table's own, such as seq_len_note beside seq_len, are left alone.
        meant = [_OTHER_NAMES[name]] if _OTHER_NAMES.get(name) in absent else []
        hint = f"; did you mean '{meant[0]}'?" if meant else did_you_mean(name, absent)
        if name not in _COLUMNS and hint:
            raise UserError(f"{path}: has an unknown column '{short(name)}'{hint}")
    if missing := [name for name in _NEEDED if name not in names]:
        raise UserError(
            f"{path}: has no column '{missing[0]}'; a table of runs has those of {PUBLISHED.name}"
        )
    if len(lines) == 1:
        raise UserError(f"{path}: has no rows below its heading; give one for each run that was measured")
    return [_row(number, names, cells) for number, cells in enumerate(lines[1:])]


def _row(number: int, names: list[str], given: list[str]) -> Row:
    """A row; the first invalid cell is kept as the word 'broken', so that the other rows are predicted."""
    cells = {name: cell.strip() for name, cell in zip(names, given, strict=False)}
    words = {name: cells.get(name, "") for name in _WORDS}
    words |= {name: words[name].lower() for name in CHOICES}
    numbers: dict[str, float] = {}
    if len(given) != len(names):
        words["broken"] = (
            f"its number of cells is {len(given)}, not the heading's {len(names)}; give one for each column, "
            "in quotes if it has a ','"
        )
    for name, text in cells.items():
        if name in words or name not in _COLUMNS or not text:
            continue
        if name == "peak_mem_gib" and text.upper() == "OOM":
            words["oom"] = "yes"
            continue
        unit = _UNITS.get(name, f"{name.rstrip('s').replace('_', ' ')}s?")
        found = re.fullmatch(rf"{_NUMBER}\s*(?:{unit})?\s*({_COMMENT})", text, re.IGNORECASE | re.DOTALL)
        try:
            if found and _OTHER_UNIT.search(re.sub(rf"^(.)\s*(?:{unit})\b", r"\1", found[2])):
                raise ValueError
            value = float(text if found is None else found[1].replace(",", ""))
            mistake = _mistake(name, short(text), value)
        except ValueError:
            mistake = (
                f"the cell '{name}' is '{short(text)}', which is not a number in the column's unit; give "
                "one, with a comment in parentheses"
            )
        if mistake:
            words.setdefault("broken", mistake)
        else:
            numbers[name] = value
    return Row(number, words, numbers)


def _mistake(name: str, text: str, value: float) -> str:
    """The reason why a number cannot stand in a column, or an empty text."""
    cell = f"the cell '{name}' is '{text}'"
    whole = name in INTEGERS
    least, most = INTEGERS[name] if whole else _MEASURES[name]
    if whole and not (isfinite(value) and value >= least and value.is_integer()):
        return f"{cell}, which is not a whole number of at least {least}"
    if not (isfinite(value) and value >= 0 and (whole or value)):
        return f"{cell}, which is not a measurement; give a number above 0, or an empty cell"
    if name == "gradient_bytes" and value in (3, 5, 6, 7):
        return f"{cell}, which no number format has; give 1, 2, 4 or 8"
    if not least <= value <= most:
        bound = f"at least {least:g}" if value < least else f"at most {most:,.0f}"
        return f"{cell}, which is implausible; give {bound}"
    return ""


def check(row: Row) -> None:
    """Raise `PredictionError` for a row with an invalid number, or a word that is not one of its column's."""
    if mistake := row.words.get("broken"):
        raise PredictionError(mistake)
    for name, known in CHOICES.items():
        if (word := row.words[name]) and word not in known:
            raise PredictionError(f"the {name} '{short(word)}' is not one of {', '.join(known)}")
    if word := row.words["precision"]:
        named = set(re.findall("|".join(FORMATS), word.lower()))
        if not named:
            raise PredictionError(f"the precision '{short(word)}' is not one of {', '.join(FORMATS)}")
        if len(named) > 1:
            listed = ", ".join(name for name in FORMATS if name in named)
            raise PredictionError(f"the precision '{short(word)}' is several formats: {listed}; give one")


def short(text: str) -> str:
    """A cell as a sentence quotes it: on one line, at most 30 characters, control characters escaped."""
    text = one_line(" ".join(text.split()))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
