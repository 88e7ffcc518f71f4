"""The benchmarks' own parts: suites, figures, runs, comparisons."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_rows import FAILED, arguments, row

from tracea_jax.device import NAMED
from tracea_jax.problem import GatedMatmulProblem, GemmProblem

pytestmark = pytest.mark.once

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


def sizes(cases):
    return {(c.problem.m, c.problem.n, c.problem.k) for c in cases}


# --- the suite ------------------------------------------------------------------------


def test_every_group_of_the_gpu_suite_has_bars_and_quick_cases(module):
    suite = module("matmul_suite")
    cases, quick = suite.suite(False), suite.suite(True)
    groups = list(dict.fromkeys(c.group for c in cases))
    assert groups == list(suite.BARS)
    assert {c.group for c in quick} == set(groups)
    assert set(quick) < set(cases)
    assert len({c.problem for c in cases}) == len(cases)
    # Cases of a group are in a row, as they are tuned together.
    changes = sum(a.group != b.group for a, b in zip(cases, cases[1:], strict=False))
    assert changes == len(groups) - 1


def test_the_gpu_suite_has_what_the_bars_are_about(module):
    suite = module("matmul_suite")
    of = {g: [] for g in suite.BARS}
    for case in suite.suite(False):
        of[case.group].append(case)
    layers = set(suite.LLAMA_70B.values())
    for dtype in ("bfloat16", "float16"):
        large = [c for c in of["large"] if c.problem.lhs == dtype]
        squares = {(s, s, s) for s in (2048, 4096, 8192)}
        assert sizes(large) == squares | {
            (m, *layer) for m in (512, 4096) for layer in layers
        }
        layouts = {c.problem.layout for c in large if c.problem.m == c.problem.n}
        assert layouts == {"nn", "nt", "tn", "tt"}
    skinny = {(m, *layer) for m in (1, 4, 16, 64) for layer in layers}
    assert sizes(of["skinny"]) == skinny
    assert len(of["fused"]) == 9
    assert sum(isinstance(c.problem, GatedMatmulProblem) for c in of["fused"]) == 3
    assert {c.problem.precision for c in of["f32 highest"]} == {"highest"}
    assert {c.problem.layout for c in of["fp8"]} == {"nt"}
    assert max(c.problem.batch for c in of["small"]) == 64


def test_the_cpu_suite_has_a_goal_for_every_case(module):
    suite = module("cpu_suite")
    cases, quick = suite.suite(False), suite.suite(True)
    groups = list(dict.fromkeys(c.group for c in cases))
    assert {c.group for c in quick} == set(groups) >= set(suite.GEOMEANS)
    assert len({c.problem for c in cases}) == len(cases) == 74
    assert {c.problem.op for c in cases} == {"matmul", "conv2d", "attention"}
    assert all(c.stretch is None or 0 < c.must < c.stretch for c in cases)


def test_cpu_figures_are_of_rows_that_were_measured(module):
    suite = module("cpu_suite")
    names = ("ratio", "ratio_torch", "of_peak", "ratio_tuned")

    def measured(case, us, **values):
        text = {"group": case.group, "problem": case.problem.to_json(), "ours_us": us}
        return {**text, **dict.fromkeys(names), **values}

    products = [c for c in suite.suite(False) if c.group == "matmul bf16"]
    gelus = [c for c in suite.suite(False) if c.group == "matmul+bias+gelu bf16"]
    rows = [measured(c, 100.0, ratio_torch=2.0) for c in products]
    rows += [measured(c, 106.0, ratio_torch=0.5) for c in gelus]
    rows.append({**rows[0], "error": "RuntimeError: no"})
    figures = {f["name"]: f["value"] for f in suite.summary(rows)}
    assert figures == {
        "against torch, geometric mean": pytest.approx(2 ** (2 / 8)),
        "time that a fused GELU adds to a bf16 product, median": pytest.approx(0.06),
    }


# --- figures --------------------------------------------------------------------------


def test_the_geometric_mean(module):
    geomean = module("matmul_suite").geomean
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert geomean([0.5]) == pytest.approx(0.5)
    assert geomean([1e300, 1e300]) == pytest.approx(1e300)


def bars_of(module, rows):
    (group,) = module("matmul_suite").summary(rows)
    return group, {bar["figure"]: bar["is_met"] for bar in group["bars"]}


def test_bars_are_judged_by_their_figures(module):
    rows = [row("large", own=1.3, default=1.2), row("large", own=0.9, default=0.99)]
    group, met = bars_of(module, rows)
    assert group["own_geomean"] == pytest.approx(math.sqrt(1.3 * 0.9))
    assert (group["own_min"], group["default_min"]) == (0.9, 0.99)
    assert met == {"own_geomean": True, "own_min": False, "default_min": True}


def test_an_upper_bar(module):
    good = [row("f32 highest", own=2.5, default=2.5, error_by_xla=2.0)]
    bad = [*good, row("f32 highest", own=2.5, default=2.5, error_by_xla=2.1)]
    assert bars_of(module, good)[1]["error_by_xla_max"]
    group, met = bars_of(module, bad)
    assert group["error_by_xla_max"] == 2.1 and not met["error_by_xla_max"]


def test_what_failed_or_has_no_kernel_misses_the_bars(module):
    fine = row("large", own=2.0, default=2.0)
    group, met = bars_of(module, [fine, FAILED])
    assert not any(met.values()) and group["failed"] == 1
    group, met = bars_of(module, [fine, row("large", default=1.0)])
    assert group["without_own"] == 1 and group["own_min"] == 2.0
    assert met == {"own_geomean": False, "own_min": False, "default_min": True}


def test_groups_without_bars_are_not_judged(module):
    assert module("matmul_suite").summary([row("plain", own=1.0)]) == []


# --- running --------------------------------------------------------------------------


def test_results_of_another_commit_are_not_gone_on_with(module, tmp_path):
    common = module("common")
    args = arguments(tmp_path)
    assert common.saved("x", args) == []
    path = common.save("x", [{"a": 1}], args, groups=[])
    assert json.loads(path.read_text())["groups"] == []
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    assert common.saved("x", args) == [{"a": 1}]
    assert common.saved("x", arguments(tmp_path, commit="other")) == []


def test_rows_that_stay(module, tmp_path):
    bench, suite = module("bench_matmul"), module("matmul_suite")
    earlier = [row("large"), row("small")]
    chosen = [c for c in suite.suite(False) if c.group == "small"]
    assert bench.kept(earlier, chosen, arguments(tmp_path)) == []
    only = arguments(tmp_path, only=["small"])
    assert bench.kept(earlier, chosen, only) == earlier[:1]
    assert bench.kept(earlier, chosen, arguments(tmp_path, resume=True)) == earlier


def test_a_failing_case_is_a_row_and_the_rest_goes_on(module, monkeypatch, tmp_path):
    bench, suite = module("bench_matmul"), module("matmul_suite")
    cases = suite.suite(True)[:3]

    def measure(case, rounds):
        if case == cases[1]:
            raise RuntimeError("illegal address")
        return {k: v for k, v in row("", own=1.5).items() if k not in HEAD}

    tuned = []
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(
        bench.common,
        "tune_together",
        lambda problems, **_: tuned.extend(problems) or {},
    )
    how = {"effort": "none", "goal": "throughput", "budget_s": 1.0, "rounds": 1}
    args = arguments(tmp_path, **how)
    bench.run(cases, args)
    (path,) = tmp_path.glob("*/matmul.json")
    rows = json.loads(path.read_text())["rows"]
    assert [r["text"] for r in rows] == [str(c.problem) for c in cases]
    assert [r.get("error") for r in rows] == [
        None,
        "RuntimeError: illegal address",
        None,
    ]
    assert tuned == [c.problem for c in cases]
    # Going on measures nothing that is there; a group alone is measured again.
    bench.run(cases, arguments(tmp_path, **how, resume=True))
    assert len(tuned) == len(cases)


HEAD = ("group", "problem", "text")


def test_launches_are_told_by_the_thread_that_made_the_chain(module, monkeypatch):
    launch = module("bench_launch")
    Named = collections.namedtuple("Named", "name planes lines events")
    Event = collections.namedtuple("Event", "name start_ns duration_ns")

    def line(*events):
        return Named("", (), (), events)

    chain = line(*(Event("cuLaunchKernelEx", 3000 * i, 1200) for i in range(4)))
    other = line(Event("cuLaunchKernel", 0, 9000), Event("Thunk", 10, 20))
    host = Named("/host:CPU", (), (other, chain), ())
    device = Named("/device:GPU:0", (), (line(*(8 * chain.events)),), ())
    profile = Named("", (device, host), (), ())
    monkeypatch.setattr(launch.kernel_time, "profiled", lambda calls: profile)
    found = launch._host_us(lambda: None, length=4)
    assert found == {"interval_us": 3.0, "call_us": 1.2}
    # A chain that was replayed as a graph has no launches of its own.
    found = launch._host_us(lambda: None, length=5)
    assert found == {"interval_us": None, "call_us": None}


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem(m=33, n=48, k=64, precision="highest"),
        GemmProblem(m=33, n=48, k=64, layout="tt", lhs="bfloat16", rhs="bfloat16"),
        GemmProblem(batch=3, m=16, n=24, k=32, lhs_batched=True, rhs_batched=True),
        GatedMatmulProblem(m=33, n=48, k=64, layout="nt"),
    ],
    ids=str,
)
def test_the_peer_computes_the_problem_and_errors_are_seen(module, problem):
    bench, suite = module("bench_matmul"), module("matmul_suite")
    problems = [problem]
    if isinstance(problem, GemmProblem):
        problems.append(dataclasses.replace(problem, epilogue=suite.SILU))
    for problem in problems:
        operands = bench.operands(problem)
        peer = bench.plain(*operands, problem=problem)
        ours = bench.ours(*operands, problem=problem, implementation="xla")
        np.testing.assert_allclose(
            np.asarray(peer, np.float32),
            np.asarray(ours, np.float32),
            rtol=0.02,
            atol=0.1,
        )
        assert bench.error(problem, operands, ours) < 1
        wrong = jnp.asarray(ours).at[..., -1].multiply(1.5)
        assert bench.error(problem, operands, wrong) > 1


def test_three_ways_of_a_training_step_agree(module):
    models = module("bench_models")
    case = models.training(models.Mlp(layers=2, width=16, batch=8, dtype="float32"))
    expected = jax.tree.leaves(case.plain(*case.inputs))
    assert len(expected) == 1 + 2 * 2
    for function in case.ours.values():
        for got, want in zip(
            jax.tree.leaves(function(*case.inputs)), expected, strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_peers_that_are_not_there_say_so(module):
    peers = module("bench_peers")
    with pytest.raises(peers.Missing, match="not installed"):
        peers._imported("a_library_that_nobody_has")
    product = GemmProblem(m=8, n=8, k=8)
    with pytest.raises(peers.Missing):
        peers.tokamax(product, [], 1.0)
    cells = peers._cells({"text": "x", "peer": "torch", "missing": "not installed"})
    assert cells[-1] == "not installed"


def test_kernels_to_compile_are_of_every_family(module):
    launch = module("bench_launch")
    found = [
        {name for name, _ in launch.kernels(problem, NAMED["H200"])}
        for problem in launch.problems()
    ]
    assert found[0] and all("xla" not in names for names in found)
