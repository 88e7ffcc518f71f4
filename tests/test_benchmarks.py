"""The benchmarks' own parts: suites, figures, tables, shipped answers, comparisons."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from synthetic_bench import choice, entry

from tracea_jax import knowledge
from tracea_jax.device import NAMED, local_cpu
from tracea_jax.options import current
from tracea_jax.problem import GatedMatmulProblem, GemmProblem
from tracea_jax.tuning.answers.answer import Answer
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.answers.times import timed
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Observation

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """Imports a module of the benchmarks, which import each other by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def sizes(cases):
    return {(c.problem.m, c.problem.n, c.problem.k) for c in cases}


def row(group, own=None, default=1.0, **fields):
    """A row of ``bench_matmul``, as far as figures and tables look at it."""
    return {
        "group": group,
        "problem": {"op": "matmul"},
        "text": "matmul 8x8x8 bfloat16 nn",
        "variant": own and "gemm_sm90",
        "config": own and {"tile_m": 128},
        "why_no_own": None if own else "no kernel of ours takes it",
        "default_variant": "xla",
        "own_us": own and 10.0 / own,
        "default_us": 10.0 / default,
        "xla_us": 10.0,
        "ratio_own": own,
        "ratio_default": default,
        "tflops": 100.0,
        "gbs": 200.0,
        "error_of_bound": 0.5,
        "xla_error_of_bound": 0.5,
        "error_by_xla": 1.0,
        **fields,
    }


FAILED = {
    "group": "large",
    "problem": {"op": "matmul"},
    "text": "matmul 9x9x9 bfloat16 nn",
    "error": "ValueError: no\nmore",
}


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


# --- tables ---------------------------------------------------------------------------

WHERE = {
    "device": "Some GPU",
    "arch": "sm_90a",
    "units": 132,
    "versions": {"jax": "0.11.2"},
    "date": "2026-01-01",
}


def test_readme_tables_of_fresh_rows(module, tmp_path):
    suite, tables = module("matmul_suite"), module("tables")
    rows = [row("large", own=1.25, default=1.2), row("small"), FAILED]
    device = tmp_path / "some_gpu"
    device.mkdir()
    result = {"environment": WHERE, "rows": rows, "groups": suite.summary(rows)}
    (device / "matmul.json").write_text(json.dumps(result))
    text = tables.matmul(tmp_path)
    assert (
        "| large | 8x8x8 bfloat16 nn | gemm_sm90 | 8.0 | 10.0 | 1.25 | 1.20 |" in text
    )
    assert "| small | 8x8x8 bfloat16 nn | - | - | 10.0 | - | 1.00 |" in text
    assert "| large | 9x9x9 bfloat16 nn | failed | - | - | - | - |" in text
    training = {"name": "MLP step, ops", "ratio": 1.1, "bar": 1.08}
    models = {"environment": WHERE, "rows": [{"name": "other"}, training]}
    (device / "models.json").write_text(json.dumps(models))
    text = tables.bars(tmp_path)
    assert "| large | XLA / ours, lowest | >= 0.95 | 1.250 | no |" in text
    assert "| small | XLA / ours, geometric mean | >= 1.10 | - | no |" in text
    assert "| training | MLP step, ops | >= 1.08 | 1.100 | yes |" in text
    assert "other" not in text


def test_plans_are_summed_up_by_their_origin(module, tmp_path):
    device = tmp_path / "some_gpu"
    device.mkdir()
    planned = [("inherited", 2.0), ("interpolated", None), ("inherited", 0.5)]
    planned += [("inherited", None), ("inherited", 1.0)]
    rows = [{"origin": origin, "ratio": ratio} for origin, ratio in planned]
    result = {"environment": WHERE, "rows": rows}
    (device / "untuned.json").write_text(json.dumps(result))
    text = module("tables").untuned(tmp_path)
    assert "| inherited | 4 | 3 | 1.00 | 0.50 | 1 |" in text
    assert "| interpolated | 1 | 0 | - | - | 0 |" in text


def test_untuned_shapes_are_measured_in_a_fixed_order(module):
    untuned, layers = module("bench_untuned"), module("model_layers")
    problems = untuned.problems()
    assert problems == untuned.problems() and len(set(problems)) == len(problems)
    assert set(layers.order()) < set(problems)
    beginning = {p.m for p in problems[:40]}
    assert beginning & set(untuned.BETWEEN) and beginning & set(layers.ROWS)


