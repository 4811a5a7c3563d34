"""The formulas for runs under failures: against events played one by one, published figures, and limits."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.reliability.goodput import (
    DAY,
    HOUR,
    Faults,
    daly,
    goodput,
    optimal_interval,
    optimal_seconds,
    shares,
    system_mtbf,
    young,
)
from meshwright.reliability.monte_carlo import simulate
from meshwright.spec import UserError

LLAMA_3 = 54 * 24 * 16384 / 419
"""Device-hours of one unexpected interruption: 419 in 54 days on 16,384 GPUs (Llama Team, 2024)."""

CASES = {
    "rare failures": (Faults(11160, 60, 120), 1100),
    "saves in the background": (Faults(11160, 5, 120, 300), 330),
    "saves that wait for each other": (Faults(1000, 5, 120, 300), 100),
    "saves that just do not wait": (Faults(1000, 5, 120, 300), 300),
    "restarts that often fail": (Faults(300, 20, 400, 0), 90),
    "all at once": (Faults(300, 20, 200, 150), 60),
    "saves that cost nothing": (Faults(1000, 0, 0, 0), 50),
}


def faults_of(mtbf: float, save: float, restart: float, background: float) -> Faults:
    return Faults(mtbf, save * mtbf, restart * mtbf, background * mtbf)


FAULTS = st.builds(
    faults_of,
    st.floats(1, 1e7),
    st.floats(1e-6, 2),
    st.floats(0, 3),
    st.one_of(st.just(0.0), st.floats(0, 2)),
)
"""Any system, in mean times between failures."""


@pytest.mark.parametrize("name", CASES)
def test_the_formulas_are_what_simulated_runs_do(name: str) -> None:
    """Within 4 standard errors. A run's last save is waited for, which 4,000 saves make too little to see."""
    faults, interval = CASES[name]
    played, exact = simulate(faults, interval, saves=4000, runs=60, seed=1), shares(faults, interval)
    assert played.standard_error < 0.01 * exact.effective
    assert abs(played.effective - exact.effective) < 4 * played.standard_error
    for found, expected in zip(astuple(played)[:4], astuple(exact), strict=True):
        assert found == pytest.approx(expected, abs=4 * played.standard_error)
    wall = 4000 * interval / played.effective
    assert played.failures == pytest.approx(wall / faults.mtbf_seconds, rel=0.02)


def test_without_a_background_the_share_is_dalys_complete_formula() -> None:
    mtbf, save, restart, tau = 5000.0, 40.0, 300.0, 900.0
    segment = mtbf * math.exp(restart / mtbf) * math.expm1((tau + save) / mtbf)
    assert shares(Faults(mtbf, save, restart), tau).effective == pytest.approx(tau / segment, rel=1e-12)


