"""What `meshwright validate` found, as text: tables of at most 100 columns, and a page in Markdown."""

from __future__ import annotations

from typing import Any


def cells(name: str, found: dict[str, Any], by: str = "source", width: int = 30) -> dict[str, str]:
    """A row of the table: one source (or model, or GPU), or all."""
    time, memory, oom = found["time"], found["memory"], found["oom"]
    return {
        by: name if len(name) <= width else name[: width - 1] + "…",
        "rows": f"{found['predicted']}/{found['rows']}",
        "time mean": percent(time["mean_abs_pct"]),
        "median": percent(time["median_abs_pct"]),
        "p90": percent(time["p90_abs_pct"]),
        "memory": percent(memory["mean_abs_pct"]),
        "tau": "" if found["tau"] is None else f"{found['tau']:.2f}",
        "regret": percent(found["regret_pct"]),
        "fit": f"{oom['true_fit']}/{oom['true_fit'] + oom['false_oom']}",
        "oom": f"{oom['true_oom']}/{oom['true_oom'] + oom['false_fit']}",
    }


def percent(value: float | None) -> str:
    """One decimal, or nothing."""
    return "" if value is None else f"{value:.1f}%"


def table(found: dict[str, Any], by: str = "source", width: int = 30) -> list[dict[str, str]]:
    """Rows of the table: every source (or model, or GPU), named in `width` columns, and all together."""
    named = [*found[f"by_{by}"].items(), ("all", found)]
    return [cells(name, part, by, width) for name, part in named]


def page(found: dict[str, Any]) -> str:
    """A page of the documentation."""
    rows = table(found)
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    lines += [f"| {' | '.join(row.values())} |" for row in rows]
    skipped = [f"- {count} rows: {reason}" for reason, count in found["skipped"].items()]
    return _PAGE.format(
        table="\n".join(lines),
        rows=found["rows"],
        predicted=found["predicted"],
        skipped="\n".join(skipped) or "None.",
        calibrated=len(found["calibrated_rows"]),
        of=", ".join(map(str, found["calibrated_rows"])),
        apart=_others(found["others"]),
        covered=percent(100 * found["covered"]) if found["covered"] is not None else "",
    )


def _others(found: dict[str, Any]) -> str:
    time, memory = found["time"], found["memory"]
    return (
        f"{percent(time['mean_abs_pct'])} mean and {percent(time['median_abs_pct'])} median of step time "
        f"over {time['rows']} rows, {percent(memory['mean_abs_pct'])} of memory over {memory['rows']}"
    )


_PAGE = """# Validation

How far the planner's predictions are from other people's measurements. This page is made by

```sh
meshwright validate --markdown docs/validation.md
```

from `src/meshwright/planner/validation/data/published_runs.csv`: {rows} runs from papers and public benchmark
tables, each with its source. `meshwright validate runs.csv` does the same with a table of yours, with the
same columns.

{table}

- **time**: absolute error of predicted seconds of a step; mean, median, 90th percentile. A row's speed
  may be seconds, tokens per second, TFLOP/s or MFU; each counts as its source counts it (`where` says
  how).
- **memory**: mean absolute error of what is allocated, or of what the driver counts where the row says
  so.
- **tau**: Kendall's, predicted against measured, within groups of one model and batch on one cluster that
  have three rows or more; their mean.
- **regret**: by how much the run that is predicted fastest within such a group is slower than the
  fastest.
- **fit**: runs that were predicted to fit, of those that ran. **oom**: runs that were predicted not to,
  of those that did not.

Rows predicted: {predicted} of {rows}. Skipped:

{skipped}

## Constants

One set a GPU type (`hardware/peak_rates.py`) and one a software stack (`planner/cost/software.py`), none a
paper, a model or a row. {calibrated} rows, every tenth, calibrated the ones that
`planner/validation/calibration.py` lists (rates of products, attention and links; of stacks what moves bytes,
launches, contention and overlap) by `python bench/calibrate.py`, whose result was rounded by hand, and an
A100's link held to 0.9 of its rate: {of}. On the other rows: {apart}. All other constants, those of memory
among them, and the forms of the formulas were settled by hand with all rows in view, so these are not errors
on unseen data.

Intervals of 90% held {covered} of the measured times.

## What is inferred

What a row leaves empty is taken from the field's habits, and said in `meshwright validate --rows --json`:

- `vocab`: 51,200 (GPT-2's, padded); `precision`: fp16 on an A100, bf16 later; gated layers and tied ends:
  as the number of parameters tells.
- `zero`, `sequence_parallel`: what the program does by default. `recompute`: the least that fits.
- `micro_batch`: the fastest of 1 to 16 that fits; torchtitan's pipelines have as many microbatches as
  ranks. Where Megatron's authors do not tell their microbatch, they are taken to have tuned interleaved
  stages too (up to 4 a rank).
- `global_batch_seqs`: in proportion to another row of the same model and table.
- A row of one layer and no batch is one block's forward and backward, not a step.
- Peaks of GPUs, and nodes, are the catalogue's; BLOOM's cluster has four links of 100 Gbit/s a node.
"""
