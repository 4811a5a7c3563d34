"""The page of a comparison's rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from cases import CASES, MODELS
from meshwright.units import gigabytes, short

HEAD = """# Beside other programs

This page is made from measurements by

```sh
make bench-peers
make bench-peers ARGS="--models small --precision bf16 --cases one tp2 --sides Megatron torchtitan"
```

Each row is a program that trains the same model on the same tokens, in turns with `meshwright train`, which
runs with all its defaults (but for the document mask, which others do not have), with AdamW and gradient
clipping, 8 sequences of 512 tokens a step. Both are started, and one goes on for some steps while all
processes of the other are stopped; rows of before 2026-11-27 are of turns that start and end a program
each. "Meshwright, independent runs" are two runs of half the batch at the same time, on one core and with
tokens of their own each: what the machine gives two processes that never wait and sum nothing. A row of
another day than its table's has its date.

`ratio` is our tokens per second over theirs, the median of pairs of stretches of steps, each with ours
beside that program: so it differs from the quotient of two rows. `of products` is the model's FLOP/s over
the rate of plain matrix products, measured in each round; `peak` is the most memory that all processes of a
program had at once, outside the steps that are timed; `first step` counts from the command. What each rank
of a program held after the last step was counted there, not taken from the layout's name. Programs that
need a GPU for something have it replaced, as the first lines of their files under `bench/peers/` say.
Programs with weights in bf16 alone also update them in bf16, which is not the same training.
"""


def case_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """The case that a row was measured in: model, precision, layout."""
    return row["model"], row["precision"], row["case"]


def processor_of(row: Mapping[str, Any]) -> str:
    """The processor that a row was measured on, the first part of its "machine"."""
    return str(row["machine"].partition(",")[0])


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page, with a table for each model, precision, case and processor."""
    parts, cases = [HEAD], list(CASES)
    together = sorted(
        rows, key=lambda row: (MODELS.index(row["model"]), row["precision"], cases.index(row["case"]))
    )
    for (model, precision, case), of_case in groupby(together, case_of):
        parts.append(f"## {model}, {precision}: {CASES[case].title}\n")
        for _, of_processor in groupby(sorted(of_case, key=processor_of), processor_of):
            listed = list(of_processor)
            measured = [row for row in listed if "matmul_gflops" in row]
            if measured:
                last = max(measured, key=_date)
                parts.append(f"{last['machine']}; matrix products at {last['matmul_gflops']:,.0f} GFLOP/s.\n")
            parts.append("\n".join(_table(listed)) + "\n")
    return "\n".join(parts)


def _date(row: Mapping[str, Any]) -> str:
    return str(row["machine"].rpartition("; ")[2])


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| | tokens/s | quartiles | ratio | of products | peak | first step, s | each rank held |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    measured = [row for row in rows if "error" not in row]
    last = max(map(_date, measured), default="")
    for row in sorted(measured, key=lambda row: -row["tokens_per_second"]):
        low, high = row["quartiles"]
        date = _date(row)
        cells = (
            row["side"] if date == last else f"{row['side']} ({date})",
            f"{row['tokens_per_second']:,.0f}",
            f"{low:,.0f} to {high:,.0f}",
            f"{row['ratio']:.2f}",
            f"{row['matmul_fraction']:.0%}",
            gigabytes(row["peak_bytes"]),
            f"{row['first_step_seconds']:.1f}",
            _held(row["held"]),
        )
        yield f"| {' | '.join(cells)} |"
    for row in rows:
        if "error" in row:
            yield f"| {row['side']} | does not run: `{row['error']}` | | | | | | |"


def _held(ranks: Sequence[Mapping[str, Any]]) -> str:
    """The words for what ranks hold; once where all hold as much."""
    told = [_of_rank(each) for each in ranks]
    return told[0] if len(set(told)) == 1 else "; ".join(told)


def _of_rank(held: Mapping[str, Any]) -> str:
    if isinstance(held["parameters"], int):  # ours: bytes of each kind
        return ", ".join(f"{gigabytes(size)} of {name}" for name, size in held.items() if size)
    parts = [
        f"{short(held[name]['elements'])} {words} in {' and '.join(held[name]['types'])}"
        for name, words in (("parameters", "parameters"), ("states", "numbers of optimiser states"))
        if held[name]["elements"]
    ]
    return ", ".join(parts)
