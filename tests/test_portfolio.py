"""Few configs for several problems: the cover, its measurements, the answers."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import hypothesis
import pytest
import synthetic_bench as synthetic
from hypothesis import strategies as st
from synthetic_bench import DEVICE, XLA, Bench, Clock, choice

from tracea_jax import policy
from tracea_jax.diagnosis import diagnose
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning import portfolio
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.lab.local import LocalLab
from tracea_jax.tuning.sharing import ORIGIN, Sharing
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.protocols import UNTUNED
from tracea_jax.tuning.store.records import Best, Observation, identity
from tracea_jax.variants.gemm_cpu import GEMM_CPU

pytestmark = pytest.mark.once

# --- the cover ------------------------------------------------------------------------

TIMES = {
    "p": {"a": 10.0, "b": 10.1, "c": 30.0},
    "q": {"b": 20.3, "c": 20.0},
    "r": {"a": 51.0, "c": 50.5, "d": 50.0},
}
BEST = {"p": 10.0, "q": 20.0, "r": 50.0}


def test_a_config_serves_problems_that_it_is_near_the_best_of():
    assert portfolio.covered(TIMES, BEST, 0.02) == {
        "a": ["p", "r"],
        "b": ["p", "q"],
        "c": ["q", "r"],
        "d": ["r"],
    }
    assert portfolio.cover(TIMES, BEST, 0.02) in {("b", "c"), ("c", "b"), ("c", "a")}
    assert len(portfolio.cover(TIMES, BEST, 0.0)) == 3
    assert portfolio.cover(TIMES, BEST, 2.0) == ("c",)


def test_what_is_missing_is_listed_most_useful_first():
    missing = portfolio.gaps(TIMES, BEST, 0.02)
    assert set(missing) == {("q", "a"), ("r", "b"), ("p", "d"), ("q", "d")}
    assert missing[-2:] == [("p", "d"), ("q", "d")]  # serves one problem only


def test_ties_go_to_the_faster_then_to_the_first():
    times = {"p": {"a": 10.1, "b": 10.0, "c": 10.0}, "q": {"a": 10.0, "b": 10.0}}
    assert portfolio.cover(times, {"p": 10.0, "q": 10.0}, 0.02) == ("b",)


def test_a_problem_that_nothing_serves_is_an_error():
    with pytest.raises(ValueError, match="nothing covers q"):
        portfolio.cover({"p": {"a": 1.0}, "q": {"a": 2.0}}, {"p": 1.0, "q": 1.0}, 0.1)


@hypothesis.given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.floats(1, 2), min_size=1),
        min_size=1,
        max_size=6,
    ),
    st.floats(0, 0.5),
)
def test_the_cover_serves_everyone_and_has_nothing_superfluous(rows, fraction):
    times = dict(enumerate(rows))
    best = {problem: min(row.values()) for problem, row in times.items()}
    chosen = portfolio.cover(times, best, fraction)

    def serves(configs):
        return all(
            any(times[p].get(c, 9.0) <= (1 + fraction) * best[p] for c in configs)
            for p in times
        )

    assert serves(chosen)
    for config in chosen:
        assert not serves([c for c in chosen if c != config])
    fewest = next(
        n for n in range(1, 7) if any(map(serves, itertools.combinations("abcdef", n)))
    )
    # a greedy cover of so few problems is at most twice as large
    assert len(chosen) <= 2 * fewest


# --- with measurements ----------------------------------------------------------------

A, B, C = (choice(kc) for kc in (256, 320, 384))
P, Q, R = (GemmProblem(m=m, n=80, k=64) for m in (96, 97, 98))


def untuned():
    """The choice for ``P`` where nothing was tuned."""
    return policy.decide(diagnose(P, DEVICE)).choice


def observed(which, time_us) -> Observation:
    name = named(P, which, synthetic.DEVICE)  # all problems compile the same
    if time_us is None:
        how: dict[str, Any] = {"failure": "launch_error", "message": "no"}
    else:
        how = {"time_us": time_us, "repeats": 5}
    return Observation(**name, **how)


def entry(problem, times, best=None):
    best = best or min((t for t in times if times[t]), key=lambda t: times[t])
    made = synthetic.entry(
        best, problem=problem, observations=[observed(*x) for x in times.items()]
    )
    answer = dataclasses.replace(made.best, time_us=times[best], origin="search")
    return dataclasses.replace(made, best=answer)


class Setting:
    """Problems whose configs take, on the bench, the times in ``times``."""

    def __init__(self, directory, times, left_s=60.0, determinism=None, **faults):
        self.clock = Clock()
        self.knowledge = Knowledge(directory)
        self.benches = {p: Bench(self.clock, row, **faults) for p, row in times.items()}
        self.seen: list[tuple[Any, Observation]] = []
        self.sharing = Sharing(
            lab=LocalLab(
                lambda problem, device: self.benches[problem],
                DEVICE,
                synthetic.timing(self.clock),
            ),
            knowledge=self.knowledge,
            device=DEVICE,
            determinism=determinism,
            goal="throughput",
            fraction=0.02,
            left_s=lambda: left_s - self.clock.ns * 1e-9,
            observe=lambda problem, seen: self.seen.append((problem, seen)),
        )

    def share(self, *entries):
        for one in entries:
            self.knowledge.own.record(one)
        return self.sharing.share(entries)


def name(of) -> str:
    return identity(of.variant, dataclasses.asdict(of.config))


def answers(changed):
    return {p: identity(e.best.variant, e.best.config) for p, e in changed.items()}


def test_a_config_that_was_not_measured_is_measured_and_shared(tmp_path):
    setting = Setting(
        tmp_path, {P: {A: 10.0, B: 10.1, XLA: 20.0}, Q: {B: 30.0, XLA: 40.0}}
    )
    one = entry(P, {A: 10.0, XLA: 20.0})
    other = entry(Q, {A: 35.0, B: 30.0, XLA: 40.0})
    found, changed = setting.share(one, other)
    assert [len(shared.problems) for shared in found.configs] == [2]
    assert found.configs[0].config == dataclasses.asdict(B.config)
    assert found.configs[0].worst == pytest.approx(1.01, rel=1e-3)
    assert found.measured == 1 and answers(changed) == {P: name(B)}
    changed_entry = changed[P]
    assert changed_entry.best.origin == ORIGIN and changed_entry.verified["ok"]
    assert changed_entry.best.xla_us == pytest.approx(20.0, rel=1e-3)
    assert changed_entry.best.runner_up["config"] == dataclasses.asdict(A.config)
    assert [(p, o.identity) for p, o in setting.seen] == [(P, name(B))]
    stored = synthetic.found(Knowledge(tmp_path), P)
    assert stored.choice == B
    observations = Knowledge(tmp_path).observations(P, DEVICE)
    assert {o.identity for o in observations} >= {name(A), name(B)}


def test_without_time_what_was_not_measured_does_not_serve(tmp_path):
    setting = Setting(tmp_path, {P: {A: 10.0, B: 10.0}, Q: {B: 30.0}}, left_s=0.1)
    one, other = entry(P, {A: 10.0}), entry(Q, {A: 35.0, B: 30.0})
    found, changed = setting.share(one, other)
    assert len(found.configs) == 2 and found.measured == 0 and changed == {}


def test_the_race_decides_whether_a_config_is_near_enough(tmp_path):
    """The time measured before was too good."""
    setting = Setting(tmp_path, {P: {A: 10.0, B: 11.0}, Q: {B: 30.0}})
    one = entry(P, {A: 10.0, B: 10.1})
    other = entry(Q, {A: 35.0, B: 30.0})
    found, changed = setting.share(one, other)
    assert len(found.configs) == 2 and changed == {}
    assert all(shared.worst == 1.0 for shared in found.configs)


def test_a_shared_config_is_not_slower_than_xla(tmp_path):
    setting = Setting(
        tmp_path, {P: {A: 10.0, B: 10.1, XLA: 10.05}, Q: {B: 30.0, XLA: 40.0}}
    )
    one = entry(P, {A: 10.0, XLA: 10.05})
    other = entry(Q, {A: 35.0, B: 30.0, XLA: 40.0})
    found, changed = setting.share(one, other)
    assert len(found.configs) == 2 and answers(changed) == {P: name(A)}


def test_a_shared_config_is_not_slower_than_what_runs_untuned(tmp_path):
    setting = Setting(
        tmp_path, {P: {A: 10.0, B: 10.1, untuned(): 10.05}, Q: {B: 30.0, XLA: 40.0}}
    )
    one, other = entry(P, {A: 10.0, XLA: 20.0}), entry(Q, {A: 35.0, B: 30.0})
    found, changed = setting.share(one, other)
    assert len(found.configs) == 2 and answers(changed) == {P: name(A)}


def test_a_shared_config_has_less_kernel_time_than_xla(tmp_path):
    setting = Setting(
        tmp_path, {P: {A: 10.0, B: 10.1, XLA: 20.0}, Q: {B: 30.0, XLA: 40.0}}
    )
    setting.benches[P].kernel_us = {A: 10.0, B: 10.1, untuned(): 12.0, XLA: 10.1}
    one = entry(P, {A: 10.0, XLA: 20.0})
    other = entry(Q, {A: 35.0, B: 30.0, XLA: 40.0})
    found, changed = setting.share(one, other)
    assert len(found.configs) == 2 and answers(changed) == {P: name(A)}


@pytest.mark.parametrize("fault", ["wrong", "nan", "broken", "crashing"])
def test_a_config_that_is_faulty_on_a_problem_is_not_its_answer(tmp_path, fault):
    setting = Setting(tmp_path, {P: {A: 10.0, B: 1.0}, Q: {B: 30.0}})
    setattr(setting.benches[P], fault, frozenset({B}))
    one, other = entry(P, {A: 10.0}), entry(Q, {A: 35.0, B: 30.0})
    found, changed = setting.share(one, other)
    assert len(found.configs) == 2
    assert answers(changed) == {P: name(A)}  # with the failure in its observations
    kept = changed[P]
    (failed,) = [o for o in kept.observations if o.identity == name(B)]
    assert failed.failure is not None
    assert synthetic.found(Knowledge(tmp_path), P).choice == A


def test_a_config_that_failed_before_is_not_tried_again(tmp_path):
    setting = Setting(tmp_path, {P: {A: 10.0, B: 1.0}, Q: {B: 30.0}})
    one, other = entry(P, {A: 10.0, B: None}), entry(Q, {A: 35.0, B: 30.0})
    found, changed = setting.share(one, other)
    assert len(found.configs) == 2 and changed == {}
    assert setting.seen == [] and setting.benches[P].prepared == []


def test_what_xla_serves_best_takes_no_part(tmp_path):
    setting = Setting(tmp_path, {P: {A: 10.0}, Q: {}, R: {C: 10.0}})
    alone = entry(P, {A: 10.0, XLA: 20.0})
    xla = entry(Q, {A: 35.0, XLA: 30.0})
    xla = dataclasses.replace(xla, best=Best(variant="xla", config={}, time_us=30.0))
    untimed = entry(R, {C: 10.0})
    untimed = dataclasses.replace(
        untimed, best=dataclasses.replace(untimed.best, time_us=None)
    )
    found, changed = setting.share(alone, xla, untimed)
    assert found.problems == 1 and changed == {}
    assert setting.sharing.share([])[0].configs == ()


# --- bits that may differ from run to run ---------------------------------------------


@pytest.fixture
def varying(monkeypatch):
    """Says of choices of ``gemm_cpu`` that their bits may differ from run to run."""

    def say(*choices):
        def may_vary(self, problem, config, device):
            return "it adds in any order" if config in configs else None

        configs = [c.config for c in choices]
        monkeypatch.setattr(type(GEMM_CPU), "may_vary", may_vary, raising=False)

    return say


@pytest.mark.parametrize("determinism", [True, None, False])
def test_a_config_whose_bits_may_differ_replaces_no_other(
    tmp_path, varying, determinism
):
    times = {P: {A: 10.0, B: 70.0, C: 10.1}, Q: {A: 70.0, B: 30.0, C: 30.2}}
    setting = Setting(tmp_path, times, determinism=determinism)
    varying(C)
    _, changed = setting.share(*(entry(p, row) for p, row in times.items()))
    shared = {} if determinism is not False else {P: name(C), Q: name(C)}
    assert answers(changed) == shared


@pytest.mark.parametrize("determinism", [True, None, False])
def test_answers_whose_bits_may_differ_are_shared_unless_forbidden(
    tmp_path, varying, determinism
):
    times = {P: {A: 10.0, B: 10.1}, Q: {A: 70.0, B: 30.0}}
    setting = Setting(tmp_path, times, determinism=determinism)
    varying(A, B)
    found, changed = setting.share(*(entry(p, row) for p, row in times.items()))
    assert answers(changed) == ({} if determinism else {P: name(B)})
    assert found.problems == (0 if determinism else 2)


@pytest.mark.parametrize("determinism", [True, None])
def test_what_runs_untuned_may_run_where_bits_must_not_differ(
    tmp_path, varying, determinism
):
    """The default config, faster than all others, runs only where bits may differ."""
    times = {P: {A: 10.0, B: 10.1}, Q: {A: 70.0, B: 30.0}}
    setting = Setting(tmp_path, times, determinism=determinism)
    default = untuned()
    setting.benches[P].times_us = {**times[P], default: 1.0}
    varying(default)
    _, changed = setting.share(*(entry(p, row) for p, row in times.items()))
    assert answers(changed) == ({P: name(B)} if determinism else {})
    if determinism:  # XLA runs untuned
        assert changed[P].tuner[UNTUNED]["time_us"] == changed[P].best.xla_us
