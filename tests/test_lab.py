"""The lab in this process, both measuring protocols, and drift."""

from __future__ import annotations

import dataclasses
import pickle
import time

import pytest
import synthetic_bench as synthetic
from synthetic_bench import DEVICE, HERO, PROBLEM, XLA, Bench, Clock, choice

from tracea_jax.tuning import measure
from tracea_jax.tuning.lab.local import LabError, LocalLab
from tracea_jax.tuning.measure import CandidateError, Race, Reference

pytestmark = pytest.mark.once

# Sampling.


def test_a_sample_has_both_protocols():
    bench = Bench(Clock(), {HERO: 40.0}, cold_us={HERO: 90.0})
    lab = synthetic.local_lab(bench)
    sample = lab.sample(PROBLEM, HERO)
    assert sample.time_us == pytest.approx(40.0)
    assert sample.cold_us == pytest.approx(90.0)
    assert sample.prepare_s == pytest.approx(bench.compile_us * 1e-6)
    assert bench.flushes == measure.Timing().cold_runs


def test_cold_times_are_medians_of_single_executions():
    times = iter([5.0, 900.0, 7.0, 6.0, 8.0])
    clock = Clock()
    executed = []

    def run(repeats):
        executed.append(repeats)
        clock.work(next(times))

    timing = synthetic.timing(clock, cold_runs=5)
    assert measure.cold_us(run, lambda: None, timing) == pytest.approx(7.0)
    assert executed == [1] * 5


def test_flushing_is_not_timed_but_bounds_the_number_of_runs():
    bench = Bench(Clock(), {HERO: 40.0}, cold_us={HERO: 50.0}, flush_us=60_000.0)
    sample = synthetic.local_lab(bench, cold_s=0.25).sample(PROBLEM, HERO)
    assert sample.cold_us == pytest.approx(50.0)
    assert bench.flushes == 4


def test_a_slow_choice_runs_cold_once():
    bench = Bench(Clock(), {HERO: 5e6})
    sample = synthetic.local_lab(bench).sample(PROBLEM, HERO)
    assert sample.cold_us == pytest.approx(5e6)
    assert bench.flushes == 1


def test_an_abandoned_choice_is_not_measured_cold():
    bench = Bench(Clock(), {HERO: 500.0})
    sample = synthetic.local_lab(bench).sample(PROBLEM, HERO, incumbent_us=100.0)
    assert sample.abandoned and sample.cold_us is None
    assert bench.flushes == 0


class WithoutFlush:
    """A bench as others may have written it."""

    def __init__(self, bench):
        self.prepare, self.verify = bench.prepare, bench.verify


def test_a_bench_that_cannot_flush_is_measured_steady_only():
    bench = Bench(Clock(), {})
    plain = WithoutFlush(bench)
    lab = LocalLab(lambda p, d: plain, DEVICE, synthetic.timing(bench.clock))  # type: ignore[arg-type]
    assert lab.sample(PROBLEM, HERO).cold_us is None
    race = lab.race(PROBLEM, (HERO, XLA))
    assert race.cold_us == {} and race.rounds >= 11


def test_a_choice_is_compiled_once_while_its_problem_is_at_hand():
    benches = []

    def bench_of(problem, device):
        benches.append(Bench(Clock(), {}))
        return benches[-1]

    problems = [dataclasses.replace(PROBLEM, m=m) for m in (1, 2, 3)]
    lab = LocalLab(bench_of, DEVICE, synthetic.timing(Clock(), max_repeats=2))
    for problem in (problems[0], problems[0], problems[1], problems[0]):
        lab.sample(problem, HERO)
    assert [b.prepared for b in benches] == [[HERO], [HERO]]
    # Inputs of old problems do not pile up.
    lab.sample(problems[2], HERO)
    lab.sample(problems[1], HERO)
    assert len(benches) == 4


def test_exclusive_is_held_while_timing_but_not_while_compiling():
    bench = Bench(Clock(), {})
    held, seen = [], []

    class Exclusive:
        def __enter__(self):
            held.append(1)

        def __exit__(self, *_):
            held.pop()

    bench.hook = lambda step, c: seen.append((step, bool(held)))
    lab = LocalLab(
        lambda p, d: bench, DEVICE, synthetic.timing(bench.clock), exclusive=Exclusive
    )
    lab.sample(PROBLEM, HERO)
    lab.race(PROBLEM, (HERO, XLA))
    assert set(seen) == {("prepare", False), ("run", True)}


# Failures.


BAD = choice(5)


def failing(at, error, culprit=BAD):
    bench = Bench(Clock(), {})

    def hook(step, c):
        if (step, c) == (at, culprit):
            raise error

    bench.hook = hook
    return bench


@pytest.mark.parametrize(
    ("at", "error", "kind"),
    [
        ("prepare", ValueError("bad"), "compile_error"),
        ("prepare", TimeoutError("60 s"), "timeout"),
        ("prepare", CandidateError("unlaunchable", "bad"), "unlaunchable"),
        ("prepare", CandidateError("no such kind", "bad"), "compile_error"),
        ("run", RuntimeError("bad"), "launch_error"),
        ("run", CandidateError("too_slow", "bad"), "too_slow"),
    ],
)
def test_failures_are_named(at, error, kind):
    lab = synthetic.local_lab(failing(at, error))
    with pytest.raises(CandidateError, match=str(error)) as caught:
        lab.sample(PROBLEM, choice(5))
    assert caught.value.kind == kind
    race = lab.race(PROBLEM, (HERO, choice(5), XLA))
    assert set(race.times_us) == {HERO, XLA}
    failure = race.failures[choice(5)]
    assert isinstance(failure, CandidateError) and failure.kind == kind


