"""Reports of tunings: ratios are quotients of printed times, of one race, and won."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from program_races import LOSING, WINNING, raced
from report_ratios import checked, checked_text
from scripted_tunings import CONFIGS, CPU, LARGE, SMALL
from slow_cases import slow_unless

import tracea_jax as tracea
from tracea_jax.campaign.report import TuneReport
from tracea_jax.campaign.rows import Row
from tracea_jax.campaign.whole import Whole
from tracea_jax.graph import Graph
from tracea_jax.tuning.goals import GOALS
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Entry
from tracea_jax.verdicts import Verdict

pytestmark = pytest.mark.once

US = st.floats(1e-3, 1e8)
PROBLEMS = [tracea.GemmProblem(m=m, n=24, k=8) for m in range(1, 5)]


@st.composite
def entries(draw: Any, problem: Any) -> Entry:
    """Entries of problems that were raced, with any of the times."""
    names = ("time_us", "cold_us", "kernel_us")
    ours, xla, untuned = (
        {name: draw(US if name == "time_us" else st.none() | US) for name in names}
        for _ in range(3)
    )
    variant = draw(st.sampled_from(["gemm_cpu", "xla"]))
    best = Best(
        variant=variant,
        config=CONFIGS[0] if variant == "gemm_cpu" else {},
        **ours,
        xla_us=xla["time_us"],
        xla_cold_us=xla["cold_us"],
        xla_kernel_us=xla["kernel_us"],
        ratio=draw(st.none() | st.floats(1e-3, 1e3)),
        origin=draw(st.sampled_from(["hero", "search", "portfolio", "xla"])),
        goal=draw(st.sampled_from(GOALS)),
    )
    return Entry(
        problem=problem.to_json(),
        environment=environment(CPU),
        best=best,
        tuner={"untuned": untuned} if draw(st.booleans()) else {},
    )


@st.composite
def rows(draw: Any, problem: Any) -> Row:
    entry = draw(st.none() | entries(problem))
    return Row(
        problem=problem,
        count=draw(st.integers(1, 1000)),
        entry=entry,
        legal=200,
        tried=draw(st.integers(0, 200)),
        stop=draw(st.sampled_from(["budget", "complete", ""])),
    )


@st.composite
def wholes(draw: Any) -> Whole:
    if draw(st.booleans()):
        return Whole(reason="it has no sites")
    time_us, plain_us, every_us = (draw(US) for _ in range(3))
    verdict = Verdict(
        ops=("conv2d", "matmul"),
        without=draw(st.sampled_from([(), ("conv2d",), ("conv2d", "matmul")])),
        ratio=plain_us / time_us,
        time_us=time_us,
        plain_us=plain_us,
        environment=environment(CPU),
    )
    return Whole(verdict=verdict, every=plain_us / every_us, every_us=every_us)


@st.composite
def reports(draw: Any) -> TuneReport:
    count = draw(st.integers(1, 4))
    found = tuple(draw(rows(problem)) for problem in PROBLEMS[:count])
    return TuneReport(
        device=CPU,
        goal=draw(st.sampled_from(GOALS)),
        effort="quick",
        seed=0,
        rows=found,
        parts=tuple(draw(rows(LARGE)) for _ in range(draw(st.integers(0, 1)))),
        seconds=draw(st.floats(0, 1e4)),
        whole=draw(st.none() | wholes()),
    )


@hypothesis.given(reports())
@hypothesis.settings(max_examples=40)
def test_each_ratio_of_a_report_is_the_quotient_of_times_beside_it(report):
    found = checked(report)
    verdict = report.whole and report.whole.verdict
    if verdict and not verdict.leaves_all:
        assert found > 0
    for row in report.rows:
        checked(row)
        if row.entry is not None:
            checked_text(str(row.entry.best))


@hypothesis.given(reports())
@hypothesis.settings(max_examples=40)
def test_the_printed_times_are_those_that_decided(report):
    for row in report.rows:
        if row.entry is not None:
            best, us = row.entry.best, row.times()
            assert (us.after, us.xla) == best.decisive
            assert row.protocol == best.protocol
            kernels = None not in (best.kernel_us, best.xla_kernel_us)
            assert (best.protocol == "kernels") == kernels
            if best.cold_us is None and not kernels:
                assert best.protocol == "steady"


def test_real_reports_have_such_ratios(scripts, monkeypatch):
    scripts.times = {SMALL: (30.0, 20.0, 10.0), LARGE: (400.0, 300.0, None)}
    scripts.xla_us = 333.3
    for goal in GOALS:
        assert checked(tracea.tune(Graph([SMALL] * 3 + [LARGE]), goal=goal)) == 2
        assert checked(tracea.tune(SMALL, goal=goal)) == 1
    for times in (LOSING, WINNING):
        report = raced(monkeypatch, times)
        assert checked(report.whole) == 1 + (times is LOSING)
        assert checked(report.whole.verdict) == 1


@pytest.mark.parametrize("goal", slow_unless(["latency"], GOALS))
def test_no_tuned_problem_is_slower_than_untuned_or_xla(goal):
    report = tracea.tune(Graph([SMALL, LARGE]), effort="none", goal=goal)
    for row in report.rows:
        before, after, xla = dataclasses.astuple(row.times())
        assert after <= before and after <= xla
    assert checked(report) == 2
    protocols = {"latency": "cold", "throughput": "steady", "balanced": "balanced"}
    assert report.protocol == protocols[goal]
