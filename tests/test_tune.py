"""tune: which problems it tunes, its report, progress and log."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import synthetic_bench as synthetic
from numerics import normal

import tracea_jax as tracea
from tracea_jax import dispatch, knowledge
from tracea_jax.campaign import graph_of, program, run
from tracea_jax.campaign.rows import Times
from tracea_jax.campaign.watch import Step
from tracea_jax.campaign.whole import Whole
from tracea_jax.device import local_cpu
from tracea_jax.graph import Graph
from tracea_jax.options import current
from tracea_jax.policy import Choice
from tracea_jax.problem import (
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
    problem_from_json,
)
from tracea_jax.tuning import measure, schedule
from tracea_jax.tuning.lab import local
from tracea_jax.tuning.progress import TuningError
from tracea_jax.tuning.store.code import roots_hash
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Entry, Observation, union
from tracea_jax.variants.gemm_cpu import GEMM_CPU, GemmCpuConfig

pytestmark = pytest.mark.once

CPU = local_cpu()
SMALL = GemmProblem(m=16, n=24, k=8)
LARGE = GemmProblem(m=64, n=96, k=8)  # as deep: one default for both
TINY = {"effort": "none", "budget_s": 1.0}
DEFAULT = dataclasses.asdict(GEMM_CPU.heuristic(SMALL, CPU))
CONFIGS = [DEFAULT, *({"kc": kc, "nc": 64, "tasks": 2} for kc in (320, 384))]


# --- tunings that follow a script -----------------------------------------------------


class Scripted:
    """A tuning that measures three configs, the default first, and XLA.

    Its times are those of ``Scripts``, ten microseconds more on cold caches. It records
    them like a real one.
    """

    def __init__(self, scripts, problem, device, settings, observe, progress, **search):
        self.scripts, self.problem, self.search = scripts, problem, search
        self.knowledge, self.device = knowledge.known(settings), device
        self.observe, self.progress = observe, progress
        self.seen: list[Observation] = []
        self.evals = self.compiles = 0
        self.stop: str | None = None
        self.expected_gain = math.inf

    @property
    def best_us(self):
        return min((o.time_us for o in self.seen if o.time_us), default=None)

    @property
    def times(self):
        return self.scripts.times.get(self.problem, (30.0, 20.0, 10.0))

    @property
    def default_us(self):
        return self.times[0] if self.seen else None

    @property
    def xla_us(self):
        return self.scripts.xla_us

    def step(self, *, limit_s=math.inf):
        self.scripts.order.append(self.problem)
        self.scripts.hook(self.problem)
        if not self.seen:
            self._see("xla", {}, self.scripts.xla_us)
        self._see("gemm_cpu", CONFIGS[self.evals], self.times[self.evals])
        self.evals += 1
        self.compiles += 1
        self.expected_gain = 0.5
        return self.evals < 3

    def finish(self, *, bounded_s=None):
        self.scripts.finished.append(self.problem)
        timed = [(o.time_us, o) for o in self.seen if o.time_us]
        us, best = min(timed, key=lambda pair: pair[0], default=(1.0, None))
        entry = Entry(
            problem=self.problem.to_json(),
            environment=environment(self.device),
            best=Best(
                variant=best.variant if best else "xla",
                config=best.config if best else {},
                code=best.code if best else "",
                time_us=us,
                xla_us=self.scripts.xla_us,
                cold_us=us + 10,
                xla_cold_us=self.scripts.xla_us + 10,
                origin="search",
            ),
            observations=union(self.seen),
            tuner={"stop": self.stop or "complete", "evals": self.evals},
            written=f"2026-01-01T00:00:{next(self.scripts.clock):02}.000000+00:00",
        )
        if self.progress:
            self.progress(phase="done", done=1, total=1, best_us=us, message="gemm_cpu")
        return self.knowledge.own.record(entry)

    def _see(self, variant, config, time_us):
        failed = {"failure": "compile_error", "message": "no"}
        cold_us = time_us and time_us + 10
        measured = {"time_us": time_us, "cold_us": cold_us, "repeats": 5}
        how: dict[str, Any] = failed if time_us is None else measured
        if variant == "gemm_cpu":
            how["code"] = roots_hash(GEMM_CPU.sources, self.device)
        self.seen.append(Observation(variant=variant, config=config, **how))
        self.observe(self.seen[-1])
        if self.progress:
            done = self.evals + 1
            self.progress(
                phase="search", done=done, total=3, best_us=self.best_us, message="c"
            )


class Scripts:
    """Times of each problem's configs, and what the tunings did."""

    def __init__(self):
        self.times: dict = {}
        self.xla_us = 100.0
        self.order: list = []
        self.finished: list = []
        self.made: list[Scripted] = []
        self.hook = lambda problem: None
        self.clock = itertools.count()
        self.bench = synthetic.Bench(synthetic.Clock(), {})

    def tuning(self, problem, device, *, settings, lab, observe, progress, **search):
        made = Scripted(self, problem, device, settings, observe, progress, **search)
        self.made.append(made)
        return made

    def open_lab(self, device, problem, *, settings):
        timing = synthetic.timing(self.bench.clock)
        return local.LocalLab(lambda problem, device: self.bench, device, timing)


