"""Goodput under failures: best checkpoint interval, effective share of the time, tokens per day, cost.

Failures occur at a constant rate: the time to the next is exponential with mean M (`mtbf_seconds`), whatever
the run is doing. After a failure a restart takes R seconds, and starts over if a failure interrupts it.
Training continues from the last complete checkpoint. After every tau seconds of training a save stops it for
C seconds; the checkpoint is then completed in the background in W seconds, and a restart cannot use it
before. At most one save is in flight: the next one waits for it, as in `checkpoint/store.py`.

Each end of a restart is a renewal, so by the renewal-reward theorem the effective share is the expected
training that an attempt keeps, over the expected duration of the attempt and its restart. Checkpoint k is
complete at tau + C + (k - 1) p + W with p = max(tau, W) + C, an attempt lasts M on average and its restart
M (e^(R/M) - 1), hence

    effective = tau e^(-(tau + C + W) / M) / ((1 - e^(-p/M)) M e^(R/M)).

With W = 0 this is tau / (M e^(R/M) (e^((tau + C) / M) - 1)), the complete cost function of Daly (2006). The
formula is exact in the long run; `reliability/monte_carlo.py` simulates the same process event by event.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.units import short

HOUR, DAY = 3600.0, 86400.0
LEAST, MOST = 1e-6, 1e12
"""Valid durations in seconds: a microsecond to 30 thousand years."""
HOPELESS = 50.0
"""Mean times between failures that almost no attempt survives: one in e^50."""


@dataclass(frozen=True)
class Faults:
    """Failure rate of a system, and the durations of saves and restarts, in seconds.

    Raises `UserError` for an invalid duration, and for restarts that would almost never complete.
    """

    mtbf_seconds: float
    """Mean time between failures of the whole system."""
    save_seconds: float
    """Seconds that a save stops training."""
    restart_seconds: float
    """Seconds from a failure until training continues: detection, restart, load."""
    background_seconds: float = 0.0
    """Seconds from the end of that stop until the checkpoint is complete, during training."""

    def __post_init__(self) -> None:
        check_seconds("mtbf_seconds", self.mtbf_seconds)
        for name in ("save_seconds", "restart_seconds", "background_seconds"):
            check_seconds(name, getattr(self, name), least=0.0)
        if self.restart_seconds > HOPELESS * self.mtbf_seconds:
            raise UserError(
                f"restart_seconds: {self.restart_seconds:g} is more than {HOPELESS:g} times the "
                f"{self.mtbf_seconds:g} s between failures, so restarts would almost never complete; it "
                f"should be well below {self.mtbf_seconds:g}"
            )


def check_seconds(name: str, value: float, least: float = LEAST) -> None:
    """Raise `UserError` unless a duration is between `least` and MOST seconds."""
    if not least <= value <= MOST:
        raise UserError(f"{name}: {value} is not a number of seconds from {least:g} to {MOST:g}")


def system_mtbf(
    mtbf_hours: float | None = None, device_mtbf_hours: float | None = None, devices: int | None = None
) -> float:
    """Mean seconds between failures of a system, from its hours, or from those of one of its `devices`.

    Failure rates add up, so the system's mean time is one device's divided by their number. Raises
    `UserError` unless exactly one of the two is given, the second one with `devices`.
    """
    _check_positive(mtbf_hours=mtbf_hours, device_mtbf_hours=device_mtbf_hours)
    if mtbf_hours is not None and device_mtbf_hours is not None:
        raise UserError(
            f"device_mtbf_hours: {device_mtbf_hours:g} is given together with mtbf_hours; give one of them"
        )
    if mtbf_hours is not None:
        return _seconds("mtbf_hours", mtbf_hours)
    if device_mtbf_hours is None:
        raise UserError("mtbf_hours: is missing; give it for the system, or device_mtbf_hours and devices")
    if devices is None:
        raise UserError("devices: is missing; device_mtbf_hours is of one device, so give their number too")
    _check_positive(devices=devices)
    return _seconds("device_mtbf_hours", device_mtbf_hours, devices)


def _seconds(name: str, hours: float, devices: int = 1) -> float:
    seconds = hours * HOUR / devices
    if not LEAST <= seconds <= MOST:
        of = f" of {devices:,} devices" if devices > 1 else ""
        raise UserError(
            f"{name}: {hours:g}{of} is a failure every {seconds:g} s; give one of {LEAST:g} to {MOST:g} s"
        )
    return seconds


def young(save_seconds: float, mtbf_seconds: float) -> float:
    """Best checkpoint interval to first order, sqrt(2 C M) seconds of training (Young, 1974)."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def daly(save_seconds: float, mtbf_seconds: float) -> float:
    """Best checkpoint interval to higher order, in seconds of training (Daly, 2006)."""
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    half = save_seconds / (2 * mtbf_seconds)
    series = 1 + math.sqrt(half) / 3 + half / 9
    return young(save_seconds, mtbf_seconds) * series - save_seconds


