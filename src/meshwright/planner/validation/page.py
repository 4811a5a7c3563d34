"""The report of `meshwright validate` as text: a table of at most 100 columns, and a page in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.planner.validation.calibration import BY_HAND, MODELS
from meshwright.planner.validation.left_out import WORDS
from meshwright.planner.validation.table import by_reason, rows_in_words
from meshwright.spec.load import one_line

_WHOLE = 100
"""Columns of a source's name on the page, which is never cut."""


def percent(value: float | None) -> str:
    """Percent with one decimal, or an empty text for None."""
    return "" if value is None else f"{value:.1f}%"


def signed(value: float | None) -> str:
    """Percent with its sign and one decimal, or an empty text for None."""
    return "" if value is None else f"{value:+.1f}%"


def shortened(names: Iterable[str], width: int) -> dict[str, str]:
    """Names -> as they are shown in `width` columns, control characters escaped; no two are alike."""
    shown: dict[str, str] = {}
    for name in names:
        text, number = one_line(name), 1
        cut = _cut(text, width)
        while cut in shown.values():
            number += 1
            cut = f"{_cut(text, width - 1 - len(str(number)))}~{number}"
        shown[name] = cut
    return shown


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def table(report: dict[str, Any], by: str = "source", width: int = 30) -> list[dict[str, str]]:
    """Rows of the table: every source (or model, or GPU), its name in `width` columns, and a total."""
    rows, shown = [], shortened((*report[f"by_{by}"], "all"), width)
    for name, figures in (*report[f"by_{by}"].items(), ("all", report)):
        time, memory, oom = figures["time"], figures["memory"], figures["oom"]
        rows.append(
            {
                by: shown[name],
                "rows": f"{figures['predicted']}/{figures['rows']}",
                "time mean": percent(time["mean_abs_pct"]),
                "median": percent(time["median_abs_pct"]),
                "p90": percent(time["p90_abs_pct"]),
                "bias": signed(time["bias_pct"]),
                "held": percent(None if figures["covered"] is None else 100 * figures["covered"])[:-3],
                "memory": percent(memory["mean_abs_pct"]),
                "tau": "" if figures["tau"] is None else f"{figures['tau']:.2f}",
                "regret": percent(figures["regret_pct"]),
                "fit": f"{oom['true_fit']}/{oom['true_fit'] + oom['false_oom']}",
                "oom": f"{oom['true_oom']}/{oom['true_oom'] + oom['false_fit']}",
            }
        )
    return rows


def page(report: dict[str, Any], by: str = "source") -> str:
    """The page of the documentation, docs/validation.md, of the report of the published runs.

    Of the report of another table it is its figures alone. Both are by source, model or GPU.
    """
    if "left_out" not in report:
        figures = _markdown(table(report, by, _WHOLE))
        told = f"# Validation\n\n{figures}\n\nRefused, with the reason:\n\n{_skipped(report)}\n"
        notes = [
            f"- {rows_in_words(numbers)}: {note}"
            for note, numbers in by_reason(report["notes"], "note").items()
        ]
        if unread := report["unread_columns"]:
            notes.append(f"- columns that are not read: {', '.join(unread)}")
        return told + ("\nNotes:\n\n" + "\n".join(notes) + "\n" if notes else "")
    frontier, unseen = report["frontier"], report["left_out"]
    both = f"{unseen['rows']} runs of {len(unseen['by_source'])} sources"
    return _PAGE.format(
        unseen=_unseen(unseen),
        both=both,
        bias=signed(unseen["bias_pct"]),
        mean=percent(unseen["mean_abs_pct"]),
        median=percent(unseen["median_abs_pct"]),
        held=f"{100 * unseen['covered']:.0f}%",
        published=_markdown(table(report, by, _WHOLE)),
        frontier=_markdown(table(frontier, by, _WHOLE)),
        skipped=_skipped(report, frontier),
        predicted=report["predicted"] + frontier["predicted"],
        rows=report["rows"] + frontier["rows"],
        calibrated=len(frontier["calibrated_rows"]),
        others=frontier["rows"] - len(frontier["calibrated_rows"]),
        models=" and ".join(MODELS),
        groups=report["groups"],
        regret=percent(report["regret_median_pct"]),
        shown=report["fastest_shown"],
        by_hand=sum(BY_HAND.values()),
        other_errors=f"{percent(frontier['others']['time']['mean_abs_pct'])} mean and "
        f"{percent(frontier['others']['time']['median_abs_pct'])} median",
    )


