"""What failures leave of a run's time: the best checkpoint interval, the effective share, tokens a day, cost.

Failures come at random, at a constant rate: the time to the next is exponential with mean M
(`mtbf_seconds`), whatever the run is doing. After one, a restart takes R, and begins again when a failure
comes into it. Training goes on from the last complete checkpoint. Every tau seconds of training a save stops
it for C; then it is finished behind training in W seconds, until when a restart can't use it. One save is in
flight at most: the next waits for it, as the program's does (`checkpoint/store.py`).

From one restart's end to the next a run is as new, so by renewal and reward the effective share is the
training that an attempt keeps, over how long it and its restart take. Checkpoint k is complete at
tau + C + (k - 1) p + W with p = max(tau, W) + C, an attempt lasts M on average and its restart
M (e^(R/M) - 1), hence

    effective = tau e^(-(tau + C + W) / M) / ((1 - e^(-p/M)) M e^(R/M)).

Where W = 0 that is tau / (M e^(R/M) (e^((tau + C) / M) - 1)), the complete cost function of Daly (2006). The
formula is exact in the long run; `reliability/monte_carlo.py` plays the same events one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.units import short

HOUR, DAY = 3600.0, 86400.0
LEAST, MOST = 1e-6, 1e12
"""Seconds that a duration may have: a microsecond to 30 thousand years."""
HOPELESS = 50.0
"""Mean times between failures that hardly anything outlives: one in e^50."""


@dataclass(frozen=True)
class Faults:
    """How often the whole system fails, and what saves and restarts take, in seconds.

    Raises `UserError` for what can't be, and for restarts that would hardly ever end.
    """

    mtbf_seconds: float
    """Mean time between failures of the whole system."""
    save_seconds: float
    """How long a save stops training."""
    restart_seconds: float
    """From a failure until training goes on: detection, restart, load."""
    background_seconds: float = 0.0
    """From the end of that stop until the checkpoint is complete, beside training."""

    def __post_init__(self) -> None:
        check_seconds("mtbf_seconds", self.mtbf_seconds)
        for name in ("save_seconds", "restart_seconds", "background_seconds"):
            check_seconds(name, getattr(self, name), least=0.0)
        if self.restart_seconds > HOPELESS * self.mtbf_seconds:
            raise UserError(
                f"restart_seconds: {self.restart_seconds:g} is more than {HOPELESS:g} times the "
                f"{self.mtbf_seconds:g} s between failures, so hardly a restart would ever end; it should be "
                f"well below {self.mtbf_seconds:g}"
            )


def check_seconds(name: str, value: float, least: float = LEAST) -> None:
    """Raise `UserError` unless a duration is a number from `least` to MOST."""
    if not least <= value <= MOST:
        raise UserError(f"{name}: {value} is not a number of seconds from {least:g} to {MOST:g}")


def system_mtbf(
    mtbf_hours: float | None = None, device_mtbf_hours: float | None = None, devices: int | None = None
) -> float:
    """Seconds between failures of a system of `devices`, from its own hours or those of one device.

    Rates add up, so the system's mean time is a device's over their number. Raises `UserError` unless just
    one of the two is given, and the second with `devices`.
    """
    _positive("mtbf_hours", mtbf_hours)
    _positive("device_mtbf_hours", device_mtbf_hours)
    if mtbf_hours is not None and device_mtbf_hours is not None:
        raise UserError(
            f"device_mtbf_hours: {device_mtbf_hours:g} is given beside mtbf_hours; give one of them"
        )
    if mtbf_hours is not None:
        return _seconds("mtbf_hours", mtbf_hours)
    if device_mtbf_hours is None:
        raise UserError("mtbf_hours: is missing; give it for the system, or device_mtbf_hours and devices")
    if devices is None:
        raise UserError("devices: is missing; device_mtbf_hours is of one device, so give their number too")
    _positive("devices", devices)
    return _seconds("device_mtbf_hours", device_mtbf_hours, devices)


def _seconds(name: str, hours: float, devices: int = 1) -> float:
    found = hours * HOUR / devices
    if not LEAST <= found <= MOST:
        of = f" of {devices:,} devices" if devices > 1 else ""
        raise UserError(
            f"{name}: {hours:g}{of} is a failure every {found:g} s; it should be from {LEAST:g} to {MOST:g} s"
        )
    return found


def young(save_seconds: float, mtbf_seconds: float) -> float:
    """The best interval to first order, sqrt(2 C M) seconds of training (Young, 1974)."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def daly(save_seconds: float, mtbf_seconds: float) -> float:
    """The best interval to higher order, in seconds of training (Daly, 2006)."""
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    half = save_seconds / (2 * mtbf_seconds)
    series = 1 + math.sqrt(half) / 3 + half / 9
    return young(save_seconds, mtbf_seconds) * series - save_seconds


@dataclass(frozen=True)
class Shares:
    """Where a long run's time goes; the four add up to 1."""

    effective: float
    """Training that was kept."""
    saving: float
    """Training stood still for a save, or waited for the one in flight."""
    lost_work: float
    """Training that a failure undid."""
    restarting: float


