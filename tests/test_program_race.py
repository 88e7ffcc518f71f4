"""The race of whole programs: what it finds is followed, and how it is told."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import pytest
from jaxprs import count
from numerics import normal
from processes import run_forked
from program_races import (
    ARGUMENTS,
    LOSING,
    WINNING,
    layers,
    raced,
    sites,
    step,
)
from transformed import assert_near

import tracea_jax as tracea
from tracea_jax.graph import Graph

pytestmark = pytest.mark.once

CONV = "conv2d 1x8x8x8 * 3x3x8 float32 nhwc pad 1,1x1,1"
HOPELESS = {**LOSING, ("conv2d",): 115.0}


def test_sites_that_hurt_are_left_from_then_on(monkeypatch):
    assert sites() == (1, 1)
    report = raced(monkeypatch, LOSING)
    assert report.whole.verdict.without == ("conv2d",)
    assert str(report).endswith(
        "whole program: 1.25x as fast as plain (80.0 us, plain 100.0 us, wall clock), "
        "without conv2d (with every site 125.0 us, 0.80x); those sites are left as "
        "written"
    )
    assert sites() == (1, 0)
    assert_near(tracea.transform(layers)(*ARGUMENTS), layers(*ARGUMENTS), 1e-5)


def test_a_training_step_leaves_them_in_its_gradient_too(monkeypatch):
    assert sites(step) == (2, 3)
    raced(monkeypatch, LOSING, step)
    assert sites(step) == (2, 0)
    assert sites(layers) == (1, 1)  # another program
    assert_near(tracea.transform(step)(*ARGUMENTS), step(*ARGUMENTS), 1e-5)


def test_another_process_follows(monkeypatch):
    raced(monkeypatch, LOSING, step)
    program = """
        import sys
        sys.path.append(sys.argv[1])
        import jax, tracea_jax as tracea
        from jaxprs import count
        from program_races import ARGUMENTS, step
        from tracea_jax.variants import cpu_calls
        cpu_calls.CALL_NS = 0.0  # as in these tests: kernels serve tiny sites
        for how in ({}, {"ops": ["conv2d"]}, {"ops": ["conv2d", "matmul"]}):
            fast = tracea.transform(step, **how)
            for name in ("tracea_matmul", "tracea_conv2d"):
                print(count(fast, *ARGUMENTS, name=name), end=" ")
        print(tracea.explain(step)(*ARGUMENTS))
    """
    out = run_forked(program, os.path.dirname(__file__))
    assert out.startswith("2 0 0 3 2 3 step on ")
    assert "whole program: 1.25x as fast as plain" in out


def test_what_was_traced_before_is_traced_again(monkeypatch):
    fast = jax.jit(tracea.transform(layers))

    def text():
        return str(fast.trace(*ARGUMENTS).jaxpr)

    assert "tracea_conv2d" in text()
    raced(monkeypatch, LOSING)
    assert "tracea_conv2d" not in text() and "tracea_matmul" in text()


@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        lambda f: jax.jit(lambda *args: jax.nn.relu(f(*args))),
        lambda f: lambda *args: jax.lax.scan(lambda c, _: (c, f(*args)), 0, length=2),
        lambda f: jax.checkpoint(f),
    ],
    ids=["jit", "a larger program", "scan", "checkpoint"],
)
def test_the_program_is_known_inside_of_others(monkeypatch, around):
    raced(monkeypatch, LOSING)
    fast = around(tracea.transform(layers))
    assert count(fast, *ARGUMENTS, name="tracea_conv2d") == 0
    assert count(fast, *ARGUMENTS, name="tracea_matmul") == 1


@pytest.mark.parametrize("wrap", [jax.jit, tracea.transform, lambda f: jax.jit(f)])
def test_jitted_and_transformed_functions_are_the_same_program(monkeypatch, wrap):
    wrapped = wrap(layers)
    raced(monkeypatch, LOSING, wrapped)
    assert sites() == sites(jax.jit(layers)) == (1, 0)
    assert tracea.explain(layers)(*ARGUMENTS).verdict is not None


def test_captured_arrays_count_by_shape_and_dtype(monkeypatch):
    x, w, k = ARGUMENTS
    raced(monkeypatch, LOSING, lambda x: layers(x, w, k), (x,))
    other = normal(16, 8, seed=7)
    assert sites(lambda x: layers(x, other, k), (x,)) == (1, 0)
    assert tracea.explain(lambda x: layers(x, other, k))(x).verdict is not None
    assert sites(lambda x: layers(x, w[:, :4], k[:, :, :4]), (x,)) == (1, 1)


def test_other_shapes_dtypes_and_programs_are_not_known(monkeypatch):
    raced(monkeypatch, LOSING)
    x, w, k = ARGUMENTS
    assert sites(args=(x, w[:, :4], k[:, :, :4])) == (1, 1)
    half = tuple(a.astype("bfloat16") for a in ARGUMENTS)
    assert sites(args=half) == (1, 1)
    assert sites(lambda *args: layers(*args) * 2) == (1, 1)


def test_what_is_asked_for_explicitly_is_used(monkeypatch):
    raced(monkeypatch, LOSING)
    assert sites(ops=["conv2d"]) == (0, 1)
    assert sites(ops=["conv2d", "matmul"]) == (1, 1)
    with tracea.options(implementation="tracea"):
        assert sites() == (1, 1)
    assert sites() == (1, 0)


def test_a_race_with_some_ops_is_about_these(monkeypatch):
    ops = ["matmul", "conv2d"]
    raced(monkeypatch, LOSING, ops=ops)
    assert sites(ops=ops) == (1, 0) and sites() == (1, 1)


def test_a_race_after_differentiation_is_about_that(monkeypatch):
    raced(monkeypatch, LOSING, step, after_grad=True)
    assert sites(step, after_grad=True) == (2, 0) and sites(step) == (2, 3)


def test_a_program_that_plain_beats_stays_as_it_is(monkeypatch):
    report = raced(monkeypatch, HOPELESS)
    assert str(report).endswith(
        "whole program: plain is fastest, 100.0 us wall clock (with every site "
        "125.0 us, 0.80x); the program is left as written"
    )
    assert report.whole.verdict.ratio == 1.0 and report.whole.verdict.leaves_all
    told = str(tracea.explain(layers)(*ARGUMENTS))
    assert "whole program: plain is fastest, 100.0 us wall clock; raced 20" in told
    fast = jax.make_jaxpr(tracea.transform(layers))(*ARGUMENTS)
    assert "tracea" not in str(fast)
    found, plain = jax.jit(tracea.transform(layers))(*ARGUMENTS), jax.jit(layers)
    assert jnp.array_equal(found, plain(*ARGUMENTS))


def test_one_class_of_sites_can_be_left(monkeypatch):
    def two(x, w, k, h):
        return layers(x, w, k), layers(x, w, h)[..., :1]

    x, w, k = ARGUMENTS
    args = (x, w, k, normal(5, 5, 8, 8, seed=3))
    large = CONV.replace("3x3x8", "5x5x8").replace("1,1x1,1", "2,2x2,2")
    product = "matmul 64x8x16 float32 nn relu"
    times = dict.fromkeys([(), ("conv2d",), ("matmul",), (CONV,), (product,)], 120.0)
    times |= {None: 100.0, (large,): 50.0}
    times |= {tuple(sorted((large, other))): 70.0 for other in (CONV, product)}
    report = raced(monkeypatch, times, two, args)
    assert report.whole.verdict.without == (large,)
    assert sites(two, args)[1] == 1
    explained = tracea.explain(two)(*args)
    assert [s.op for s in explained.sites].count("conv2d") == 1
    assert "the whole program was measured to be faster without" in str(explained)


def test_a_later_race_counts(monkeypatch):
    raced(monkeypatch, LOSING)
    assert len(Graph.from_function(layers, *ARGUMENTS)) == 2  # tuned again, both
    raced(monkeypatch, WINNING)
    assert sites() == (1, 1)


# --- what is told ---------------------------------------------------------------------


def test_explain_tells_the_figure(monkeypatch):
    assert "whole program" not in str(tracea.explain(layers)(*ARGUMENTS))
    raced(monkeypatch, WINNING)
    explained = tracea.explain(layers)(*ARGUMENTS)
    (line,) = [x for x in str(explained).splitlines() if x.startswith("whole program")]
    times = "(70.0 us, plain 100.0 us, wall clock)"
    start = f"whole program: 1.43x as fast as plain {times}, "
    assert line.startswith(f"{start}every site; raced 20")
    assert explained.verdict is not None
    assert line.endswith(str(explained.verdict.environment))
    data = json.loads(json.dumps(explained.to_json()))["verdict"]
    assert data["without"] == [] and data["time_us"] == pytest.approx(70.0)
    assert tracea.explain(layers, device="H200")(*ARGUMENTS).verdict is None


def test_the_report_is_plain_data_too(monkeypatch):
    data = json.loads(json.dumps(raced(monkeypatch, LOSING).to_json()))["whole"]
    assert data["verdict"]["without"] == ["conv2d"] and data["every"] == 0.8
    assert tracea.tune(Graph(), effort="none").to_json()["whole"] is None


def test_progress_is_told(monkeypatch):
    steps = []
    raced(monkeypatch, WINNING, progress=lambda **step: steps.append(step))
    assert {step["phase"] for step in steps} >= {"compile", "race"}
    assert all(step["problem"] == "whole program" for step in steps)
    *running, last = steps
    assert all(step["ratio"] is None and step["share"] < 1 for step in running)
    assert (last["phase"], last["share"]) == ("done", 1.0)
    assert (last["best_us"], last["xla_us"]) == pytest.approx((70.0, 100.0))
    assert last["ratio"] == pytest.approx(100 / 70)
