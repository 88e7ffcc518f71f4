"""tracea.bench under noise: equal programs never differ, others do."""

from __future__ import annotations

import functools
import importlib
import random

import hypothesis
import numpy as np
import pytest
import synthetic_bench as synthetic
from hypothesis import strategies as st
from program_races import ARGUMENTS, Script, layers
from report_ratios import checked

import tracea_jax as tracea
from tracea_jax.bench.timed import Load, Timed, warning
from tracea_jax.tuning import measure
from tracea_jax.tuning.measure import Race

pytestmark = pytest.mark.once

MODULE = importlib.import_module("tracea_jax.bench")


class Noisy(synthetic.Clock):
    """Time on a machine where each slice takes longer by a factor of its own."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def work(self, us):
        super().work(us * self.factor())


def _work(clock, count):
    clock.work(100.0 * count)


def noises(seed):
    """Factors as busy machines have them: two speeds, long tails, and slow drift."""
    rng = random.Random(seed)
    steps = iter(range(1 << 20))
    return {
        "two speeds": lambda: rng.choice((1.0, 2.2)) * rng.uniform(0.97, 1.03),
        "a long tail": lambda: 1 + rng.expovariate(1.0),
        "drift": lambda: 1 + 0.01 * next(steps) * rng.uniform(0.9, 1.1),
        "rare stops": lambda: 9.0 if rng.random() < 0.2 else rng.uniform(1, 1.1),
    }


def reported(monkeypatch, factor, ours_us, **timing):
    """The report of a program that takes 100 us, and transformed ``ours_us``."""
    with monkeypatch.context() as patch:
        script = Script({None: 100.0, (): ours_us}, clock=Noisy(factor))
        script.install(patch)
        patch.setattr(Load, "now", lambda: Load(0.5, 2))
        patch.setattr(MODULE, "TIMING", synthetic.timing(script.clock, **timing))
        patch.setattr(MODULE._Races, "sites", lambda *_, **__: None)
        subject = MODULE.Subject.of(layers, ARGUMENTS, ops="matmul")
        patch.setattr(MODULE, "grouped", lambda *_: [])
        return MODULE.measured(subject, budget_s=1e3)


@pytest.mark.parametrize("kind", noises(0))
def test_programs_of_equal_speed_do_not_differ(kind):
    for seed in range(20):
        clock = Noisy(noises(seed)[kind])
        names = ("plain", "again", "ours")
        runs = dict.fromkeys(names, functools.partial(_work, clock))
        held = measure.race(runs, synthetic.timing(clock).final, is_even=True)
        timed = Timed.of(held, plain="plain", again="again", ours="ours")
        assert timed.difference == "none", (seed, str(timed))


def test_equal_programs_are_reported_so(monkeypatch):
    report = reported(monkeypatch, noises(1)["two speeds"], ours_us=100.0)
    assert "no difference measured" in str(report) and checked(report) == 0


@pytest.mark.parametrize(
    ("ours_us", "difference"), [(80.0, "faster"), (125.0, "slower")]
)
def test_programs_of_other_speeds_differ(monkeypatch, ours_us, difference):
    rng = random.Random(3)
    report = reported(monkeypatch, lambda: rng.uniform(0.98, 1.02), ours_us)
    timed = report.whole.timed
    assert timed is not None and timed.difference == difference
    assert timed.ratio == pytest.approx(100 / ours_us, rel=0.02)
    assert timed.low < timed.ratio < timed.high and checked(report) == 1
    assert report.warning == ""


def race(*rows):
    names = ("plain", "again", "ours")
    times = {name: tuple(row) for name, row in zip(names, rows, strict=True)}
    return Race(times_us=times, repeats=dict.fromkeys(times, 1), failures={})


def timed_of(*rows):
    return Timed.of(race(*rows), plain="plain", again="again", ours="ours")


@pytest.mark.parametrize(
    ("rounds", "most"), [(5, 0.03), (6, 0.02), (11, 0.01), (31, 0.005), (100, 0.005)]
)
def test_chance_rarely_makes_a_difference(rounds, most):
    rng = np.random.default_rng(rounds)
    drawn = np.exp(0.2 * rng.standard_normal((1000, 3, rounds)))
    found = [timed_of(*rows).difference != "none" for rows in drawn.tolist()]
    assert np.mean(found) <= most


def test_a_difference_is_found_among_noise():
    rng = np.random.default_rng(1)
    drawn = 100 * np.exp(0.02 * rng.standard_normal((200, 3, 31)))
    drawn[:, 2] /= 1.1
    assert all(timed_of(*rows).difference == "faster" for rows in drawn.tolist())
    drawn[:, 2] *= 1.1**2
    assert all(timed_of(*rows).difference == "slower" for rows in drawn.tolist())


TIMES = st.lists(st.floats(1e-2, 1e6), min_size=1, max_size=12)


@hypothesis.given(TIMES, st.randoms(use_true_random=False))
@hypothesis.example([392000.3900024804, 350161.0], random.Random(0))
@hypothesis.example([392000.3900024804, 350161.0], random.Random(1))
@hypothesis.example([392000.3900024804, 350161.0], random.Random(2))
def test_plain_never_differs_from_itself(times_us, shuffled):
    again = list(times_us)
    shuffled.shuffle(again)
    timed = timed_of(times_us, again, again)
    assert timed.difference == "none" and timed.ratio == 1
    assert timed.low <= timed.high and timed.noise >= 1


def test_the_sum_of_sites_is_as_sure_as_they_are():
    fast, unsure = (
        Timed(plain_us=10.0, ours_us=5.0, low=1.9, high=2.1, noise=1.05, rounds=31),
        Timed(plain_us=30.0, ours_us=30.0, low=0.8, high=1.2, noise=1.3, rounds=9),
    )
    total = Timed.total([(3, fast), (1, unsure)])
    assert (total.plain_us, total.ours_us, total.rounds) == (60.0, 45.0, 9)
    assert total.low == pytest.approx(60 / (30 / 1.9 + 30 / 0.8))
    assert total.high == pytest.approx(60 / (30 / 2.1 + 30 / 1.2))
    assert total.noise == pytest.approx((30 * 1.05 + 30 * 1.3) / 60)
    assert Timed.total([(7, fast)]).difference == fast.difference == "faster"


def test_a_slice_has_as_many_executions_of_each(monkeypatch):
    clock = synthetic.Clock()
    times_us = {"slow": 100.0, "fast": 7.0}
    counts = {name: [] for name in times_us}

    def run_of(name):
        def run(count):
            counts[name].append(count)
            clock.work(count * times_us[name])

        return run

    runs = {name: run_of(name) for name in times_us}
    held = measure.race(runs, synthetic.timing(clock), is_even=True)
    assert held.repeats["slow"] == held.repeats["fast"] >= 0.75 * 0.02 / 7e-6
    assert {name[-1] for name in counts.values()} == {held.repeats["slow"]}
    apart = measure.race(runs, synthetic.timing(clock))
    assert apart.repeats["slow"] < apart.repeats["fast"]


def test_few_rounds_have_wide_intervals():
    for rounds in range(2, 11):
        plain = [float(i) for i in range(1, rounds + 1)]
        timed = timed_of(plain, [1.0] * rounds, [1.0] * rounds)
        pairs = [(a * b) ** 0.5 for a, b in zip(plain, plain[1:], strict=False)]
        assert (timed.low, timed.high) == pytest.approx((pairs[0], pairs[-1]))
    plain = [float(i) for i in range(1, 402)]
    timed = timed_of(plain, plain, [1.0] * 401)
    assert (timed.low, timed.high) == pytest.approx((101.5, 301.5), rel=0.01)
    assert timed.noise == pytest.approx(1, abs=1e-11)


# --- the machine ----------------------------------------------------------------------


def test_a_busy_machine_is_one_warning(monkeypatch):
    quiet = Timed(plain_us=9.0, ours_us=9.0, low=1, high=1, noise=1.01, rounds=9)
    noisy = Timed(plain_us=9.0, ours_us=9.0, low=1, high=1, noise=1.25, rounds=9)
    busy, idle = Load(2.5, 2), Load(2.0, 2)
    assert warning(idle, quiet) == warning(None, quiet) == ""
    by_load = warning(busy, quiet)
    assert "the load average is 2.5 on 2 cores" in by_load
    assert "itself" not in by_load
    by_noise = warning(None, noisy)
    assert "plain against itself measured 0.80 to 1.25" in by_noise
    assert "load" not in by_noise
    both = warning(busy, noisy)
    assert both.count("Warning") == 1 and "; plain against" in both

    rng = random.Random(1)
    report = reported(monkeypatch, lambda: rng.choice((1.0, 2.0)), ours_us=100.0)
    assert report.warning in str(report) and str(report).count("Warning") == 1
    assert report.to_json()["warning"] == report.warning != ""
    assert report.to_json()["load"] == {"average": 0.5, "cores": 2}


def test_the_load_is_that_of_the_system(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (3.5, 1.0, 1.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    load = Load.now()
    assert load == Load(3.5, 2) and load is not None and load.is_high

    def unknown():
        raise OSError

    monkeypatch.setattr("os.getloadavg", unknown)
    assert Load.now() is None


def test_identical_programs_need_no_quiet_machine(monkeypatch):
    monkeypatch.setattr(Load, "now", lambda: Load(99.0, 2))
    report = tracea.bench(lambda x: x + 1, ARGUMENTS[0])
    assert report.whole.is_identical and report.warning == ""