def shares(faults: Faults, interval_seconds: float) -> Shares:
    """Where the time goes with a save after every `interval_seconds` of training, by the formulas above.

    Raises `UserError` where hardly a checkpoint would ever be complete.
    """
    check_interval(faults, interval_seconds)
    tau, M, C = interval_seconds, faults.mtbf_seconds, faults.save_seconds
    first = tau + C + faults.background_seconds
    period = max(tau, faults.background_seconds) + C
    again = -math.expm1(-period / M)  # 1 / the expected number of checkpoints once the first is reached
    kept = tau * math.exp(-first / M) / again

    def stopped(begin: float, length: float) -> float:
        """Seconds of [begin, begin + length] that an attempt reaches, on average."""
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
    """Raise `UserError` where hardly a checkpoint would ever be complete, for what takes longest of it.

    `name` is what the interval comes from.
    """
    M = faults.mtbf_seconds
    needs = {name: interval_seconds}
    needs |= {other: getattr(faults, other) for other in ("save_seconds", "background_seconds")}
    first, longest = sum(needs.values()), max(needs, key=needs.__getitem__)
    if first > HOPELESS * M:
        raise UserError(
            f"{longest}: a checkpoint would be complete after {first:g} s, more than {HOPELESS:g} times the "
            f"{M:g} s between failures, so hardly one would ever be; it should be well below {M:g} s"
        )


def optimal_seconds(faults: Faults) -> float:
    """The training between saves that leaves most effective time, of any length.

    With x = tau / M the share is greatest where e^x (1 - x) = e^(-C/M) (Daly's equation with Lambert's
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
    """The number of steps between saves that leaves most effective time, at least 1.

    The share rises to its one maximum and falls after it, so the whole numbers around that are compared.
    """
    check_seconds("step_seconds", step_seconds)
    below = max(1, math.floor(optimal_seconds(faults) / step_seconds))
    return max((below, below + 1), key=lambda steps: _effective(faults, steps * step_seconds))


def _effective(faults: Faults, interval_seconds: float) -> float:
    """The effective share, and 0 where hardly a checkpoint would ever be complete."""
    first = interval_seconds + faults.save_seconds + faults.background_seconds
    return shares(faults, interval_seconds).effective if first <= HOPELESS * faults.mtbf_seconds else 0.0


@dataclass(frozen=True)
class Goodput:
    """A run under failures. What needs tokens, devices or a price is None without them."""

    interval_steps: int
    """Steps between saves: the best number, or the one that was asked for."""
    interval_seconds: float
    """Of training between saves."""
    young_seconds: float
    daly_seconds: float
    mtbf_seconds: float
    shares: Shares
    failures_per_day: float
    tokens_per_day: float | None
    steps: int | None
    days: float | None
    failures: float | None
    """Expected number during the whole run."""
    device_hours: float | None
    cost: float | None
    """In the price's currency."""

    @property
    def saves(self) -> int | None:
        """Checkpoints of the whole run, or None where its steps are not known."""
        return None if self.steps is None else math.ceil(self.steps / self.interval_steps)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers by name, the shares among them."""
        fields = asdict(self)
        return {**fields.pop("shares"), **fields}


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
    """What is left of a run of `tokens` in steps of `batch_tokens`, and what it costs.

    `price` is that of a device for an hour, `every` the steps between saves (default: the best). The
    wait for the last save in the background is left out. Raises `UserError`.
    """
    check_seconds("step_seconds", step_seconds)
    for name, value in (("batch_tokens", batch_tokens), ("tokens", tokens), ("devices", devices)):
        _positive(name, value)
    for name, value in (("price", price), ("every", every)):
        _positive(name, value)
    _needs("tokens", tokens, [("batch_tokens", batch_tokens)])
    _needs("price", price, [("tokens", tokens), ("devices", devices)])
    found = every if every is not None else optimal_interval(faults, step_seconds)
    check_interval(faults, found * step_seconds, "step_seconds" if every is None else "every")
    where = shares(faults, found * step_seconds)
    steps = days = device_hours = None
    if tokens is not None and batch_tokens is not None:
        steps = math.ceil(tokens / batch_tokens)
        days = steps * step_seconds / where.effective / DAY
        device_hours = None if devices is None else days * 24 * devices
    rate = DAY / step_seconds * where.effective  # steps that are kept in a day
    return Goodput(
        interval_steps=found,
        interval_seconds=found * step_seconds,
        young_seconds=young(faults.save_seconds, faults.mtbf_seconds),
        daly_seconds=daly(faults.save_seconds, faults.mtbf_seconds),
        mtbf_seconds=faults.mtbf_seconds,
        shares=where,
        failures_per_day=DAY / faults.mtbf_seconds,
        tokens_per_day=None if batch_tokens is None else rate * batch_tokens,
        steps=steps,
        days=days,
        failures=None if days is None else days * DAY / faults.mtbf_seconds,
        device_hours=device_hours,
        cost=None if price is None or device_hours is None else price * device_hours,
    )


def _positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise UserError(f"{name}: {value} is not a number above 0")


def _needs(name: str, value: float | None, others: Iterable[tuple[str, float | None]]) -> None:
    """Raise `UserError` where a value is given without one that it says nothing without."""
    missing = [other for other, given in others if given is None]
    if value is not None and missing:
        raise UserError(f"{name}: {short(value)} is given without {missing[0]}; give {missing[0]} too")