def test_where_the_plan_is_xla_nothing_races(module, cache_dir):
    # On a CPU small integers have no kernel of ours.
    problem = GemmProblem(m=8, n=8, k=8, lhs="int8", rhs="int8", out="int8")
    row = module("bench_untuned").measure(problem, rounds=1)
    assert (row["variant"], row["ratio"]) == ("xla", None)
    other = module("bench_untuned").measure(GemmProblem(m=96, n=80, k=64), rounds=1)
    assert other["variant"] == "gemm_cpu" and other["ratio"] > 0


def test_no_bars_make_no_table(module, tmp_path):
    (tmp_path / "cpu").mkdir()
    result = {"environment": WHERE, "rows": [row("plain", own=1.0)]}
    (tmp_path / "cpu" / "matmul.json").write_text(json.dumps(result))
    assert module("tables").bars(tmp_path) == "\n"


def test_every_figure_has_a_name_in_both_tables(module):
    suite, tables = module("matmul_suite"), module("tables")
    used = {bar.figure for bars in suite.BARS.values() for bar in bars}
    assert used == set(suite.FIGURES) == set(tables._FIGURES)


def test_printed_tables_show_losses_and_failures(module):
    bench, suite = module("bench_matmul"), module("matmul_suite")
    rows = [row("large", own=0.5), row("large"), FAILED]
    lines = bench.render(rows).splitlines()
    assert "0.500" in lines[1] and "no kernel of ours takes it" in lines[2]
    assert "ValueError: no" in lines[3] and "more" not in lines[3]
    assert bench.render_groups(suite.summary(rows)).count("NO") == 3


# --- attention ------------------------------------------------------------------------


def test_every_suite_of_attention_has_cases_with_bars(module):
    suite, tables = module("attention_suite"), module("attention_tables")
    cases = {name: suite.suite(name) for name in suite.SUITES}
    assert set(cases) == set(tables.SUITES)
    groups = [c.group for of in cases.values() for c in of]
    assert set(groups) == set(suite.BARS)
    for of in cases.values():
        assert len({(c.text, c.passes, c.group) for c in of}) == len(of)
        assert all(0 < c.seen <= 1 for c in of)
    used = {bar.figure for bars in suite.BARS.values() for bar in bars}
    assert used == set(tables.FIGURES)


def test_shares_of_scores_that_are_seen(module):
    suite = module("attention_suite")

    def seen(length=4096, **fields):
        return suite._seen(suite.problem_of(length, 64, **fields))

    assert seen() == 1
    assert seen(is_causal=True) == pytest.approx(4097 / 8192)
    at = np.arange(512)
    within = (at[:, None] >= at) & (at[:, None] - at <= 100)
    assert seen(512, is_causal=True, window=(100, 0)) == within.mean()
    assert (
        seen(512, window=(100, 30))
        == ((at[:, None] - at <= 100) & (at - at[:, None] <= 30)).mean()
    )


def small_attention(suite, passes, run, **sides):
    problem = suite.problem_of(64, 8, batch=1, heads=2)
    x = suite.operands(problem)
    made = {
        n: suite.Side(run=f, sets=(x, x)) for n, f in {"ours": run, **sides}.items()
    }
    return suite.Case(
        group="documents of 512",
        text="small",
        passes=passes,
        problem=problem,
        seen=0.5,
        sides=lambda: made,
        rivals=("ours",),
    )


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_a_race_of_attention(module, monkeypatch, passes):
    suite, bench = module("attention_suite"), module("bench_attention")

    def race(calls, rounds):
        for call in calls.values():
            assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(call()))
        return {name: [2.0, 4.0] for name in calls}

    monkeypatch.setattr(bench.common, "race", race)
    ours = suite.ours("xla", is_causal=True)
    peer = suite._peer("xla", is_causal=True)
    case = small_attention(suite, passes, ours, default=ours, cudnn=peer)
    row = bench.row_of(case, rounds=2)
    assert "error" not in row
    assert row["ratio_default"] == 1 and row["default_is"] == "ours"  # it raced once
    assert (row["own_us"], row["cudnn"]) == (3, 1) and row["tflops"] > 0
    assert bench.render([row]).count("small") == 1


