"""Op records: an op that only the tests know has all that a built-in one has."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import normal
from processes import run_forked
from scaled_matmul import (
    EARLY,
    SCALED_MATMUL,
    EarlyConfig,
    ScaledMatmulProblem,
    reference,
    scaled_matmul,
)

import tracea_jax as tracea
from tracea_jax import catalogue, cli, knowledge, roofline, variants
from tracea_jax.device import local_cpu
from tracea_jax.dispatch import Unsupported, plan
from tracea_jax.options import current
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem, problem_from_json

pytestmark = pytest.mark.once

CPU = local_cpu()
PROBLEM = ScaledMatmulProblem(m=64, n=64, k=16)
BUILT_IN = (
    "matmul",
    "gated_matmul",
    "conv2d",
    "attention",
    "paged_attention",
    "elementwise",
)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with catalogue.using(SCALED_MATMUL):
        yield
    assert catalogue.names() == BUILT_IN


def run(capsys, command: str) -> tuple[int, str, str]:
    status = cli.main(command.split())
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def program(s, x, w):
    return jnp.tanh(s * (x @ w)) @ w.T


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.float32(1.5), normal(64, 16), normal(16, 64)


def ops_of(fn, *args, **how) -> dict[str, int]:
    return tracea.explain(fn, **how)(*args).ops


# --- the catalogue --------------------------------------------------------------------


def test_an_op_is_known_while_it_is_registered():
    assert catalogue.names() == (*BUILT_IN, "scaled_matmul")
    assert catalogue.get("scaled_matmul") is SCALED_MATMUL
    assert str(SCALED_MATMUL) == "scaled_matmul: s * (x @ w); variants early, xla"
    with pytest.raises(ValueError, match="op 'scaled' must be one of matmul, "):
        catalogue.get("scaled")


def test_a_name_stands_for_one_op():
    catalogue.register(SCALED_MATMUL)  # once more is no harm
    with pytest.raises(ValueError, match="'scaled_matmul' already"):
        catalogue.register(dataclasses.replace(SCALED_MATMUL, variants=()))
    with pytest.raises(ValueError, match="must be 'scaled', the name of the op"):
        dataclasses.replace(SCALED_MATMUL, name="scaled")


def test_a_record_that_takes_the_place_of_another_gives_it_back():
    with catalogue.using(dataclasses.replace(SCALED_MATMUL, variants=(variants.XLA,))):
        assert variants.of("scaled_matmul") == (variants.XLA,)
    assert variants.of("scaled_matmul") == (EARLY, variants.XLA)


@pytest.mark.parametrize("name", [*BUILT_IN, "scaled_matmul"])
def test_examples_are_problems_that_can_be_kept(name):
    op = catalogue.get(name)
    for dtype in ("float32", "bfloat16"):
        for problem in op.problem.examples(dtype).values():
            assert isinstance(problem, op.problem) and isinstance(problem, Problem)
            assert problem_from_json(json.loads(json.dumps(problem.to_json()))) == (
                problem
            )
            assert dtype in problem.operand_dtypes and dtype in str(problem)
            assert all(getattr(problem, extent) > 0 for extent in problem.extents)
            assert problem.flops > 0 and problem.bytes > 0


@pytest.mark.parametrize("name", [*BUILT_IN, "scaled_matmul"])
def test_the_reference_passes_what_its_own_bench_demands(name):
    op = catalogue.get(name)
    (example, *_) = op.problem.examples("float32").values()
    small: Any = op.bench(example, CPU)
    problem = small.workload.ragged(example)
    xla = Choice(variant="xla", config=variants.XLA.config_type())
    verified = op.bench(problem, CPU).verify(xla)
    assert verified.max_rel_error <= 1.0, verified.message


# --- the op ---------------------------------------------------------------------------


@pytest.mark.parametrize("operand", ["x", "w"])
def test_it_computes_what_its_reference_does(operand):
    f = functools.partial(
        scaled_matmul, implementation="early", config={"operand": operand}
    )
    s, x, w = operands()
    np.testing.assert_allclose(jax.jit(f)(s, x, w), s * (x @ w), rtol=1e-5, atol=1e-5)
    (multiplied,) = (
        line
        for line in jax.jit(f).lower(s, x, w).as_text().splitlines()
        if "stablehlo.multiply" in line
    )
    assert {"x": "tensor<64x16xf32>", "w": "tensor<16x64xf32>"}[operand] in multiplied


def test_it_has_derivatives_and_is_mapped():
    s, x, w = operands()
    of = functools.partial(jax.grad, argnums=(0, 1, 2))
    ours = of(lambda *a: jnp.sum(jnp.sin(scaled_matmul(*a))))(s, x, w)
    theirs = of(lambda *a: jnp.sum(jnp.sin(reference(*a)[0])))(s, x, w)
    for mine, his in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, his, rtol=1e-4, atol=1e-4)
    many = jax.vmap(scaled_matmul, in_axes=(0, None, None))(jnp.arange(3.0), x, w)
    np.testing.assert_allclose(many[2], 2 * (x @ w), rtol=1e-5, atol=1e-5)


def test_its_variants_are_the_implementations():
    found = plan(PROBLEM, CPU, implementation="early")
    assert (found.variant, found.config) == ("early", EarlyConfig(operand="x"))
    narrow = dataclasses.replace(PROBLEM, dtype="bfloat16")
    with pytest.raises(Unsupported, match="dtype bfloat16; it takes float32"):
        plan(narrow, CPU, implementation="tracea")
    with pytest.raises(ValueError, match="one of tracea, early, xla"):
        scaled_matmul(*operands(), implementation="gemm_cpu")
    with tracea.options(implementation="early"):
        assert plan(PROBLEM, CPU).variant == "early"


def test_doctor_shows_its_variants():
    text = str(tracea.doctor())
    assert f"scaled_matmul on {CPU.name}\n  early: runs float32; operands of" in text


def test_explain_knows_its_calls():
    found = tracea.explain(scaled_matmul)(*operands())
    (site,) = found.sites
    assert site.problem == PROBLEM and site.op == "scaled_matmul"
    assert site.variant == "early" and site.plan and site.plan.origin == "policy"
    assert "scaled_matmul 64x64x16 float32" in str(found)
    assert found.to_json()["sites"][0]["problem"] == PROBLEM.to_json()


def test_the_bound_of_its_time_is_known():
    wide = roofline.floor_us(PROBLEM, CPU)
    narrow = roofline.floor_us(dataclasses.replace(PROBLEM, dtype="bfloat16"), CPU)
    assert wide and narrow and narrow <= wide


# --- transform ------------------------------------------------------------------------


def test_transform_finds_it_before_the_product_inside():
    args = operands()
    assert ops_of(program, *args) == {"scaled_matmul": 1, "matmul": 1}
    assert ops_of(program, *args, ops="scaled_matmul") == {"scaled_matmul": 1}
    assert ops_of(program, *args, ops="matmul") == {"matmul": 2}
    assert ops_of(program, *args, after_grad=True) == {"matmul": 2}
    fast = tracea.transform(program)
    np.testing.assert_allclose(fast(*args), program(*args), rtol=1e-4, atol=1e-4)
    assert "tracea_scaled_matmul" in str(jax.make_jaxpr(fast)(*args))
    grads = [
        jax.grad(lambda *a, f=f: f(*a).sum(), (0, 1))(*args) for f in (fast, program)
    ]
    for ours, theirs in zip(*grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_what_its_rule_refuses_is_said():
    turned = functools.partial(jnp.einsum, "km,kn->mn")
    found = tracea.explain(lambda s, x, w: s * turned(x, w))(
        jnp.float32(2), normal(16, 64), normal(16, 64)
    )
    (miss,) = [m for m in found.misses if m.op == "scaled_matmul"]
    assert "no matrices" in miss.reason and found.ops == {"matmul": 1}


def test_the_names_of_ops_to_transform_include_it():
    with pytest.raises(ValueError, match="must be some of scaled_matmul, attention, "):
        tracea.transform(program, ops="scaled")


# --- graph, tune and cache ------------------------------------------------------------


def test_a_graph_takes_it_from_values_and_from_functions():
    graph = tracea.Graph()
    graph.add_scaled_matmul(64, 64, 16, count=3)
    assert str(graph) == "1 problem, 3 runs\n  3 x scaled_matmul 64x64x16 float32"
    assert graph == tracea.Graph([PROBLEM] * 3) and "add_scaled_matmul" in dir(graph)
    found = tracea.Graph.from_function(program, *operands(), ops="scaled_matmul")
    assert list(found) == list(tracea.Graph([PROBLEM]))
    with pytest.raises(ValueError, match="k=0 must be an integer of at least 1"):
        graph.add_scaled_matmul(64, 64, 0)
    with pytest.raises(AttributeError, match="no attribute 'add_scaled'"):
        graph.add_scaled(64, 64, 16)


def test_what_is_tuned_is_what_runs():
    graph = tracea.Graph([PROBLEM])
    report = tracea.tune(graph, effort="quick")
    assert "scaled_matmul 64x64x16 float32: " in str(report)
    (entry,) = report.entries.values()
    tried = {(o.variant, o.config.get("operand")) for o in entry.observations}
    assert {("early", "x"), ("early", "w")} <= tried
    found = plan(PROBLEM, CPU)
    assert (found.origin, found.variant) == ("tuned", entry.best.variant)
    assert (found.time_us, found.xla_us) == entry.best.decisive
    (near,) = knowledge.known(current()).neighbours(
        dataclasses.replace(PROBLEM, m=128), CPU
    )
    assert near.problem == PROBLEM and near.distance == 1.0


def test_the_command_tunes_it_and_the_cache_keeps_it(capsys, tmp_path, monkeypatch):
    command = "tune scaled_matmul 64 64 16 --effort quick"
    status, out, _ = run(capsys, command)
    assert status == 0 and out.startswith("scaled_matmul 64x64x16 float32: ")
    line = "scaled_matmul 64x64x16 float32: "
    assert line in run(capsys, "cache list")[1]
    assert "early [operand w]" in run(capsys, "cache show scaled")[1]
    exported = tmp_path / "exported.json"
    assert run(capsys, f"cache export {exported} --op scaled_matmul")[0] == 0
    assert run(capsys, "cache verify --run")[0] == 0
    monkeypatch.setenv("TRACEA_CACHE_DIR", str(tmp_path / "other"))
    assert run(capsys, "cache list")[1] == ""
    assert run(capsys, f"cache merge {exported}")[0] == 0
    assert line in run(capsys, "cache list")[1]
    assert plan(PROBLEM, CPU).origin == "tuned"


def test_a_cache_with_it_is_listed_by_whoever_does_not_know_it(capsys):
    tracea.tune(tracea.Graph([PROBLEM]), effort="none", budget_s=1)
    script = "from tracea_jax import cli; raise SystemExit(cli.main(['cache', 'list']))"
    listed = run_forked(script)
    assert '"op": "scaled_matmul"' in listed and "(unknown variant)" in listed


def test_files_of_problems_have_it(capsys, tmp_path):
    path = tmp_path / "problems.txt"
    path.write_text(f"scaled_matmul 8 8 8 --count 2\n{json.dumps(PROBLEM.to_json())}\n")
    status, out, _ = run(capsys, f"tune --file {path} --effort none --budget-s 2")
    assert status == 0 and "scaled_matmul 8x8x8 float32" in out
    assert "scaled_matmul 64x64x16 float32" in out


def test_a_program_adds_it_before_it_asks_for_anything():
    listed = run_forked(
        """
        import sys
        sys.path.append(sys.argv[1])
        from scaled_matmul import SCALED_MATMUL
        from tracea_jax import catalogue, cli
        catalogue.register(SCALED_MATMUL)
        print(*catalogue.names())
        cli.main("tune scaled_matmul 8 8 8 --effort none --budget-s 1".split())
        """,
        os.path.dirname(__file__),
    )
    first, second, *_ = listed.splitlines()
    assert first.split() == [*BUILT_IN, "scaled_matmul"]
    assert second.startswith("scaled_matmul 8x8x8 float32: ")
