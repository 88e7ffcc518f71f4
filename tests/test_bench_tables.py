"""The benchmarks' tables, of rows and of their absence."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from bench_rows import FAILED, WHERE, row

from tracea_jax.device import local_cpu
from tracea_jax.ops.conv2d import workload
from tracea_jax.problem import GemmProblem

pytestmark = pytest.mark.once


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


def test_tables_of_convolutions(module, tmp_path):
    suite, bench = module("conv2d_suite"), module("bench_conv2d")
    stem = next(c for c in suite.suite() if c.group == "stem").problem
    head = {"group": "stem", "text": str(stem)}
    timed = {"times_us": {"xla": 60.0}, "best": "conv2d_stem_sm90", "own_us": 10.0}
    rows = [
        {**head, **timed, "ratio_own": 6.0, "ratio_default": 0.97},
        {**head, "error": "ValueError: no memory"},
    ]
    assert bench.cells(rows[1])[1] == "ValueError: no memory"
    device = tmp_path / "some_gpu"
    device.mkdir()
    groups = module("matmul_suite").summary(rows, suite.BARS, suite.FIGURES)
    result = {"environment": WHERE, "rows": rows, "groups": groups}
    (device / "conv2d.json").write_text(json.dumps(result))
    tables = module("tables")
    text = tables.conv2d(tmp_path)
    assert (
        "pad 3,3x3,3 bias+relu | conv2d_stem_sm90 | 10.0 | 60.0 | 6.00 | 0.97 |" in text
    )
    assert "bias+relu | failed | - | - | - | - |" in text
    text = tables.conv2d_bars(tmp_path)
    assert "| stem | XLA / ours, lowest | >= 5.00 | 6.000 | no |" in text  # one failed
    assert "| stem | XLA / default, lowest | >= 0.98 | 0.970 | no |" in text
    text = tables.kinds(tmp_path)
    assert "| conv2d, stem | XLA | 1 | 0.97 | 0.97 |" in text


def test_the_headline_has_a_row_for_each_op_of_each_kind_of_machine(module, tmp_path):
    tables = module("tables")

    def ran(device, name, rows):
        (tmp_path / device).mkdir(exist_ok=True)
        result = {"environment": WHERE, "rows": rows}
        (tmp_path / device / f"{name}.json").write_text(json.dumps(result))

    product = {"problem": {"op": "matmul", "lhs": "float32"}}
    ran("one_cpu", "cpu", [{**product, "ratio": 4.0}, {**product, "error": "no"}])
    ran("other_cpu", "cpu", [{**product, "ratio": 0.5}])
    image = {"group": "3x3", "ratio_default": 1.5}
    ran("nvidia_h100_pcie", "conv2d", [image])
    ran("nvidia_h100_pcie", "conv2d_earlier", [image | {"group": "1x1"}])
    heads = {"group": "forward", "us": {"cudnn": 3.0, "default": 2.0}}
    ran("nvidia_h200", "attention_forward", [heads, {**heads, "us": {"cudnn": 1.0}}])
    assert tables.headline(tmp_path).splitlines() == [
        "| machine | ops | compared with | cases | geometric mean | lowest |",
        "|---|---|---|---:|---:|---:|",
        "| NVIDIA H100 | convolution | XLA | 2 | 1.50 | 1.50 |",
        "| NVIDIA H200 | attention | cuDNN | 1 | 1.50 | 1.50 |",
        "| CPU | matmul | XLA | 2 | 1.41 | 0.50 |",
    ]
    on_h200 = tables.kinds(tables.Selected(tmp_path, "h200"))
    assert "| attention, forward | cuDNN | 1 | 1.50 | 1.50 |" in on_h200
    assert "conv2d" not in on_h200 and "matmul" not in on_h200


def test_the_headline_is_short():
    text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    _, _, after = text.partition("<!-- table: headline -->")
    table, _, _ = after.partition("<!-- end -->")
    assert 6 <= len(table.strip().splitlines()) - 2 <= 8


def test_errors_of_convolutions_are_told_by_their_bound_and_by_those_of_xla(module):
    suite, bench = module("conv2d_suite"), module("bench_conv2d")
    float32 = dict.fromkeys(("lhs", "rhs", "out"), "float32")
    problem = dataclasses.replace(suite.conv(1, 5, 4), **float32)
    inputs = workload.operands(problem, seed=1)
    by_xla = next(bench.choices(problem))
    (right,) = workload.execute(*inputs, problem=problem, choice=by_xla)
    off = {amount: [right + amount] for amount in (1e-4, 2e-4)}
    found = bench.errors(problem, inputs, {"xla": off[1e-4], "default": off[2e-4]})
    assert found["error_by_xla"] == pytest.approx(2.0, rel=0.02)
    judge = workload.judge(problem, local_cpu(), inputs, 0)
    assert found["error_of_bound"] == judge(off[2e-4]) > judge([right])


def test_every_group_of_convolutions_has_bars(module):
    suite = module("conv2d_suite")
    assert {c.group for c in suite.suite()} == set(suite.BARS)
    for case in suite.suite():
        workload.check(case.problem)
        asks = {case.problem.lhs, case.problem.out}
        assert asks == {"float32" if "float32" in case.group else "bfloat16"}


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


def test_tables_of_what_models_decide(module, tmp_path):
    def summary(geomean: float, under: float) -> dict[str, object]:
        return {"problems": 25, "geomean": geomean, "under": [under, 0.0]}

    of = {
        "model": summary(1.5, 0.0),
        "today": summary(1.25, 0.04),
        "oracle": summary(2, 0),
    }
    unknown = {"model": summary(1.0, 0.0), "oracle": summary(1.0, 0.0)}
    ops = {
        "conv2d": {"all": of, "decided": ["a"], "kinds": {"a": of, "b": unknown}},
    }
    result = {"device": "some GPU", "versions": {"jax": "1"}, "ops": ops}
    (tmp_path / "some_gpu").mkdir()
    (tmp_path / "some_gpu" / "survey.json").write_text(json.dumps(result))
    text = module("survey_tables").regret(tmp_path)
    assert "\nsome GPU, jax 1:\n" in text
    figures = "1.50 | 0.0% | 0.0% | 1.25 | 4.0% | 2.00 |"
    assert f"| **conv2d, all** | 25 | as installed | {figures}" in text
    assert f"| a | 25 | model | {figures}" in text
    assert "| b | 25 | rules | 1.00 | 0.0% | 0.0% | - | - | 1.00 |" in text