def _unseen(report: dict[str, Any]) -> str:
    """The errors of sources that were left out, by regime and by source, as a table."""
    groups = {WORDS[name]: part for name, part in report["by_regime"].items()} | report["by_source"]
    rows = [
        {
            "left out": name,
            "rows": str(part["rows"]),
            "time mean": percent(part["mean_abs_pct"]),
            "median": percent(part["median_abs_pct"]),
            "p90": percent(part["p90_abs_pct"]),
            "bias": signed(part["bias_pct"]),
            "held": "" if part["covered"] is None else f"{100 * part['covered']:.0f}%",
        }
        for name, part in (*groups.items(), ("all", report))
    ]
    return _markdown(rows)


def _markdown(rows: list[dict[str, str]]) -> str:
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(_text, row.values()))} |" for row in rows)])


def _text(words: str) -> str:
    """Words of a table as plain text in Markdown, in one line."""
    return one_line(words).replace("|", r"\|").replace("<", "&lt;")


def _skipped(report: dict[str, Any], frontier: dict[str, Any] | None = None) -> str:
    """Lines of a list: which rows are refused for which reason."""
    lines = [
        f"- {rows_in_words(numbers)}{of}: {_text(reason)}"
        for of, each in (("", report), (" of the frontier", frontier or {"skipped_rows": ()}))
        for reason, numbers in by_reason(each["skipped_rows"]).items()
    ]
    return "\n".join(lines) or "None."