def test_attention_that_no_kernel_takes_is_a_row(module):
    suite, bench = module("attention_suite"), module("bench_attention")
    ours = suite.ours("attention_sm90")
    row = bench.row_of(small_attention(suite, "forward", ours), rounds=1)
    assert row["error"].startswith("Unsupported")
    assert "Unsupported" in bench.render([row])


def test_tables_of_attention(module, tmp_path):
    suite, bench = module("attention_suite"), module("bench_attention")
    fine = {
        "group": "documents of 512",
        "text": "1x8x8",
        "passes": "both",
        "own_us": 10.0,
        "tflops": 123.4,
        "cudnn": 17.5,
        "separate": 0.75,
        "ratio_default": 0.98,
        "default_is": "ours",
    }
    failed = {"group": "window", "text": "2x8x8", "passes": "both", "error": "X: y"}
    rows = [fine, failed]
    groups = module("matmul_suite").summary(rows, suite.BARS, bench.FIGURES)
    device = tmp_path / "some_gpu"
    device.mkdir()
    result = {"environment": WHERE, "rows": rows, "groups": groups}
    (device / "attention_masks.json").write_text(json.dumps(result))
    memory = {"side": "ours", "passes": "both", "length": 9, "argument_bytes": 2e6}
    result = {"environment": WHERE, "rows": [memory]}
    (device / "attention_memory.json").write_text(json.dumps(result))
    tables = module("attention_tables")
    assert (
        "| 1x8x8 | both | 10.0 | 123 | 17.50 | - | documents as a batch 0.75 | 0.98 | "
        "ours |" in tables.rows(tmp_path)
    )
    assert "| 2x8x8 | both | failed |" in tables.rows(tmp_path)
    bars = tables.bars(tmp_path)
    assert (
        "| documents of 512 | cuDNN / ours, lowest | >= 16.00 | 17.500 | yes |" in bars
    )
    assert "| window | cuDNN / ours, lowest | >= 1.20 | - | no |" in bars
    assert "| ours, both | 9 | 2.0 | - | - | - | - |" in tables.memory(tmp_path)
    (tmp_path / "none").mkdir()
    assert tables.rows(tmp_path / "none") == tables.bars(tmp_path / "none") == "\n"


PROFILE = """
==PROF== Connected
  attention_rows_bf16_d64 (4, 1, 1)x(128, 1, 1), Context 1
    SM: Pipe Tensor Cycles Active                       %        76.67
    DRAM Throughput                   %        30.13
    Registers Per Thread             register/thread             1,168
    Stall Wait                      inst         2.15
    Selected                        inst         1.00
    Stall Long Scoreboard           inst         2.84
  attention_rows_bf16_d64 (4, 1, 1)x(128, 1, 1), Context 1
    DRAM Throughput                   %        99.13
  attention_sm90_x (4, 1, 1)x(128, 1, 1), Context 1
    DRAM Throughput                   %        50.00
"""


def test_profiles_are_read_and_shown(module, tmp_path):
    profile = module("profile_attention")
    rows = profile.rows_of(PROFILE)
    assert [r["kernel"] for r in rows] == [
        "attention_rows_bf16_d64",
        "attention_sm90_x",
    ]
    first = rows[0]
    assert (first["tensor"], first["dram"], first["registers"]) == (76.67, 30.13, 1168)
    assert list(first["stalls"].items()) == [("Long Scoreboard", 2.84), ("Wait", 2.15)]
    assert "Long Scoreboard 2.8" in profile.render(rows)
    assert len({(c.group, c.text) for c in profile.cases()}) == 5
    (tmp_path / "gpu").mkdir()
    result = json.dumps({"environment": WHERE, "rows": rows})
    (tmp_path / "gpu" / "attention_profile.json").write_text(result)
    line = "| attention_rows_bf16_d64 | 77 | - | - | - | - | - | 30 | - | 1168 |"
    assert line in module("attention_tables").profile(tmp_path)


