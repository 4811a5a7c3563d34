"""The formulas of idle time are what the simulator finds, wherever they say that they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.schedule import NAMES, StageCost, make, simulate
from meshwright.schedule.bubble_formulas import idle

V = ("zb-v", "v-half", "v-min", "dualpipe-v")
seconds = st.floats(0.01, 10)


@given(
    st.sampled_from(NAMES),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 24),
    seconds,
    seconds,
    seconds,
)
def test_a_formula_gives_the_simulated_idle_time(
    name: str, p: int, v: int, m: int, f: float, i: float, w: float
) -> None:
    v = 2 if name in V else v if name in ("interleaved", "bfs") else 1
    for times in ((f, i, w), (f, f, f), (f, i, min(f, i) / 2)):
        expected = idle(name, p, v, m, *times)
        if expected is not None:
            timed = simulate(make(name, p, v, m), StageCost(*(each / v for each in times)))
            assert [lost.total for lost in timed.idle] == pytest.approx([expected] * p, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_formula_holds_for_equal_times_and_many_microbatches(name: str) -> None:
    for p in range(1, 12):
        assert idle(name, p, 2, 4 * p, 1.0, 1.0, 1.0) is not None
