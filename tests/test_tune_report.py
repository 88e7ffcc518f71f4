"""Reports and progress of tune: tables, data, progress and logs."""

from __future__ import annotations

import json
import math

import pytest
from scripted_tunings import CONFIGS, CPU, LARGE, SMALL, answer

import tracea_jax as tracea
from tracea_jax import knowledge
from tracea_jax.campaign.rows import Times
from tracea_jax.campaign.watch import Step
from tracea_jax.graph import Graph
from tracea_jax.problem import (
    GatedMatmulProblem,
    problem_from_json,
)
from tracea_jax.tuning.progress import TuningError

pytestmark = pytest.mark.once


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
    done = "goal throughput, effort default: 6 of 6 configs tried, 6 compiled, "
    assert lines[1].startswith(done)
    assert lines[1].endswith("; searches ended by: 2 complete")
    assert lines[3] == "times of executions in a row:"
    row = ["3", "matmul", "16x24x8", "float32", "nn", "30.0", "10.0", "330.0"]
    assert lines[5].split()[:11] == [*row, "3", "of", "3"]
    assert lines[5].endswith("gemm_cpu [kc 384 nc 64 tasks 2], tuned config")
    assert lines[-1] == (
        "total (count x time): tuned 330.0 us, untuned 490.0 us (1.48x), "
        "XLA 1320.0 us (4.00x)"
    )
    lines = str(tracea.tune(graph)).splitlines()
    assert lines[3] == "times of single executions on cold caches:"
    assert lines[5].split()[5:8] == ["40.0", "20.0", "340.0"]
    assert lines[-1].startswith("total (count x time): tuned 370.0 us, untuned 530.0")
    one = str(tracea.tune(SMALL)).splitlines()
    assert one[0] == (
        "matmul 16x24x8 float32 nn: gemm_cpu [kc 384 nc 64 tasks 2], 20.0 us, "
        "XLA 340.0 us, 17.00x"
    )
    assert one[1] == "  times of single executions on cold caches"
    assert one[2].startswith("  untuned 40.0 us, 3 of 3 configs tried, 3 compiled, ")


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
    assert "(1 problem without timings not counted)" in str(report)
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


def test_ctrl_c_while_the_device_is_opened_returns_the_report(scripts, monkeypatch):
    def interrupt(*_, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr(knowledge, "open_lab", interrupt)
    report = tracea.tune(Graph([SMALL, LARGE]))
    assert [row.stop for row in report.rows] == ["interrupted"] * 2
    assert report.entries == {} and "no config tried" in str(report)


def test_the_other_processes_report_what_process_0_found(scripts, monkeypatch):
    entry = tracea.tune(SMALL).entry
    monkeypatch.setattr(knowledge, "by_process_0", lambda *_: [entry])
    scripts.finished.clear()
    report = tracea.tune(SMALL)
    assert report.entry == entry and scripts.finished == []
    (row,) = report.rows
    assert row.steady == Times(before=30.0, after=10.0, xla=100.0)
    assert row.stop == "complete" and (row.tried, row.legal) == (3, 3)


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
