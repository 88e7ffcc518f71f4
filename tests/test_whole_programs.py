"""The benchmark of whole programs: that each runs, and that its figures tell the truth.

Times are not looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

import tracea_jax as tracea

pytestmark = pytest.mark.once

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
NAMES = (
    "gpt2_step",
    "vit_step",
    "convnext_step",
    "efficientnet_inference",
    "efficientnet_step",
    "llama_block_step",
    "llama_decode donated",
    "llama_decode kept",
    "resnet50_inference",
    "resnet50_step",
    "unet_block",
    "unet_block_step",
)
LARGER = ("unet_block_640", "unet_block_640_step")  # sizes of one of these


def arguments(**fields):
    known = {"effort": "none", "rounds": 1, "inside": False, "no_errors": False}
    return argparse.Namespace(**{**known, **fields})


def named(module, sizes="small"):
    return {p.name: p for p in module("whole_programs").programs(sizes)}


def toy(module, step, *inputs, **fields):
    """A program of one step."""
    return module("whole_programs").Program(
        name="toy",
        text="small",
        step=lambda dtype, wrap: wrap(step),
        inputs=lambda: inputs,
        dtype="float32",
        **fields,
    )


def test_all_programs_have_full_sizes_and_small_ones(module):
    full, small = named(module, "full"), named(module)
    assert tuple(small) == NAMES
    assert tuple(full) == (*NAMES, *LARGER)
    assert all(program.bars for program in full.values())
    on_cpu = list(module("whole_programs").programs("cpu"))
    assert [(p.name, p.dtype) for p in on_cpu] == [
        ("gpt2_step", "float32"),
        ("gpt2_step", "bfloat16"),
        ("vit_step", "float32"),
        ("vit_step", "bfloat16"),
    ]


# The others are the same to XLA and to us: they differ in what is donated, or are the
# forward passes of steps.
SAME = ("llama_decode kept", "unet_block", "efficientnet_inference")
DISTINCT = [n for n in NAMES if n not in SAME]


# The others are slow tests: their layers are in this one, or in the models of test_zoo.
RUN = ("llama_decode donated",)


each = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in RUN)) for n in DISTINCT],
)


def short_bench(module, monkeypatch):
    """The benchmark, whose figures mean nothing here: it measures for milliseconds."""
    bench = module("bench_programs")
    how = {"slice_s": 1e-3, "settle_s": 0.01, "race_s": 0.01}
    short = functools.partial(bench.measure.Timing, **how)
    monkeypatch.setattr(bench.measure, "Timing", short)
    return bench


@each
def test_results_are_as_good_as_those_of_plain_jax(module, name, monkeypatch):
    bench, program = short_bench(module, monkeypatch), named(module)[name]
    if name not in RUN:  # what is transformed inside is compiled for its times only
        steps = functools.partial(bench._steps, with_inside=False)
        monkeypatch.setattr(bench, "_steps", lambda program, _: steps(program))
    row = bench.row_of(program, arguments())
    assert "failed" not in row
    assert row["error_by_plain"] < 4 and row["sites"]
    assert row["misses"] <= 1  # the loss, whose logits are few at these sizes
    # What is compared must be there: else all errors would be those of nothing.
    assert 0 < row["errors"]["plain"] < 0.3
    json.dumps(row)


@each
def test_full_sizes_are_found_as_well_as_in_the_model(module, name):
    # Traced only, for a GPU that need not be there.
    program = named(module, "full")[name]
    inputs = jax.eval_shape(program.inputs)
    step = program.step(program.dtype, lambda function: function)
    inside = program.step(program.dtype, tracea.transform)
    found = tracea.explain(step, device="H200")(*inputs)
    assert found.ops == tracea.explain(inside, device="H200")(*inputs).ops
    assert found.sites
    # Images have few classes, so their logits are computed at once.
    assert {miss.op for miss in found.misses} <= {"linear_cross_entropy"}


def test_a_program_that_fails_is_a_row_and_the_others_go_on(
    module, monkeypatch, tmp_path, capsys
):
    bench = short_bench(module, monkeypatch)

    def broken(x):
        raise ValueError("no\nmore")

    x = jnp.ones((8, 8))
    good = toy(module, lambda x: x @ x, x, differentiates=False)
    bad = dataclasses.replace(
        toy(module, broken, x, differentiates=False), name="broken"
    )
    monkeypatch.setattr(bench, "programs", lambda sizes: iter([bad, good]))
    where = ["--out", str(tmp_path), "--commit", "abc", "--effort", "none"]
    assert bench.main([*where, "--rounds", "1"]) == 1
    (path,) = tmp_path.glob("*/programs.json")
    failed, measured = json.loads(path.read_text())["rows"]
    assert failed["failed"] == "ValueError: no\nmore" and measured["ratio"] > 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("broken") and "ValueError" in line for line in printed)
    text = module("tables").programs(tmp_path)
    assert "| broken, small | none | failed |" in text and "| toy, small | " in text
    assert bench.main([*where, "--rounds", "1", "--only", "to"]) == 0
    (path,) = tmp_path.glob("*/programs_to.json")
    assert [r["name"] for r in json.loads(path.read_text())["rows"]] == ["toy"]


def test_donated_arguments_are_carried_on(module):
    bench = module("bench_programs")

    def step(count, x):
        return count + 1, count * x

    for donated in (True, False):
        inputs = (jnp.zeros(4), jnp.ones(4))
        program = toy(module, step, *inputs, carried=1, donated=donated)
        side = bench._side(program, step, inputs)
        chained = bench.Chained(side.function, 1, bench._own(program, inputs))
        first = chained.inputs[0]
        for count in range(3):
            assert (chained()[1] == count).all()
        # The caller's own arguments must live on: the other sides need them.
        assert first.is_deleted() == donated and not inputs[0].is_deleted()


def test_memory_counts_a_donated_buffer_once(module):
    bench = module("bench_programs")
    x = jnp.ones(1000)

    def step(x):
        return (x + 1,)

    program = toy(module, step, x, carried=1)
    kept = bench._side(program, step, (x,))
    donated = bench._side(dataclasses.replace(program, donated=True), step, (x,))
    assert kept.bytes - donated.bytes == x.nbytes


def test_a_wrong_gradient_is_seen_behind_large_parameters(module):
    bench = module("bench_programs")

    def step(factor):
        def one(w, x):
            grad = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
            return w - 1e-3 * factor * grad, x.sum()

        return jax.jit(one)

    w, x = (jax.random.normal(jax.random.key(i), (8, 8)) for i in range(2))
    program = toy(module, step(1), w, x, carried=1)

    def errors(factor):
        sides = {"ours": step(factor), "plain": step(1)}
        sides = {
            name: bench.Side(function=f, compile_s=0.0, bytes=0)
            for name, f in sides.items()
        }
        return bench._errors(program, sides, (w, x))["error_by_plain"]

    assert errors(1) < 1 < errors(1.1)


def test_bars_are_limits_of_either_kind(module):
    programs = module("whole_programs")
    least = programs.Bar(figure="ratio", limit=2.0)
    most = programs.Bar(figure="memory_ratio", limit=0.6, is_upper=True)
    assert least.is_met({"ratio": 2.0}) and not least.is_met({"ratio": 1.9})
    assert most.is_met({"memory_ratio": 0.6}) and not most.is_met({"memory_ratio": 0.7})
    used = {
        b.figure for s in ("full", "cpu") for p in programs.programs(s) for b in p.bars
    }
    assert used == set(module("tables")._PROGRAM_FIGURES)