@pytest.fixture
def scripts(monkeypatch):
    scripts = Scripts()
    monkeypatch.setattr(knowledge, "tuning", scripts.tuning)
    monkeypatch.setattr(knowledge, "open_lab", scripts.open_lab)
    return scripts


def answer(problem):
    knowledge.refresh(current())
    found = knowledge.known(current()).lookup(problem, CPU)
    return found and (found.choice.variant, dataclasses.asdict(found.choice.config))


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


def test_a_part_of_the_budget_is_for_the_race_of_the_program(scripts, monkeypatch):
    whole = Whole(reason="not today")
    monkeypatch.setattr(run, "hold", lambda program, **_: (None, whole))
    x, w = jnp.ones((16, 8)), jnp.ones((8, 24))
    for race, share in ((True, 0.75), (False, 1.0)):
        report = tracea.tune(jnp.matmul, x, w, budget_s=1000, race=race)
        given = scripts.made[-1].search["budget_s"]
        assert 1000 * share - 100 < given <= 1000 * share
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


# --- what is reported -----------------------------------------------------------------


def test_the_report_sums_over_the_graph(scripts):
    scripts.times = {SMALL: (30.0, 20.0, 10.0), LARGE: (400.0, 300.0, None)}
    scripts.xla_us = 330.0
    graph = Graph([SMALL] * 3 + [LARGE])
    report = tracea.tune(graph, goal="throughput")
    small, large = report.rows
    assert small.steady == Times(before=30.0, after=10.0, xla=330.0)
    assert large.steady == Times(before=400.0, after=300.0, xla=330.0)
    assert large.cold == Times(before=410.0, after=310.0, xla=340.0)
    assert (large.variant, large.config) == ("gemm_cpu", CONFIGS[1])
    assert large.origin == "search"
    total = Times(before=3 * 30.0 + 400, after=3 * 10.0 + 300, xla=4 * 330.0)
    assert report.total() == total and report.gain == pytest.approx(490 / 330)
    assert (report.evals, report.compiles) == (6, 6)
    with pytest.raises(ValueError, match="2 problems were tuned: use entries"):
        _ = report.entry


def test_the_goal_decides_which_times_are_summed(scripts):
    by_goal = {}
    for goal in ("throughput", "latency", "balanced"):
        scripts.times = {SMALL: (30.0, 20.0, 10.0)}
        by_goal[goal] = tracea.tune(Graph([SMALL]), goal=goal).total().after
    assert by_goal["throughput"] == 10.0 and by_goal["latency"] == 20.0
    assert by_goal["balanced"] == pytest.approx(math.sqrt(10 * 20))


def test_the_report_prints(scripts):
    scripts.times = {LARGE: (400.0, 300.0, None)}
    scripts.xla_us = 330.0
    graph = Graph([SMALL] * 3 + [LARGE])
    lines = str(tracea.tune(graph, goal="throughput")).splitlines()
    assert lines[0] == f"2 problems on {CPU}"
    assert lines[1].startswith("goal throughput, effort default: 6 evaluations, 6 comp")
    assert lines[1].endswith("; ended by: 2 complete")
    assert lines[2] == "times of executions in a row"
    row = ["3", "matmul", "16x24x8", "float32", "nn", "30.0", "10.0", "330.0", "3"]
    assert lines[5].split()[:9] == row
    assert lines[5].endswith("gemm_cpu [kc 384 nc 64 tasks 2], search")
    assert lines[-1] == (
        "sum of count x time: untuned 490.0 us, tuned 330.0 us (1.48x), XLA 1320.0 us "
        "(4.00x)"
    )
    lines = str(tracea.tune(graph)).splitlines()
    assert lines[2] == "times of single executions on cold caches"
    assert lines[5].split()[5:8] == ["40.0", "20.0", "340.0"]
    assert lines[-2].startswith("sum of count x time: untuned 530.0 us, tuned 370.0 us")
    assert lines[-1].startswith(
        "sum of count x time, of executions in a row: untuned 4"
    )
    one = str(tracea.tune(SMALL)).splitlines()
    assert one[0] == (
        "matmul 16x24x8 float32 nn: gemm_cpu [kc 384 nc 64 tasks 2], 10.0 us, "
        "XLA 330.0 us, 33.00x"
    )
    assert one[1] == "  on cold caches 20.0 us, XLA 340.0 us"
    assert one[2].startswith("  untuned 30.0 us, 3 evaluations, 3 compiles, ")