@dataclass(frozen=True)
class Shares:
    """Shares of a long run's time; the four add up to 1."""

    effective: float
    """Training whose result was kept."""
    saving: float
    """Training stopped for a save, or waited for the one in flight."""
    lost_work: float
    """Training that was lost to failures."""
    restarting: float

    def to_json(self) -> dict[str, Any]:
        """Plain numbers by name."""
        return asdict(self)


def shares(faults: Faults, interval_seconds: float) -> Shares:
    """Shares of the time with a save after every `interval_seconds` of training, by the formulas above.

    Raises `UserError` if checkpoints would almost never complete.
    """
    check_interval(faults, interval_seconds)
    tau, M, C = interval_seconds, faults.mtbf_seconds, faults.save_seconds
    first = tau + C + faults.background_seconds
    period = max(tau, faults.background_seconds) + C
    again = -math.expm1(-period / M)  # 1 / the expected number of checkpoints once the first is reached
    kept = tau * math.exp(-first / M) / again

    def stopped(begin: float, length: float) -> float:
        """Expected seconds of [begin, begin + length] before an attempt fails."""
        return -M * math.exp(-begin / M) * math.expm1(-length / M)

    saving = stopped(tau, C) + stopped(tau + C + tau, period - tau) / again
    attempt = math.exp(-faults.restart_seconds / M) / M  # 1 / the mean of an attempt and its restart
    return Shares(
        effective=kept * attempt,
        saving=saving * attempt,
        lost_work=max(0.0, M - saving - kept) * attempt,
        restarting=-math.expm1(-faults.restart_seconds / M),
    )


def check_interval(faults: Faults, interval_seconds: float, name: str = "interval_seconds") -> None:
    """Raise `UserError`, about the longest of its parts, if checkpoints would almost never complete.

    `name` is the argument that the interval comes from.
    """
    M = faults.mtbf_seconds
    needs = {name: interval_seconds}
    needs |= {other: getattr(faults, other) for other in ("save_seconds", "background_seconds")}
    first, longest = sum(needs.values()), max(needs, key=needs.__getitem__)
    if first > HOPELESS * M:
        raise UserError(
            f"{longest}: a checkpoint would be complete after {first:g} s, more than {HOPELESS:g} times the "
            f"{M:g} s between failures, so almost none would be; it should be well below {M:g} s"
        )


def optimal_seconds(faults: Faults) -> float:
    """The checkpoint interval with the largest effective share, in seconds of training.

    With x = tau / M the share is largest where e^x (1 - x) = e^(-C/M) (Daly's equation with Lambert's
    function), or, with y = -log(1 - x), where y - (1 - e^-y) = C/M, which is found by bisection. W moves it
    only where saves would have to wait for each other: then the share rises with tau up to W, or M.
    """
    M, cost = faults.mtbf_seconds, faults.save_seconds / faults.mtbf_seconds
    low, high = 0.0, cost + 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if middle + math.expm1(-middle) > cost else (middle, high)
    return max(-math.expm1(-high) * M, min(faults.background_seconds, M))