def test_memory_of_attention_that_is_planned_only(module, monkeypatch):
    memory, suite = module("attention_memory"), module("attention_suite")
    monkeypatch.setattr(memory, "LENGTHS", (32,))
    monkeypatch.setattr(memory, "XLA_PLANNED", 32)
    monkeypatch.setattr(suite, "OURS", "xla")
    rows = memory.rows()
    own = [row["planned_bytes"] for row in rows if row["side"] == "ours"]
    assert own == sorted(own) and all(own)
    assert len(rows) == 4 and all("run" not in r for r in rows)
    assert memory.render(rows).count("xla, both") == 1


# --- running --------------------------------------------------------------------------


def arguments(directory, **fields):
    known = {"out": directory, "commit": "abc", "only": None, "resume": False}
    return argparse.Namespace(**{**known, **fields})


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


# --- what ships -----------------------------------------------------------------------


def test_every_layer_gets_some_rows_before_any_gets_more(module):
    layers = module("model_layers")
    order = layers.order()
    assert len(set(order)) == len(order)
    bodies = [layer for layer in layers.LAYERS if not layer.is_head]
    shapes = {(layer.n, layer.k) for layer in bodies}
    first = order[: len(shapes)]
    assert {(p.n, p.k) for p in first} == shapes
    assert {p.m for p in first} == {layers.ROWS[0]}
    for layer in layers.LAYERS:
        for m in layer.rows:
            assert layer.plain(m) in order
            assert layer.asked(m) is None or layer.asked(m) in order


def test_attention_of_models_is_tuned_in_rounds(module):
    models = module("model_attention")
    order = models.order()
    assert len(set(order)) == len(order)
    backward = [p for p in order if p.direction == "backward"]
    first = backward[: len(models.MODELS)]
    heads = {(p.heads, p.head_dim) for p in first}
    assert heads == {(m.heads, m.head_dim) for m in models.MODELS}
    few = [p for p in order if p.q_len == 1]
    assert all(p.kv_lengths and not p.is_causal for p in few)
    assert {(p.batch, p.kv_len) for p in few} == set(models.DECODED)
    assert {(p.head_dim, p.columns) for p in order} >= {(192, 128), (256, 256)}


def test_layers_are_those_of_the_models(module):
    layers = module("model_layers")
    known = {layer.name: (layer.n, layer.k) for layer in layers.LAYERS}
    assert known["Llama 3 8B qkv"] == (6144, 4096)
    assert known["Llama 3 70B qkv"] == (10240, 8192)
    assert known["Qwen2.5 7B qkv"] == (4608, 3584)
    assert known["GPT-2 qkv"] == (2304, 768)
    assert known["ViT-L fc1"] == (4096, 1024)
    assert set(layers.ROWS) == {1, *(2**i for i in range(3, 15))}


def tuned(problem, config, count):
    """An entry of this machine: a race of some configs of ours and XLA."""
    raced = {"protocol": "race", "spread": 0.0123, "prepare_s": 0.4}
    ours = [
        Observation(
            **named(problem, choice(8 * (i + 1)), local_cpu()),
            time_us=10.123456789 + i,
            repeats=5,
            extra=raced if i < count else {"protocol": "steady"},
        )
        for i in range(count + 3)
    ]
    xla = Observation(variant="xla", config={}, time_us=99.0, repeats=5, extra=raced)
    best = Best(
        **named(problem, config, local_cpu()),
        time_us=10.123456789,
        xla_us=99.0,
    )
    made = entry(problem=problem, observations=(*ours, xla))
    return dataclasses.replace(made, best=best, environment=environment(local_cpu()))


def test_tuning_goes_on_where_an_earlier_run_ended(module, cache_dir, tmp_path):
    layers = module("tune_layers")
    device, done = local_cpu(), GemmProblem(m=96, n=80, k=64)
    other = dataclasses.replace(done, lhs="bfloat16", rhs="bfloat16")
    assert layers.left([done, other], device) == [done, other]
    Knowledge(cache_dir).own.record(tuned(done, choice(8), 10))
    knowledge.refresh(current())
    assert layers.left([done, other], device) == [other]

    out = tmp_path / "out"
    assert layers.export(out, device) == layers.export(out, device) == 1
    (file,) = out.glob("*/matmul/*.json")
    files = {p for p in out.rglob("*") if p.is_file()}
    assert files == {file, file.parent.parent / "environment.json"}
    assert len(file.read_bytes()) < 4096
    # The files ship: they are read as the package's own.
    answer = Knowledge(None, shipped=(out,)).lookup(done, device)
    assert answer is not None and answer.origin == "shipped"
    assert answer.choice == choice(8)

    for path in sorted(Store(cache_dir / "tuned").directory.rglob("*.json")):
        path.unlink()
    knowledge.refresh(current())
    assert layers.left([done], device) == [done]
    assert layers.take([out]) == 1
    assert layers.left([done], device) == []