def test_the_report_is_plain_data(scripts):
    report = tracea.tune(Graph([SMALL, LARGE]), seed=3)
    data = json.loads(json.dumps(report.to_json()))
    assert [problem_from_json(row["problem"]) for row in data["rows"]] == [SMALL, LARGE]
    assert data["device"]["name"] == CPU.name and data["seed"] == 3
    assert data["gain"] == report.gain and data["portfolio"] is None
    assert (data["protocol"], data["total_us"]["after"]) == ("cold", 40.0)
    row = data["rows"][0]
    assert row["config"] == CONFIGS[2]
    assert row["steady_us"] == {"before": 30.0, "after": 10.0, "xla": 100.0}


def test_a_problem_that_fails_is_a_row(scripts):
    def fail(problem):
        if problem == SMALL:
            raise TuningError("nothing could be run")

    scripts.hook = fail
    report = tracea.tune(Graph([SMALL, LARGE]))
    failed, other = report.rows
    assert failed.entry is None and failed.stop == "nothing could be run"
    assert other.entry is not None and report.timed == (other,)
    assert "(1 without all times left out)" in str(report)
    with pytest.raises(TuningError, match="nothing could be run"):
        tracea.tune(SMALL)


def test_ctrl_c_returns_the_report(scripts):
    def interrupt(problem):
        if len(scripts.order) == 4:
            raise KeyboardInterrupt

    scripts.hook = interrupt
    gated = GatedMatmulProblem(m=16, n=24, k=8)
    report = tracea.tune(Graph([SMALL, LARGE, gated]))
    assert {row.stop for row in report.rows} == {"interrupted"}
    assert set(report.entries) == {SMALL, LARGE}
    assert answer(SMALL) is not None and answer(gated) is None


def test_the_other_processes_report_what_process_0_found(scripts, monkeypatch):
    entry = tracea.tune(SMALL).entry
    monkeypatch.setattr(knowledge, "by_process_0", lambda *_: [entry])
    scripts.finished.clear()
    report = tracea.tune(SMALL)
    assert report.entry == entry and scripts.finished == []
    (row,) = report.rows
    assert row.steady == Times(after=10.0, xla=100.0) and row.stop == "complete"
    assert "untuned" not in str(report)


# --- what is told ---------------------------------------------------------------------


def test_the_log_has_every_observation(scripts, tmp_path):
    scripts.times = {LARGE: (400.0, None, 300.0)}
    path = tmp_path / "log.jsonl"
    path.write_text("{}\n")  # what was there stays
    report = tracea.tune(Graph([SMALL, LARGE]), log=path)
    first, *lines = map(json.loads, path.read_text().splitlines())
    assert first == {} and len(lines) == 8
    for row in report.rows:
        own = [x for x in lines if problem_from_json(x["problem"]) == row.problem]
        assert [x["config"] for x in own] == [{}, *CONFIGS]
        assert [x["time_us"] for x in own] == [t.time_us for t in row.trials]
        assert [x["elapsed_s"] for x in own] == sorted(x["elapsed_s"] for x in own)
    (failed,) = [x for x in lines if x["failure"]]
    assert (failed["failure"], failed["message"]) == ("compile_error", "no")


def test_the_log_may_be_a_function(scripts):
    lines = []
    tracea.tune(SMALL, log=lines.append)
    assert [line["variant"] for line in lines] == ["xla", *["gemm_cpu"] * 3]


def test_a_log_that_cannot_be_written_is_an_error_before_any_work(scripts, tmp_path):
    with pytest.raises(OSError, match="log.jsonl"):
        tracea.tune(SMALL, log=tmp_path / "missing" / "log.jsonl")
    assert scripts.made == []


def test_progress_is_told_of_the_problem_and_of_the_graph(scripts):
    steps = []
    tracea.tune(
        Graph([SMALL, LARGE]), progress=lambda **step: steps.append(Step(**step))
    )
    assert {s.problem for s in steps} == {str(SMALL), str(LARGE)}
    shares = [s.share for s in steps]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert (steps[0].node, steps[-1].node, steps[-1].nodes) == (0, 2, 2)
    assert steps[-1].phase == "done" and steps[-1].xla_us == 100.0
    assert all(s.left_s is not None and s.left_s >= 0 for s in steps)


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
    monkeypatch.setattr(program, "TIMING", timing)


def test_a_function_is_tuned_and_uses_the_answers(quick):
    x, w = normal(16, 8), normal(8, 24)
    fn = jax.jit(tracea.transform(lambda x, w: jax.nn.relu(x @ w)))
    before = fn(x, w)
    report = tracea.tune(fn, x, w, **TINY)
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
        task = knowledge.tuning(SMALL, CPU, lab=lab, **TINY)
        (outcome,) = schedule.run([schedule.Job(task=task)])
    assert outcome.entry is not None
    assert outcome.entry.problem == SMALL.to_json()
    assert task.default_us and task.xla_us