_PAGE = """# Validation

Errors of the planner's predictions against other people's measurements. This page is made by

```sh
meshwright validate --markdown docs/validation.md
```

from two tables of runs from papers and public benchmark tables, each with its source, in
`src/meshwright/planner/validation/data`: `published_runs.csv` (303 runs, dense, A100 and H100) and
`published_runs_frontier.csv` (151 runs, also on Blackwell, in 8 and 4 bits, and with experts). `meshwright
validate runs.csv` makes the same figures of your own table, with the same columns.

## Runs that were never seen

What to expect of the next run: each source is predicted by numbers that were fitted without it (`python
bench/calibrate.py --leave-out`). Over {both}: **{mean} mean, {median} median**, bias {bias}; 90% intervals
hold {held}.

{unseen}

- **time**: absolute error of predicted seconds of a step; mean, median, 90th percentile; **bias** is the mean
  error with its sign. A row may state its speed in seconds, tokens per second, TFLOP/s or MFU; each counts as
  its source counts it (see `where`).
- **held**: share of the measured times within their 90% intervals. These are wider where the planner knows
  less: dense models on devices that programs of several sources were timed on, dense models on others, and
  models with experts. On AMD's devices and TPUs, of which these tables have no run, they are twice as wide.

What these figures do not leave out: the forms of the formulas, the kinds of each program, the {by_hand}
numbers fitted by hand and what is assumed of a number before its fit were settled with all runs of these
tables in view.

## Runs that were in view

With the numbers of all calibrating runs, as `plan` uses them. Published runs:

{published}

Runs of the frontier:

{frontier}

- **memory**: mean absolute error of the allocated bytes, or of those that the allocator reserved, as in
  torchtitan's own tables, or of the driver's count where the row states that.
- **tau**: Kendall's tau of predicted against measured time, averaged over groups of three or more layouts of
  one model and batch on one cluster.
- **regret**: extra time of the run predicted fastest within such a group, over the fastest one. Of the
  published runs' {groups} groups its median is {regret}, and in {shown} the fastest run is among the three
  that are predicted fastest.
- **fit**: runs that were predicted to fit, out of those that ran. **oom**: runs that were predicted not to
  fit, out of those that ran out of memory. A layout that its program is known not to run counts as one that
  does not fit.

Rows predicted: {predicted} of {rows}. Refused, by number from 0 below the heading, with the reason:

{skipped}

A row is also refused that does not add up (its parameters and its shape, or a preset of its name; its GPUs,
its schedule and its layout; its seconds, its tokens per second and its OOM; its formats), whose program is
not known, whose GPUs are of several kinds, and whose model is no decoder of attention layers.

## Numbers

A training program is a set of kinds (`planner/cost/stacks.toml`): its operators, attention kernels, what it
overlaps, the widths of its states. The numbers of these kinds are the same for all programs, and those of a
device's rates for all devices of a generation, but for its datasheet and one law of the attained rate over
the watts for each peak FLOP/s (`hardware/data/clusters.toml`). `planner/validation/calibration.py` names
those that `python bench/calibrate.py` fitted, and the runs: all published ones, and of the frontier
{calibrated} of {models}. On its other {others}: {other_errors}.

## Columns

`source`, `gpu`, `gpus` and `seq_len` are needed; a cell may be empty, and a row has a cell for each column. A
number may have its column's unit after it, and then a comment in parentheses that names no other unit. Other
columns are left alone, unless one is near the name of a column that the table lacks, or its usual name
elsewhere: that is taken for a slip of the pen and refused.

- The model: `model`, `params_b` (billions), `layers`, `hidden`, `ffn`, `heads`, `kv_heads`, `head_dim`,
  `vocab`, `experts`, `top_k`, `moe_ffn` (of one expert; else `ffn`), `shared_ffn`.
- The layout: `tp`, `cp`, `pp`, `vp` (stages of a rank), `ep`, `etp`, `dp`, `zero`, `micro_batch`,
  `global_batch_seqs`, `recompute` (none, selective, full), `sequence_parallel` (yes, no).
- The program: `program`, `attention` (unfused, flash1 to flash4, cudnn), `gradient_bytes` (1, 2, 4 or 8, as
  they are kept and reduced), `cuda_graphs` (yes: no time of the host; no), `capacity_factor` (most rows of an
  expert, in even shares; Megatron-Core then hides no message to experts), `moe_pad_to_capacity` (yes: as many
  rows as that; no), `precision` and `fp8_recipe` (fp8 by tensor, row or block, mxfp8, mxfp4, nvfp4, bf16,
  fp16, fp32).
- The cluster: `gpu`, as people write it (H100 SXM5 80GB, 8xB200); `power_w`, the watts that a device is held
  to, with whose root what products attain falls; `gpus_per_node`; `network_gbps`, Gbit/s of a device's
  interfaces; above 1,600 those of a node.
- What was measured: `step_seconds`, `tokens_per_sec_per_gpu`, `tflops_per_gpu`, `mfu_pct`, `peak_mem_gib`
  (or OOM).
- `where` and `confidence` are comments. Of the words in `source` and `where` only these count, if no "not"
  is before them: a program's name where `program` is empty, its arXiv number, FSDP2 eager; schedule=ZB-1p,
  where no column `schedule` has it; MaxText's policies of recomputation (remat minimal_offloaded), where it
  puts an output (out_proj=offload, device or remat), and weight_dtype=bfloat16; power limited, which asks
  for `power_w` or for watts behind it (power limited to 500 W); a node's network as 4 x 200 Gbit/s or
  4x200Gb IB; hardware TFLOP/s, HFU or incl. recompute, of `tflops_per_gpu`, and half of attention, which
  Megatron-Bridge counts; memory in GB, reserved or by nvidia-smi; and of torchtitan a date, as 2025-06,
  since it compiles its loss from April 2025 on. They are listed with the inferred properties; a policy of
  recomputation, an output or a place that is not known (remat_policy=mine) is told with its row.

Columns that say nothing here are named, and those whose usual name elsewhere is known
(tensor_model_parallel_size, zero_stage) are refused with the name here.

## Inferred properties

Cells that a row leaves empty are inferred from the field's habits, and listed by `meshwright validate
--rows --json`:

- `program`: what the source or the comment names, else the usual one of its year; of torchtitan without a
  date the later release on devices of other makers and of generations after the H100's. `vocab`: 51,200
  (GPT-2's, padded); `precision`: fp16 on an A100, bf16 on later devices; `top_k`: 2.
- What follows from other cells or comments is listed too, but widens no interval: `ffn`: 4 x `hidden`, or two
  thirds of that in gated layers; `kv_heads`: all `heads`; `head_dim`: `hidden` / `heads`; `moe_ffn`: `ffn`;
  gated layers and tied embeddings: as the number of parameters determines. All of them, experts and latents
  too, are those of a preset of the same name (`shape`) that no cell contradicts.
- The layout, where `tp`, `cp`, `pp` and `dp` are all empty: data ranks alone, and the row is refused if the
  model does not fit so. `zero`, `sequence_parallel`: the program's default. `recompute`: the least that
  fits, of as few layers as fits, but in MaxText of all; its remat custom is taken to keep a block's input
  and the outputs of attention's products in the host's memory, as Google's recipes for TPU v6e do.
- `micro_batch`: the fastest of 1 to 16 that fits; torchtitan's pipelines have as many microbatches as
  ranks. If Megatron's authors do not state their microbatch, they are assumed to have tuned interleaved
  stages too (up to 4 per rank).
- `global_batch_seqs`: in proportion to another row of the same model and table.
- A row of one layer and no batch is one block's forward and backward, not a step.
- Peaks of GPUs and sizes of nodes are the catalogue's; BLOOM's cluster has four links of 100 Gbit/s a node.
"""
