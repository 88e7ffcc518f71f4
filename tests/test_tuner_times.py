"""Times of executions: calibration, and clocks that stand still, drift or jump."""

from __future__ import annotations

import math

import pytest
import synthetic_bench as synthetic
from synthetic_bench import HERO, XLA, Bench, Clock, choice

from tracea_jax.tuning import measure, select

pytestmark = pytest.mark.once


def test_calibration_fills_a_slice_whatever_the_speed():
    for each_us in (0.3, 15.0, 900.0, 20_000.0, 3e6):
        clock = Clock()
        bench = Bench(clock, {}, each_us)
        timing = synthetic.timing(clock)
        repeats, measured = measure.calibrate(bench.prepare(HERO), timing)
        assert measured == pytest.approx(each_us, rel=1e-2)
        assert repeats * each_us >= 0.75 * timing.slice_s * 1e6 or repeats == 1 << 20
        assert repeats * each_us <= max(2 * timing.slice_s * 1e6, each_us)


def test_a_clock_that_stands_still_is_no_division_by_zero():
    timing = synthetic.timing(lambda: 0, max_repeats=8)
    sample = measure.time_us(lambda repeats: None, timing)
    assert 0 < sample.time_us < math.inf


def test_one_interruption_of_the_machine_does_not_count():
    """A suspended machine makes one slice seem to last for hours."""
    clock = Clock()
    bench = Bench(clock, {})
    calls = []

    def hook(now, c):
        calls.append(c)
        if len(calls) == 8:
            clock.work(3.6e9)

    bench.hook = hook
    sample = measure.time_us(bench.prepare(HERO), synthetic.timing(clock))
    assert sample.time_us == pytest.approx(100.0)
    assert len(calls) > 8


def test_a_drifting_clock_rate_cancels_in_the_race():
    """Everything slows down by 5 % a round; who is measured last must not lose."""
    clock = Clock()
    a, b = choice(2), choice(3)
    bench = Bench(clock, {a: 100.0, b: 100.0})
    runs = {c: bench.prepare(c) for c in (a, b)}
    bench.hook = lambda now, c: bench.times_us.update(
        {k: v * 1.025 for k, v in bench.times_us.items()}
    )
    race = measure.race(runs, synthetic.timing(clock))
    assert race.rounds >= 11
    assert race.times_us[a][-1] > 1.5 * race.times_us[a][0]
    assert race.ratio(a, b) == pytest.approx(1.0, abs=0.003)


def test_winner_ignores_who_is_faster_than_the_hero_but_slower_than_xla():
    race = measure.Race(
        times_us={HERO: (100.0,) * 3, choice(2): (80.0,) * 3, XLA: (70.0,) * 3},
        repeats={},
        failures={},
    )
    assert select.winner(race, [HERO, choice(2), XLA], [HERO, XLA]) == XLA
