"""Live progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from meshwright.rank.launchers import launcher_of
from meshwright.report import format as fmt
from meshwright.units import counted

# Steps that the remaining time is estimated from: few enough to follow a change of speed.
_WINDOW = 50
# Narrowest terminal, in columns, that has room for a bar.
_BAR_FROM = 100


def _of_answers(row: dict[str, Any], prefix: str) -> str:
    """Return how many pairs are right, or by how much judged answers that are wanted lead, or where all have
    one label their reward; "" of other runs."""
    if (right := row.get(f"{prefix}rewards_accuracies")) is not None:
        return f"pairs right {fmt.percent(right)}"
    names = {"margins": "reward margin", "chosen": "reward of wanted answers"}
    names["rejected"] = "reward of unwanted answers"
    found = ((name, row.get(f"{prefix}rewards_{key}")) for key, name in names.items())
    return next((f"{name} {fmt.fixed(value)}" for name, value in found if value is not None), "")


def figures(row: dict[str, Any], seconds_left: float | None) -> str:
    """Return `loss 5.1234  12,345 tok/s  mfu 34.1%  mem 1.2 GiB  eta 0:42`, unknown values as dashes."""
    of_answers = _of_answers(row, "")
    more = f"{of_answers}  " if of_answers else ""
    return (
        f"loss {fmt.fixed(row.get('loss'))}  {more}{fmt.count(row.get('tokens_per_second'))} tok/s  "
        f"mfu {fmt.percent(row.get('mfu'))}  mem {fmt.size(row.get('memory_bytes'))}  "
        f"eta {fmt.duration(seconds_left)}"
    )


def _of_datasheet(result: dict[str, Any]) -> str:
    """Return ` (55.9% of the datasheet, 49.8% causal)` of a run on devices whose peak is known, else ""."""
    whole, causal = (result.get(key) for key in ("mfu_datasheet", "causal_mfu_datasheet"))
    if not (fmt.is_number(whole) and fmt.is_number(causal)):
        return ""
    return f" ({fmt.percent(whole)} of the datasheet, {fmt.percent(causal)} causal)"


def _steps(result: dict[str, Any]) -> str:
    """Return the steps of a result with their noun."""
    return counted(result["steps"], "steps") if fmt.is_number(result.get("steps")) else "- steps"


def summary(result: dict[str, Any]) -> str:
    """Return a line that sums up the result of a run."""
    bits, xz = result.get("val_bits_per_byte"), result.get("xz_bits_per_byte")
    skipped = f", {fmt.count(result['skipped_steps'])} skipped" if result.get("skipped_steps") else ""
    skipped += (
        f", the last {fmt.count(result['skipped_last'])} among them" if result.get("skipped_last") else ""
    )
    against = f" (xz -9e {fmt.fixed(xz)})" if fmt.is_number(xz) else ""
    parts = {
        "steps": f"{_steps(result)} in {fmt.duration(result.get('seconds'))}{skipped}",
        "final_loss": f"loss {fmt.fixed(result.get('final_loss'))}",
        "val_bits_per_byte": f"validation {fmt.fixed(bits)} bits per byte{against}",
        "tokens_per_second": f"{fmt.count(result.get('tokens_per_second'))} tok/s",
        "mfu": f"mfu {fmt.percent(result.get('mfu'))}{_of_datasheet(result)}",
        "peak_memory_bytes": f"peak {fmt.size(result.get('peak_memory_bytes'))}",
    }
    return "  ".join(["done", *(text for key, text in parts.items() if result.get(key) is not None)])


def _redraws(console: Console) -> bool:
    """True for a terminal that a person looks at: mpirun gives one to each rank, and reads it itself."""
    task = "RANK" not in os.environ and launcher_of(os.environ) is not None
    return console.is_terminal and not console.is_dumb_terminal and not task


class Progress:
    """An observer that prints a run's progress.

    On a terminal: a bar with figures, redrawn in place at most 5 times a second, without a thread of its own.
    Elsewhere, such as on one that redraws nothing (TERM=dumb) or that mpirun gives its ranks: a line for the
    first and the last step, and at most one in 2 seconds for others. Evaluations and events are always lines.
    Once the output fails (a full disk, a reader that has gone), nothing more is shown, and a warning says so:
    the run goes on.

    Args:
        console: where to print; standard output by default.
        clock: monotonic seconds.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console(quiet=sys.stdout is None)
        self._redraws = _redraws(self.console)
        self.interval = 0.2 if self._redraws else 2.0
        self._clock = clock
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._last_step: int | None = None
        self._total: int | None = None
        self._shown_at = -math.inf
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def on_start(self, info: dict[str, Any]) -> None:
        step = int(info.get("step", 0))
        self._shown_at, self._last_step = -math.inf, info.get("last_step")
        self._total = info.get("total_steps", self._last_step)
        self._seen.clear()
        shown = {key: info[key] for key in ("parameters", "layout", "device") if info.get(key) is not None}
        if "parameters" in shown:
            shown["parameters"] = fmt.short(shown["parameters"])
        if spec := info.get("spec"):
            every = spec["checkpoint"]["every"]
            shown["compute"] = spec["precision"]["compute"]
            shown["checkpoints"] = {"auto": "auto", 0: "at the end"}.get(every, f"every {every}")
        self._line(f"{'resume at' if step else 'start at'} step {step}  {fmt.fields_text(shown)}".rstrip())
        if (attention := info.get("attention")) and attention["plain"] != "cpu":
            self._line("; ".join([f"attention: {attention['words']}", *attention["notes"]]))
        trained, of_all = info.get("trained_parameters"), info.get("all_parameters")
        if trained is not None and of_all is not None and trained < of_all:
            share = f"{100 * trained / of_all:.3g}%"
            self._line(f"trained: {trained:,} of {of_all:,} parameters ({share}); the others are frozen")
        if self._redraws:
            self._bar = self._make_bar(step)
            self._task = self._bar.add_task(
                "", total=self._total, completed=step, steps=self._of(step), figures=""
            )
            with self._survived():
                self._bar.start()

    def _make_bar(self, step: int) -> Bar:
        """Make a row of steps, bar and figures; a narrow terminal has no bar, and cuts the last figures."""
        widest = len(self._of(self._total if self._total is not None else 10**6 + step))
        columns: list[ProgressColumn] = [
            TextColumn("{task.fields[steps]}", table_column=Column(no_wrap=True, min_width=widest)),
            TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        ]
        if self.console.width >= _BAR_FROM:
            columns.insert(1, BarColumn(bar_width=None, table_column=Column(ratio=1)))
        return Bar(*columns, console=self.console, auto_refresh=False, expand=True)

    def on_step(self, row: dict[str, Any]) -> None:
        moment, step = self._clock(), int(row["step"])
        self._seen.append((moment, step))
        if step != self._last_step and moment - self._shown_at < self.interval:
            return
        self._shown_at = moment
        text = figures(row, self._seconds_left(step))
        if self._bar is None:
            self._line(f"{self._of(step)}  {text}")
        else:
            with self._survived():
                self._bar.update(self._task, completed=step, steps=self._of(step), figures=text, refresh=True)

    def on_eval(self, row: dict[str, Any]) -> None:
        parts = [f"validation at {self._of(int(row['step']))}", f"loss {fmt.fixed(row.get('val_loss'))}"]
        if of_answers := _of_answers(row, "val_"):
            parts.append(of_answers)
        elif (bits := row.get("val_bits_per_byte")) is not None:
            parts.append(f"{fmt.fixed(bits)} bits per byte")
        if "val_loss_ema" in row:
            parts.append(f"of the averaged weights {fmt.fixed(row['val_loss_ema'])}")
        self._line("  ".join(parts))

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind != "warning":  # shown by Python's warnings, also if progress is off
            self._line(f"{kind}  {fmt.fields_text(fields)}".rstrip())

    def on_end(self, result: dict[str, Any]) -> None:
        self.close()
        self._line(summary(result))

    def close(self) -> None:
        """Remove the bar, which hides the cursor; may be called twice."""
        if self._bar is not None:
            with self._survived():
                self._bar.stop()
            self._bar = None

    def _of(self, step: int) -> str:
        return f"step {step}/{self._total}" if self._total is not None else f"step {step}"

    def _seconds_left(self, step: int) -> float | None:
        """Estimate from the last steps, including evaluations and checkpoints between them; needs two."""
        (then, first), (moment, _) = self._seen[0], self._seen[-1]
        if self._last_step is None:
            return None
        if step >= self._last_step:
            return 0.0
        return (moment - then) / (step - first) * (self._last_step - step) if step > first else None

    def _line(self, text: str) -> None:
        with self._survived():
            self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    @contextmanager
    def _survived(self) -> Iterator[None]:
        """Context in which an output that cannot be written ends the showing, and not the run."""
        try:
            yield
        except (OSError, ValueError, SystemExit) as error:  # rich exits where a pipe has no reader
            if not isinstance(error, SystemExit):
                self.console.quiet = True
            reason = "nobody reads it" if isinstance(error, SystemExit) else str(error)
            warnings.warn(f"progress is shown no more: the output cannot be written ({reason})", stacklevel=2)