def test_a_choice_that_fails_when_verified_failed_to_run():
    lab = synthetic.local_lab(failing("verify", RuntimeError("bad")))
    assert lab.verify(PROBLEM, HERO).ok
    with pytest.raises(CandidateError, match="bad") as caught:
        lab.verify(PROBLEM, choice(5))
    assert caught.value.kind == "launch_error"


@pytest.mark.parametrize("step", ["sample", "verify", "race"])
def test_a_lost_device_is_told_from_a_bad_choice(step):
    bench = Bench(Clock(), {})
    lost = []

    def hook(now, c):
        if now in ("run", "verify") and (lost or c == choice(5)):
            lost.append(c)
            raise RuntimeError("illegal address")

    bench.hook = hook
    lab = synthetic.local_lab(bench)
    with pytest.raises(LabError, match=r"kc 5.*illegal address.*new process") as caught:
        if step == "race":
            lab.race(PROBLEM, (HERO, choice(5), XLA))
        else:
            getattr(lab, step)(PROBLEM, choice(5))
    assert caught.value.choice == choice(5)
    assert caught.value.failure is not None
    assert caught.value.failure.kind == "launch_error"


def test_when_xla_alone_fails_the_device_is_not_accused():
    lab = synthetic.local_lab(failing("run", RuntimeError("bad"), culprit=XLA))
    with pytest.raises(CandidateError):
        lab.sample(PROBLEM, XLA)
    assert lab.sample(PROBLEM, HERO).time_us == pytest.approx(100.0)


def test_ctrl_c_is_no_failure():
    lab = synthetic.local_lab(failing("run", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        lab.sample(PROBLEM, choice(5))


def test_failures_can_be_sent_between_processes():
    failure = CandidateError("nan", "all of them")
    for error in (failure, LabError("gone", choice(5), failure)):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
    assert pickle.loads(pickle.dumps(failure)).kind == "nan"
    assert pickle.loads(pickle.dumps(LabError("gone", choice(5)))).choice == choice(5)


# Races.


def test_a_race_compares_by_either_protocol():
    """The one that is faster when data is at hand is slower when it is not."""
    times, cold = {HERO: 50.0, XLA: 100.0}, {HERO: 300.0, XLA: 150.0}
    bench = Bench(Clock(), times, cold_us=cold)
    race = synthetic.local_lab(bench).race(PROBLEM, (HERO, XLA))
    assert race.ratio(XLA, HERO) == pytest.approx(2.0)
    assert race.ratio(XLA, HERO, "cold") == pytest.approx(0.5)
    assert race.median_us(HERO, "cold") == pytest.approx(300.0)
    assert race.error(XLA, HERO, "cold") == pytest.approx(0.0)
    assert {len(t) for t in race.cold_us.values()} == {measure.Timing().cold_rounds}
    with pytest.raises(ValueError, match="steady, cold"):
        race.ratio(XLA, HERO, "warm")


def test_a_racer_that_fails_cold_has_no_times_at_all():
    bench = Bench(Clock(), {})

    def hook(step, c):
        if step == "run" and c == choice(5) and bench.is_cold:
            raise RuntimeError("bad")

    bench.hook = hook
    race = synthetic.local_lab(bench).race(PROBLEM, (HERO, choice(5), XLA))
    assert set(race.times_us) == set(race.cold_us) == set(race.repeats) == {HERO, XLA}
    assert set(race.failures) == {choice(5)}
    assert {len(t) for t in race.cold_us.values()} == {measure.Timing().cold_rounds}


def test_turns_are_announced_before_they_are_taken():
    bench = Bench(Clock(), {})
    turns, wrong = [], []

    def hook(step, c):
        if turns[-1] != c:
            wrong.append((step, c))

    bench.hook = hook
    lab = synthetic.local_lab(bench)
    lab.race(PROBLEM, (HERO, choice(5), XLA), on_turn=turns.append)
    assert wrong == [] and set(turns) == {HERO, choice(5), XLA}


# Drift.


def test_a_reference_tells_drift_from_merit():
    reference = Reference()
    assert reference.factor == 1.0 and not reference.has_drifted()
    for now in (50.0, 51.0, 60.0):
        reference = reference.measured(now)
    assert (reference.first_us, reference.latest_us, reference.count) == (50, 60, 3)
    assert reference.factor == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("latest", "drifted"), [(51.4, False), (51.6, True), (48.6, False), (48.5, True)]
)
def test_drift_counts_in_both_directions(latest, drifted):
    reference = Reference().measured(50.0).measured(latest)
    assert reference.has_drifted(0.03) == drifted


@pytest.mark.parametrize("time_us", [0.0, -1.0, float("nan"), float("inf")])
def test_a_reference_refuses_what_is_no_time(time_us):
    with pytest.raises(ValueError, match="positive"):
        Reference().measured(time_us)


def test_wall_clock_jumps_are_not_seen(monkeypatch):
    jumps = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    monkeypatch.setattr(time, "time_ns", lambda: next(jumps))
    bench = Bench(Clock(), {})
    real = measure.Timing(
        slice_s=1e-4, settle_s=1e-3, candidate_s=0.01, race_s=0.01, max_repeats=64
    )
    lab = LocalLab(lambda p, d: bench, DEVICE, real)
    assert 0 < lab.sample(PROBLEM, HERO).time_us < 1e6
    race = lab.race(PROBLEM, (HERO, XLA))
    assert isinstance(race, Race)
    assert all(0 < t < 1e6 for times in race.times_us.values() for t in times)
