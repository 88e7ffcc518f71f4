"""tune: which problems it tunes, and with what budgets."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import synthetic_bench as synthetic
from numerics import normal
from scripted_tunings import CONFIGS, CPU, DEFAULT, LARGE, SMALL, answer

import tracea_jax as tracea
from tracea_jax import dispatch, knowledge
from tracea_jax.campaign import graph_of, races, run
from tracea_jax.campaign.whole import Whole
from tracea_jax.graph import Graph
from tracea_jax.policy import Choice
from tracea_jax.problem import (
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
)
from tracea_jax.tuning import measure, schedule
from tracea_jax.variants.gemm_cpu import GemmCpuConfig

pytestmark = pytest.mark.once


# --- what is tuned --------------------------------------------------------------------


def test_a_problem_a_graph_and_a_function_are_the_same(scripts):
    def fn(x, w):
        return x @ w

    graph = Graph([SMALL])
    x, w = jax.ShapeDtypeStruct((16, 8), "float32"), jnp.ones((8, 24))
    assert graph_of(SMALL) == graph_of(graph) == graph_of(fn, (x, w)) == graph
    calls: Any = ((SMALL,), (graph,), (fn, x, w))
    for what in calls:
        scripts.finished.clear()
        report = tracea.tune(*what)
        assert scripts.finished == [SMALL]
        assert report.entry == report.entries[SMALL]


@pytest.mark.parametrize("reserve_s", [None, 300.0])
def test_a_part_of_the_budget_is_for_the_race_of_the_program(
    scripts, monkeypatch, reserve_s
):
    kept_s = reserve_s or 0.0
    whole = Whole(reason="not today")

    class Races(races.Races):
        def before_search(self):
            self.whole = whole

        @property
        def search_s(self):
            return self._left_s() - kept_s

    monkeypatch.setattr(run, "Races", Races)
    x, w = jnp.ones((16, 8)), jnp.ones((8, 24))
    race = reserve_s is not None
    report = tracea.tune(jnp.matmul, x, w, budget_s=1000, race=race)
    given = scripts.made[-1].search["budget_s"]
    assert 900 - kept_s < given <= 1000 - kept_s
    assert report.whole == (whole if race else None)
    assert "not raced: not today" in str(dataclasses.replace(report, whole=whole))


def test_ops_restrict_graphs_and_functions(scripts):
    graph = Graph([SMALL])
    graph.add_attention(1, 8, 8, 2, 4)
    assert list(tracea.tune(graph, ops=["matmul"]).entries) == [SMALL]
    assert len(graph) == 2
    assert tracea.tune(graph, ops=["conv2d"]).rows == ()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (("matmul",), "not 'matmul'; write .*graph.add_matmul"),
        ((SMALL, 3), "only functions have arguments; GemmProblem has none"),
        ((Graph([SMALL]), 3), "only functions have arguments; Graph has none"),
    ],
)
def test_what_cannot_be_tuned(what, message):
    with pytest.raises(TypeError, match=message):
        tracea.tune(*what)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"goal": "speed"}, "goal='speed' must be one of latency"),
        ({"effort": "hard"}, "effort='hard' must be one of none, quick"),
        ({"budget_s": 0}, "budget_s=0 must be positive"),
        ({"budget_s": math.nan}, "budget_s=nan must be positive"),
        ({"portfolio": 2}, "portfolio=2 must be a fraction such as 0.02"),
        ({"device": synthetic.DEVICE}, "only the local device can be tuned"),
    ],
)
def test_wrong_arguments_name_the_right_ones(arguments, message):
    with pytest.raises(ValueError, match=message):
        tracea.tune(SMALL, **arguments)


def test_parts_are_tuned_before_what_is_made_of_them(scripts):
    gated = GatedMatmulProblem(m=16, n=24, k=8)
    graph = Graph([gated, LARGE, LARGE, SMALL])
    report = tracea.tune(graph)
    assert scripts.finished[-1] == gated
    assert [row.problem for row in report.rows] == [gated, LARGE, SMALL]
    assert [row.count for row in report.rows] == [1, 2, 1]
    parts = [row.problem for row in report.parts]
    epilogues = {p.epilogue for p in parts if isinstance(p, GemmProblem)}
    product = Epilogue(activation="silu", residual=True, residual_op="multiply")
    assert epilogues == {product, Epilogue(activation="silu")}
    # what has an answer is no longer tuned on the way
    scripts.finished.clear()
    assert tracea.tune(gated).parts == () and scripts.finished == [gated]


def test_every_tuning_gets_the_search(scripts):
    graph = Graph([SMALL, LARGE])
    tracea.tune(graph, goal="throughput", effort="quick", seed=7, budget_s=90)
    for made in scripts.made:
        budget_s = made.search.pop("budget_s")
        assert 80 < budget_s <= 90
        assert made.search == {"goal": "throughput", "effort": "quick", "seed": 7}


def test_the_counts_of_a_graph_decide_who_is_searched_next(scripts):
    graph = Graph([SMALL])
    graph.add(LARGE, count=10)
    tracea.tune(graph)
    assert set(scripts.order[:2]) == {SMALL, LARGE}
    assert scripts.order[2:4] == [LARGE, LARGE]


# --- one config for several problems --------------------------------------------------

OTHER = GemmProblem(m=17, n=24, k=8)


def test_a_portfolio_serves_every_problem_with_the_fewest_configs(scripts):
    scripts.times = {
        SMALL: (30.0, 10.1, 10.0),  # the second is within 2 %
        OTHER: (30.0, 20.0, 25.0),
        LARGE: (50.0, 90.0, 95.0),
    }
    scripts.bench.times_us = {
        Choice(variant="gemm_cpu", config=GemmCpuConfig(**CONFIGS[1])): 10.1,
        Choice(variant="gemm_cpu", config=GemmCpuConfig(**CONFIGS[2])): 10.0,
    }
    graph = Graph([SMALL, OTHER, LARGE])
    report = tracea.tune(graph, goal="throughput", portfolio=0.02)
    assert report.portfolio is not None
    shared = {s.config["kc"]: s.problems for s in report.portfolio.configs}
    assert shared == {320: (SMALL, OTHER), DEFAULT["kc"]: (LARGE,)}
    assert answer(SMALL) == ("gemm_cpu", CONFIGS[1])
    small, *_ = report.rows
    assert small.origin == "portfolio" and small.config == CONFIGS[1]
    assert small.steady.after == pytest.approx(10.1, rel=1e-3)
    assert "portfolio: 2 configs for 3 problems, each within 2 % of its best" in str(
        report
    )
    assert json.loads(json.dumps(report.to_json()))["portfolio"]["fraction"] == 0.02


def test_no_portfolio_unless_it_is_asked_for(scripts):
    scripts.times = {SMALL: (30.0, 10.1, 10.0), OTHER: (30.0, 20.0, 25.0)}
    report = tracea.tune(Graph([SMALL, OTHER]))
    assert report.portfolio is None and answer(SMALL) == ("gemm_cpu", CONFIGS[2])


# --- for real -------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Measures shortly: what is found is of no account."""
    timing = measure.Timing(
        slice_s=0.002, settle_s=0.01, candidate_s=0.02, race_s=0.02, cold_runs=3
    )
    shortly = functools.partial(knowledge.open_lab, timing=timing)
    monkeypatch.setattr(knowledge, "open_lab", shortly)
    monkeypatch.setattr(races, "TIMING", timing)