def optimal_interval(faults: Faults, step_seconds: float) -> int:
    """The checkpoint interval with the largest effective share, in steps, at least 1.

    The share has a single maximum, so the two whole numbers of steps around it are compared.
    """
    check_seconds("step_seconds", step_seconds)
    below = max(1, math.floor(optimal_seconds(faults) / step_seconds))

    def effective(steps: int) -> float:
        first = steps * step_seconds + faults.save_seconds + faults.background_seconds
        hopeless = first > HOPELESS * faults.mtbf_seconds
        return 0.0 if hopeless else shares(faults, steps * step_seconds).effective

    return max((below, below + 1), key=effective)


@dataclass(frozen=True)
class Goodput(Shares):
    """A run under failures. Figures that depend on tokens, devices or a price are None without them."""

    interval_steps: int
    """Steps between saves: the best number, or the requested one."""
    interval_seconds: float
    """Seconds of training between saves."""
    young_seconds: float
    daly_seconds: float
    mtbf_seconds: float
    failures_per_day: float
    tokens_per_day: float | None
    steps: int | None
    days: float | None
    failures: float | None
    """Expected number of failures during the whole run."""
    device_hours: float | None
    cost: float | None
    """Cost of the whole run in the price's currency."""

    @property
    def saves(self) -> int | None:
        """Checkpoints of the whole run, or None if its steps are unknown."""
        return None if self.steps is None else math.ceil(self.steps / self.interval_steps)


def goodput(
    step_seconds: float,
    faults: Faults,
    *,
    batch_tokens: int | None = None,
    tokens: float | None = None,
    devices: int | None = None,
    price: float | None = None,
    every: int | None = None,
) -> Goodput:
    """Goodput, duration and cost of a run of `tokens` in steps of `batch_tokens`.

    `price` is per device and hour, `every` the steps between saves (default: the best number). The wait for
    the last save in the background is left out. Raises `UserError`.
    """
    check_seconds("step_seconds", step_seconds)
    given = {"batch_tokens": batch_tokens, "tokens": tokens, "devices": devices, "price": price}
    _check_positive(**given, every=every)
    for name, other in (("tokens", "batch_tokens"), ("price", "tokens"), ("price", "devices")):
        if (value := given[name]) is not None and given[other] is None:
            raise UserError(f"{name}: {short(value)} is given without {other}; give {other} too")
    interval = every if every is not None else optimal_interval(faults, step_seconds)
    check_interval(faults, interval * step_seconds, "step_seconds" if every is None else "every")
    time = shares(faults, interval * step_seconds)
    steps = days = device_hours = None
    if tokens is not None and batch_tokens is not None:
        steps = math.ceil(tokens / batch_tokens)
        days = steps * step_seconds / time.effective / DAY
        device_hours = None if devices is None else days * 24 * devices
    rate = DAY / step_seconds * time.effective  # kept steps per day
    return Goodput(
        **asdict(time),
        interval_steps=interval,
        interval_seconds=interval * step_seconds,
        young_seconds=young(faults.save_seconds, faults.mtbf_seconds),
        daly_seconds=daly(faults.save_seconds, faults.mtbf_seconds),
        mtbf_seconds=faults.mtbf_seconds,
        failures_per_day=DAY / faults.mtbf_seconds,
        tokens_per_day=None if batch_tokens is None else rate * batch_tokens,
        steps=steps,
        days=days,
        failures=None if days is None else days * DAY / faults.mtbf_seconds,
        device_hours=device_hours,
        cost=None if price is None or device_hours is None else price * device_hours,
    )


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name}: {value} is not a number above 0; give one")
