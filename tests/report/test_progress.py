"""Progress lines of a run: enough lines, not too many, and no number that is not one."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from meshwright.report import format as fmt
from meshwright.report.progress import Progress, summary
from meshwright.train.callbacks import Observers


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watch(terminal: bool = False, width: int = 120) -> tuple[Progress, Clock, io.StringIO]:
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=terminal, width=width, color_system=None)
    return Progress(console, clock=clock), clock, stream


def row(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.1234,
        "tokens_per_second": 12345.4,
        "mfu": 0.341,
        "memory_bytes": 1.2 * 2**30,
    } | values


def step_lines(stream: io.StringIO) -> list[int]:
    return [int(found) for found in re.findall(r"^step (\d+)", stream.getvalue(), re.MULTILINE)]


def test_a_plain_line_has_all_the_figures() -> None:
    progress, clock, stream = watch()
    progress.on_start({"step": 0, "last_step": 62})
    for step in range(1, 21):
        clock.now += 1
        progress.on_step(row(step))
    assert "step 19/62  loss 5.1234  12,345 tok/s  mfu 34.1%  mem 1.2 GiB  eta 0:43\n" in stream.getvalue()


def test_plain_lines_are_throttled_but_first_and_last_are_shown() -> None:
    progress, clock, stream = watch()
    progress.on_start({"step": 0, "last_step": 101})
    for step in range(1, 102):
        clock.now += 0.1
        progress.on_step(row(step))
    steps = step_lines(stream)
    assert steps[0] == 1 and steps[-1] == 101
    # Ten seconds of steps: the first line, the last, and at most one in two seconds between them.
    assert 5 <= len(steps) <= 7


OF_MPIRUN = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items()
}


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, OF_MPIRUN], ids=["dumb", "mpirun"])
def test_a_terminal_that_nobody_looks_at_gets_lines(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    progress, _, stream = watch(terminal=True)
    progress.on_start({"step": 0, "last_step": 2})
    progress.on_step(row(1))
    progress.on_step(row(2))
    progress.close()
    assert step_lines(stream) == [1, 2]
    assert not {"\r", "\x1b"} & {*stream.getvalue()}


def test_one_step_is_one_step() -> None:
    assert "done  1 step in" in summary({"steps": 1, "seconds": 1.0})
    assert "done  2 steps in" in summary({"steps": 2, "seconds": 1.0})


def test_slow_steps_are_all_shown() -> None:
    progress, clock, stream = watch()
    progress.on_start({"step": 0, "last_step": 5})
    for step in range(1, 6):
        clock.now += 3
        progress.on_step(row(step))
    assert step_lines(stream) == [1, 2, 3, 4, 5]


def test_the_time_left_counts_what_lies_between_steps() -> None:
    """A step every 2 s, of which only 1 s may be the step itself: 30 steps left take a minute."""
    progress, clock, stream = watch()
    progress.on_start({"step": 10, "last_step": 60})
    for step in range(11, 31):
        clock.now += 2
        progress.on_step(row(step, seconds=1.0))
    assert "step 30/60" in stream.getvalue().splitlines()[-1]
    assert stream.getvalue().rstrip().endswith("eta 1:00")


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_not_a_number_is_a_dash(value: float | None) -> None:
    progress, _, stream = watch()
    progress.on_start({"step": 0, "last_step": 2})
    progress.on_step(row(1, loss=value, tokens_per_second=value, mfu=value, memory_bytes=value))
    assert "step 1/2  loss -  - tok/s  mfu -  mem -  eta -\n" in stream.getvalue()


def test_events_and_evaluations_are_lines_whenever_they_come() -> None:
    progress, _, stream = watch()
    progress.on_start({"step": 0, "last_step": 9})
    progress.on_step(row(1))
    for _ in range(3):
        progress.on_event("skipped_step", {"step": 1, "reason": "gradient is [not] finite"})
    progress.on_eval({"step": 1, "val_loss": 4.5, "val_bits_per_byte": None})
    text = stream.getvalue()
    assert text.count("skipped_step  step 1  reason gradient is [not] finite\n") == 3
    assert "validation at step 1/9  loss 4.5000\n" in text


def test_a_validation_has_the_figure_of_its_loss() -> None:
    progress, _, stream = watch()
    progress.on_start({"step": 0, "last_step": 9})
    rewards = {"val_rewards_chosen": 0.5, "val_rewards_rejected": 0.25, "val_rewards_margins": 0.25}
    for found in (
        {"val_bits_per_byte": 1.5},
        rewards | {"val_rewards_accuracies": 1 / 3},
        rewards,
        {"val_rewards_chosen": 0.5},
        {"val_rewards_rejected": 0.25},
    ):
        progress.on_eval({"step": 1, "val_loss": 4.5, "val_loss_ema": 4.25, **found})
    begin, end = "validation at step 1/9  loss 4.5000  ", "  of the averaged weights 4.2500"
    said = ["1.5000 bits per byte", "pairs right 33.3%", "reward margin 0.2500"]
    said += ["reward of wanted answers 0.5000", "reward of unwanted answers 0.2500"]
    assert stream.getvalue().splitlines()[1:] == [f"{begin}{each}{end}" for each in said]


def test_a_run_that_stops_early_counts_against_the_whole_but_waits_for_its_stop() -> None:
    progress, clock, stream = watch()
    progress.on_start({"step": 0, "last_step": 20, "total_steps": 40})
    for step in range(1, 21):
        clock.now += 3
        progress.on_step(row(step))
    lines = stream.getvalue().splitlines()
    assert lines[-1].startswith("step 20/40") and lines[-1].endswith("eta 0:00")
    assert lines[-2].endswith("eta 0:03")


def test_long_lines_are_not_broken() -> None:
    progress, _, stream = watch(width=40)
    progress.on_start({"step": 0, "last_step": 2})
    progress.on_event("checkpoint", {"path": "x" * 200})
    assert "checkpoint  path " + "x" * 200 + "\n" in stream.getvalue()


def test_the_end_is_told_with_what_is_known() -> None:
    progress, _, stream = watch()
    progress.on_start({"step": 0, "last_step": 2})
    progress.on_end(
        {"steps": 2, "seconds": 83, "final_loss": 3.2, "val_bits_per_byte": 1.5, "xz_bits_per_byte": 1.8}
    )
    last = stream.getvalue().splitlines()[-1]
    assert last == "done  2 steps in 1:23  loss 3.2000  validation 1.5000 bits per byte (xz -9e 1.8000)"


@pytest.mark.parametrize("width", [60, 120])
def test_a_terminal_gets_its_cursor_back(width: int) -> None:
    """Also when the run breaks off, as leaving the `with` block does."""
    progress, clock, stream = watch(terminal=True, width=width)
    with pytest.raises(RuntimeError), Observers([progress]):
        progress.on_start({"step": 0, "last_step": 20})
        for step in range(1, 6):
            clock.now += 1
            progress.on_step(row(step))
        raise RuntimeError
    text = stream.getvalue()
    assert "step 5/20" in text and "loss 5.1234" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_terminal_is_not_redrawn_for_each_fast_step() -> None:
    progress, clock, stream = watch(terminal=True)
    progress.on_start({"step": 0, "last_step": 1001})
    for step in range(1, 1001):
        clock.now += 0.001
        progress.on_step(row(step))
    progress.close()
    assert stream.getvalue().count("loss 5.1234") <= 10


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed file")])
def test_an_output_that_fails_ends_the_showing_and_not_the_run(error: Exception, terminal: bool) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    progress = Progress(Console(file=Full(), force_terminal=terminal, width=120))
    with pytest.warns(UserWarning, match="progress is shown no more: .*(No space left|closed file)") as told:
        progress.on_start({"step": 0, "last_step": 3})
        for step in range(1, 4):
            progress.on_step(row(step))
        progress.on_event("checkpoint", {"step": 3})
        progress.on_end({"steps": 3})
    assert len(told) == 1


def test_one_observer_that_fails_to_close_does_not_keep_the_others_open() -> None:
    closed: list[str] = []

    class Failing(Progress):
        def close(self) -> None:
            raise OSError("disk")

    class Noting(Progress):
        def close(self) -> None:
            closed.append("second")

    with pytest.raises(OSError, match="disk"):
        Observers([Failing(), Noting()]).close()
    assert closed == ["second"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3723, "1:02:03"), (183845, "2 d 3:04:05"), (None, "-")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert fmt.duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(512, "512 B"), (1024, "1.0 KiB"), (1.25 * 2**30, "1.2 GiB"), (float("nan"), "-")]
)
def test_sizes(size: float, text: str) -> None:
    assert fmt.size(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (12_345, "12.35k"),
        (3_016_960, "3.017M"),
        (8_030_261_248, "8.03B"),
        (1.5e13, "15T"),
        (float("inf"), "-"),
    ],
)
def test_short_numbers(value: float, text: str) -> None:
    assert fmt.short(value) == text