def test_a_function_is_tuned_and_uses_the_answers(quick):
    x, w = normal(16, 8), normal(8, 24)
    fn = jax.jit(tracea.transform(lambda x, w: jax.nn.relu(x @ w)))
    before = fn(x, w)
    report = tracea.tune(fn, x, w, effort="none")
    (row,) = report.rows
    assert str(row.problem) == "matmul 16x24x8 float32 nn relu"
    assert row.steady.is_complete and row.steady.after
    with tracea.options(on_miss="error"):  # there is an answer now
        assert abs(fn(x, w) - before).max() < 1e-5
    assert dispatch.plan(row.problem, CPU).origin == "tuned"


def test_a_graph_is_tuned(quick, tmp_path):
    log = tmp_path / "log.jsonl"
    report = tracea.tune(Graph([SMALL, LARGE]), effort="none", log=log)
    assert set(report.entries) == {SMALL, LARGE}
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    assert {x["variant"] for x in seen} == {"gemm_cpu", "xla"}
    for row in report.rows:
        assert row.entry is not None and row.trials
        assert row.steady.is_complete
        tried = [(t.variant, t.config) for t in row.trials]
        assert (row.variant, row.config) in tried


def test_what_a_budget_does_not_reach_is_told():
    report = tracea.tune(Graph([SMALL, LARGE]), effort="quick", budget_s=1.0)
    assert report.entries
    assert all(row.stop == "budget" for row in report.rows if row.entry is None)


def test_the_schedule_works_on_real_tunings(quick):
    """The parts of ``tuner.Tuning`` that ``schedule.Task`` names."""
    with contextlib.closing(knowledge.open_lab(CPU, SMALL)) as lab:
        task = knowledge.tuning(SMALL, CPU, lab=lab, effort="none", budget_s=60.0)
        (outcome,) = schedule.run([schedule.Job(task=task)])
    assert outcome.entry is not None
    assert outcome.entry.problem == SMALL.to_json()
    assert task.default_us and task.xla_us