def test_answers_that_ship_keep_what_raced_and_little_else(module):
    layers = module("tune_layers")
    slim = layers.slim(tuned(GemmProblem(m=96, n=80, k=64), choice(8), 10))
    assert len(slim.observations) == layers.KEPT + 1
    assert {o.variant for o in slim.observations} == {"gemm_cpu", "xla"}
    assert all(o.extra == {"protocol": "race"} for o in slim.observations)
    ours = [o.time_us for o in slim.observations if o.variant != "xla"]
    assert min(ours) == slim.best.time_us == 10.123
    assert max(ours) == pytest.approx(10.123 + layers.KEPT - 1)
    assert layers.slim(slim) == slim


def test_tuning_is_begun_again_until_the_time_is_over(module, monkeypatch, tmp_path):
    layers = module("tune_layers")
    now, asked = [0.0], []

    def tune_together(problems, *, budget_s, **_):
        asked.append((len(problems), budget_s))
        now[0] += budget_s
        return {problems[0]: "budget"}

    monkeypatch.setattr(layers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(layers.common, "tune_together", tune_together)
    problems = [GemmProblem(m=m, n=8, k=8) for m in range(1, 100)]
    how = {"effort": "none", "goal": "throughput", "each_s": 1.0, "budget_s": 40.0}
    texts = list(layers.tune_all(problems, argparse.Namespace(out=tmp_path, **how)))
    assert asked == [(16, 16.0), (16, 16.0), (16, 8.0)]
    assert sum("not matmul" in text for text in texts) == 3
    asked.clear()
    how["budget_s"] = 990.0  # enough: each gets its share of what is left
    list(layers.tune_all(problems, argparse.Namespace(out=tmp_path, **how)))
    assert asked == [*[(16, 160.0)] * 6, (3, 30.0)]


def test_who_missed_an_answer_has_another_turn_in_what_is_left(
    module, monkeypatch, tmp_path
):
    layers = module("tune_layers")
    now, asked, stubborn = [0.0], [], {3, 4}

    def tune_together(problems, *, budget_s, **_):
        """Takes a quarter of its time; some need two turns, one never has enough."""
        asked.append([p.m for p in problems])
        now[0] += budget_s / 4
        failed = {p: "budget" for p in problems if p.m in stubborn | {5}}
        stubborn.clear()
        return failed

    monkeypatch.setattr(layers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(layers.common, "tune_together", tune_together)
    problems = [GemmProblem(m=m, n=8, k=8) for m in range(1, 9)]
    how = {"effort": "none", "goal": "throughput", "each_s": 1.0, "budget_s": 100.0}
    list(layers.tune_all(problems, argparse.Namespace(out=tmp_path, **how)))
    # Where a turn brings nothing, another one would not either.
    assert asked == [list(range(1, 9)), [3, 4, 5], [5]]


@pytest.mark.parametrize(
    ("kc", "time_us"),
    [(8, 10.0), (24, 12.0), (7, 10.0)],
    ids=["best", "another", "never raced"],
)
def test_what_an_interpolated_choice_took(module, kc, time_us):
    made = tuned(GemmProblem(m=96, n=80, k=64), choice(8), 10)
    chosen = Answer(
        choice=choice(kc), origin="interpolated", time_us=1.0, xla_us=1.0, ratio=1.0
    )
    found = module("bench_interpolation").ratio
    times = timed(made.best, made.observations)
    assert found(chosen, times) == pytest.approx(99 / time_us, rel=0.02)
    other = dataclasses.replace(choice(kc), variant="gemm_sm90")
    assert found(dataclasses.replace(chosen, choice=other), times) is None
