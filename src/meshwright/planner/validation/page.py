"""The report of `meshwright validate` as text: a table of at most 100 columns, and a page in Markdown."""

from __future__ import annotations

from typing import Any


def percent(value: float | None) -> str:
    """Percent with one decimal, or an empty text for None."""
    return "" if value is None else f"{value:.1f}%"


def table(report: dict[str, Any], by: str = "source", width: int = 30) -> list[dict[str, str]]:
    """Rows of the table: every source (or model, or GPU), its name in `width` columns, and a total."""
    rows = []
    for name, figures in (*report[f"by_{by}"].items(), ("all", report)):
        time, memory, oom = figures["time"], figures["memory"], figures["oom"]
        rows.append(
            {
                by: name if len(name) <= width else name[: width - 1] + "…",
                "rows": f"{figures['predicted']}/{figures['rows']}",
                "time mean": percent(time["mean_abs_pct"]),
                "median": percent(time["median_abs_pct"]),
                "p90": percent(time["p90_abs_pct"]),
                "memory": percent(memory["mean_abs_pct"]),
                "tau": "" if figures["tau"] is None else f"{figures['tau']:.2f}",
                "regret": percent(figures["regret_pct"]),
                "fit": f"{oom['true_fit']}/{oom['true_fit'] + oom['false_oom']}",
                "oom": f"{oom['true_oom']}/{oom['true_oom'] + oom['false_fit']}",
            }
        )
    return rows


def page(report: dict[str, Any]) -> str:
    """The page of the documentation, docs/validation.md."""
    rows = table(report)
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    lines += [f"| {' | '.join(row.values())} |" for row in rows]
    skipped = [f"- {count} rows: {reason}" for reason, count in report["skipped"].items()]
    time, memory = report["others"]["time"], report["others"]["memory"]
    return _PAGE.format(
        table="\n".join(lines),
        rows=report["rows"],
        predicted=report["predicted"],
        skipped="\n".join(skipped) or "None.",
        calibrated=len(report["calibrated_rows"]),
        numbers=", ".join(map(str, report["calibrated_rows"])),
        others=f"{percent(time['mean_abs_pct'])} mean and {percent(time['median_abs_pct'])} median of step "
        f"time over {time['rows']} rows, {percent(memory['mean_abs_pct'])} of memory over {memory['rows']}",
        covered=percent(100 * report["covered"]) if report["covered"] is not None else "",
    )


_PAGE = """# Validation

Errors of the planner's predictions against other people's measurements. This page is made by

```sh
meshwright validate --markdown docs/validation.md
```

from `src/meshwright/planner/validation/data/published_runs.csv`: {rows} runs from papers and public
benchmark tables, each with its source. `meshwright validate runs.csv` makes the same figures of your own
table, with the same columns.

{table}

- **time**: absolute error of predicted seconds of a step; mean, median, 90th percentile. A row may state
  its speed in seconds, tokens per second, TFLOP/s or MFU; each counts as its source counts it (see
  `where`).
- **memory**: mean absolute error of the allocated bytes, or of the driver's count where the row states
  that.
- **tau**: Kendall's tau of predicted against measured time, averaged over groups of three or more layouts of
  one model and batch on one cluster.
- **regret**: extra time of the run predicted fastest within such a group, over the fastest one.
- **fit**: runs that were predicted to fit, out of those that ran. **oom**: runs that were predicted not to
  fit, out of those that ran out of memory.

Rows predicted: {predicted} of {rows}. Skipped:

{skipped}

## Constants

There is one set of constants per GPU type (`hardware/data/clusters.toml`) and one per software stack
(`planner/cost/stacks.toml`), none per paper, model or row. {calibrated} rows, every tenth, calibrated the
constants that `planner/validation/calibration.py` lists (rates of matrix products, attention and links; of
stacks the elementwise traffic, launches, contention and overlap) by `python bench/calibrate.py`, whose
results were rounded by hand, and an A100's link held to 0.9 of its rate: {numbers}. On the other rows:
{others}. All other constants, those of memory included, and the forms of the formulas were settled by hand
with all rows in view, so these are not errors on unseen data.

90% intervals held {covered} of the measured times.

## Inferred properties

Cells that a row leaves empty are inferred from the field's habits, and listed by `meshwright validate
--rows --json`:

- `vocab`: 51,200 (GPT-2's, padded); `precision`: fp16 on an A100, bf16 on later devices; gated layers and
  tied embeddings: as the number of parameters determines.
- `zero`, `sequence_parallel`: the program's default. `recompute`: the least that fits.
- `micro_batch`: the fastest of 1 to 16 that fits; torchtitan's pipelines have as many microbatches as
  ranks. If Megatron's authors do not state their microbatch, they are assumed to have tuned interleaved
  stages too (up to 4 per rank).
- `global_batch_seqs`: in proportion to another row of the same model and table.
- A row of one layer and no batch is one block's forward and backward, not a step.
- Peaks of GPUs and sizes of nodes are the catalogue's; BLOOM's cluster has four links of 100 Gbit/s a node.
"""