def test_the_simulation_is_a_function_of_its_seed() -> None:
    faults, interval = CASES["all at once"]
    first, again, other = (simulate(faults, interval, 50, 5, seed) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_intervals_that_daly_published(hours: float, minutes: float) -> None:
    """Daly (2006), figures 3 to 5: saves of 5 minutes, restarts of 10."""
    faults = Faults(hours * HOUR, 300, 600)
    digits = 1 if minutes < 10 else 0
    assert round(daly(300, hours * HOUR) / 60, digits) == minutes
    assert optimal_seconds(faults) / 60 == pytest.approx(minutes, rel=0.01)


@pytest.mark.parametrize(
    ("save", "first_order", "exact"), [(60, 0.114, 0.110), (5, 0.041, 0.040), (0.5, 0.020, 0.020)]
)
def test_what_is_wasted_at_the_best_interval(save: float, first_order: float, exact: float) -> None:
    """3.1 h between failures, restarts of 120 s: to first order C/tau + tau/2M + R/M, which overstates it."""
    faults = Faults(3.1 * HOUR, save, 120)
    tau = young(save, faults.mtbf_seconds)
    waste = save / tau + tau / (2 * faults.mtbf_seconds) + 120 / faults.mtbf_seconds
    found = 1 - shares(faults, optimal_seconds(faults)).effective
    assert (round(waste, 3), round(found, 3)) == (first_order, exact)
    assert found < waste


def test_llama_3s_failures_leave_what_was_reported() -> None:
    """More than 90% of the time was effective (Llama Team, 2024). Saves and restarts are assumed here."""
    mtbf = system_mtbf(device_mtbf_hours=LLAMA_3, devices=16384)
    assert mtbf == pytest.approx(54 * DAY / 419)
    found = goodput(5, Faults(mtbf, 5, 600, 120))
    assert 0.90 < found.effective < 0.92
    assert found.failures_per_day * 54 == pytest.approx(419)


def test_without_failures_only_saves_cost() -> None:
    found = shares(Faults(1e12, 60, 600, 30), 940)
    assert found.effective == pytest.approx(0.94, abs=1e-6)
    assert found.saving == pytest.approx(0.06, abs=1e-6)
    assert found.lost_work == pytest.approx(0, abs=1e-6) and found.restarting < 1e-6


def test_free_saves_come_after_every_step() -> None:
    faults = Faults(3600, 0, 0)
    assert optimal_interval(faults, 7.0) == 1
    half_step = 7.0 / 3600 / 2  # lost at each failure, to first order
    assert shares(faults, 7.0).effective == pytest.approx(1 - half_step, abs=1e-5)


@given(FAULTS, st.floats(1e-3, 3))
def test_no_other_interval_leaves_more(faults: Faults, step: float) -> None:
    step_seconds = step * faults.mtbf_seconds
    best = optimal_interval(faults, step_seconds)
    most = shares(faults, best * step_seconds).effective
    for steps in {1, best - 1, best + 1, best // 2, 2 * best, best + 7} - {0}:
        if steps * step < 40:
            assert shares(faults, steps * step_seconds).effective <= most * (1 + 1e-12)


@given(FAULTS)
def test_the_shares_are_shares(faults: Faults) -> None:
    found = shares(faults, optimal_seconds(faults))
    assert sum(astuple(found)) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in astuple(found)) and found.effective > 0


@given(FAULTS, st.sampled_from(["save_seconds", "restart_seconds", "background_seconds"]))
def test_whatever_takes_longer_leaves_less(faults: Faults, name: str) -> None:
    def most(system: Faults) -> float:
        return shares(system, optimal_seconds(system)).effective

    longer = {**vars(faults), name: vars(faults)[name] + 0.1 * faults.mtbf_seconds}
    assert most(Faults(**longer)) < most(faults)
    rarer = Faults(**{**vars(faults), "mtbf_seconds": 2 * faults.mtbf_seconds})
    assert most(rarer) > most(faults)


def test_formulas_for_the_best_interval_agree_where_saves_are_short() -> None:
    for save in (0.1, 1, 10):
        exact = optimal_seconds(Faults(1e5, save, 600))
        assert daly(save, 1e5) == pytest.approx(exact, rel=1e-4)
        assert young(save, 1e5) == pytest.approx(exact, rel=0.01)
    assert daly(10, 4) == 4  # a save of over two mean times: as long as one


def test_a_save_in_the_background_moves_the_best_interval_only_where_it_is_longer() -> None:
    plain, short, long = (optimal_seconds(Faults(10000, 5, 60, behind)) for behind in (0, 300, 1000))
    assert plain == short < 320 and long == 1000
    assert optimal_seconds(Faults(10000, 5, 60, 50000)) == 10000


def test_a_run_is_told_in_days_tokens_and_money() -> None:
    faults = Faults(10000, 10, 100)
    found = goodput(2, faults, batch_tokens=1000, tokens=1e8 - 1, devices=8, price=2.5, every=200)
    effective = shares(faults, 400).effective
    assert (found.interval_steps, found.interval_seconds, found.steps, found.saves) == (
        200,
        400,
        100_000,
        500,
    )
    assert found.days == pytest.approx(200_000 / DAY / effective)
    assert found.tokens_per_day is not None and found.days is not None
    assert found.tokens_per_day * found.days == pytest.approx(1e8)
    assert found.device_hours == pytest.approx(8 * 24 * found.days)
    assert found.cost == pytest.approx(2.5 * 8 * 24 * found.days)
    assert found.failures == pytest.approx(found.days * DAY / 10000)
    assert found.to_json()["effective"] == effective


def test_what_is_not_asked_is_not_told() -> None:
    found = goodput(2, Faults(10000, 10, 100))
    assert found.interval_steps == optimal_interval(Faults(10000, 10, 100), 2) > 1
    assert found.tokens_per_day is found.steps is found.saves is found.days is found.failures is None
    assert found.device_hours is found.cost is None


BAD_FAULTS = [
    ((0, 1, 1), "mtbf_seconds: 0 "),
    ((-5, 1, 1), "mtbf_seconds: -5 "),
    ((math.inf, 1, 1), "mtbf_seconds: inf "),
    ((math.nan, 1, 1), "mtbf_seconds: nan "),
    ((100, -1, 1), "save_seconds: -1 "),
    ((100, 1, math.inf), "restart_seconds: inf "),
    ((100, 1, 1, math.nan), "background_seconds: nan "),
    ((100, 1, 5001), "restart_seconds: 5001 .* 50 times the 100 s .* well below 100"),
]


@pytest.mark.parametrize(("values", "sentence"), BAD_FAULTS)
def test_a_system_that_cannot_be_is_refused(values: tuple[float, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Faults(*values)


@pytest.mark.parametrize(
    ("given_", "sentence"),
    [
        ({"tokens": 1e9}, "tokens: 1B is given without batch_tokens"),
        ({"batch_tokens": 10, "tokens": math.inf}, "tokens: inf "),
        ({"batch_tokens": -10}, "batch_tokens: -10 "),
        ({"price": 2}, "price: 2 is given without tokens"),
        ({"price": 2, "tokens": 100, "batch_tokens": 10}, "price: 2 is given without devices"),
        ({"devices": 0}, "devices: 0 "),
        ({"every": 0}, "every: 0 "),
        ({"every": 10**6}, r"every: .* after 1e\+06 s, more than 50 times the 100 s .* well below 100 s"),
    ],
)
def test_a_run_that_cannot_be_is_refused(given_: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        goodput(1, Faults(100, 1, 1), **given_)


@pytest.mark.parametrize("step", [0, -1, math.inf, math.nan])
def test_a_step_that_cannot_be_is_refused(step: float) -> None:
    with pytest.raises(UserError, match="step_seconds"):
        goodput(step, Faults(100, 1, 1))


def test_a_step_that_no_checkpoint_outlives_is_refused() -> None:
    with pytest.raises(UserError, match=r"step_seconds: .* almost none would be"):
        goodput(1e4, Faults(100, 1, 1))
    with pytest.raises(UserError, match=r"background_seconds: .* almost none would be"):
        goodput(1, Faults(100, 1, 1, 1e4))


@pytest.mark.parametrize(
    ("given_", "sentence"),
    [
        ({}, "mtbf_hours: is missing"),
        ({"mtbf_hours": 1, "device_mtbf_hours": 2, "devices": 3}, "device_mtbf_hours: 2 .* one of them"),
        ({"device_mtbf_hours": 2}, "devices: is missing"),
        ({"device_mtbf_hours": 2, "devices": 0}, "devices: 0 "),
        ({"mtbf_hours": -1}, "mtbf_hours: -1 "),
        ({"mtbf_hours": 1e-12}, "mtbf_hours: 1e-12 is a failure every 3.6e-09 s"),
        ({"device_mtbf_hours": 1e-6, "devices": 10**6}, "device_mtbf_hours: 1e-06 of 1,000,000 devices"),
    ],
)
def test_a_failure_rate_is_given_once(given_: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        system_mtbf(**given_)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("saves", "runs", "sentence"),
    [
        (0, 5, "saves: 0"),
        (5, 1, "runs: 1 "),
        (10**5, 10**4, "runs: 10000 .* or fewer"),
        (10**8, 2, "omit it"),
    ],
)
def test_a_simulation_that_would_not_end_is_refused(saves: int, runs: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        simulate(Faults(1000, 1, 1), 10, saves, runs)
