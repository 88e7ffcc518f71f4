"""gated_matmul on an H100 or H200: its kernels against float64, and its derivatives."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import compiled_ahead
from gates import assert_gated, plain_gated
from numerics import ACTIVATIONS, exact, normal
from spaces import one_of_each

import tracea_jax as tracea
from tracea_jax.dispatch import plan
from tracea_jax.ops import gated_matmul
from tracea_jax.ops.gated_matmul import workload as gated_workload
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import GatedMatmulProblem
from tracea_jax.variants import get
from tracea_jax.variants.gated_sm90 import GATED_SM90

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

ROUNDINGS = {"gated_sm90": 1, "gated_fused": 2, "gated_unfused": 3}
NAMES = tuple(ROUNDINGS)


def arguments(m, n, k, dtype="bfloat16"):
    """x, w_gate, w_up; the products are of size one."""
    x, *weights = normal(m, k), normal(k, n), normal(k, n, seed=1)
    return [x.astype(dtype), *((w / math.sqrt(k)).astype(dtype) for w in weights)]


def kernels(f, *args) -> int:
    """How many of our kernels the compiled function launches."""
    text = jax.jit(f).lower(*args).compile().as_text()
    assert text is not None
    return text.count('"tracea_cuda_launch_v1"')


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 8, 8), (331, 520, 200), (1024, 2816, 1024)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values(dtype, shape, name):
    m, n, k = shape
    args = arguments(m, n, k, dtype)
    for activation in ACTIVATIONS:
        f = functools.partial(gated_matmul, activation=activation, implementation=name)
        assert_gated(jax.jit(f)(*args), *args, activation, roundings=ROUNDINGS[name])
    assert kernels(f, *args) == (1 if name == "gated_sm90" else 2)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_every_tile_and_cluster_of_the_one_kernel(layout, hopper):
    for save in (False, True):
        problem = GatedMatmulProblem(
            m=136, n=264, k=520, lhs="bfloat16", rhs="bfloat16", out="bfloat16",
            layout=layout, save_products=save,
        )  # fmt: skip
        fields = ("tile_m", "tile_n", "cluster_m", "cluster_n", "cluster_k")
        configs = one_of_each(GATED_SM90.space(problem, hopper), *fields)
        choices = [Choice(variant="gated_sm90", config=c) for c in configs]
        with compiled_ahead(problem, choices, hopper):
            for choice in choices:
                check_products(problem, choice)


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_consumers_that_take_turns(layout, hopper):
    problem = GatedMatmulProblem(
        m=1032, n=2312, k=200, lhs="bfloat16", rhs="bfloat16", out="bfloat16",
        layout=layout, save_products=layout == "tt",
    )  # fmt: skip
    configs = one_of_each(GATED_SM90.space(problem, hopper), "tile_n", "ping_pong")
    assert any(config.ping_pong for config in configs)
    for config in configs:
        check_products(problem, Choice(variant="gated_sm90", config=config))


def check_products(problem: GatedMatmulProblem, choice: Choice) -> None:
    """Runs one choice and compares all its results with float64."""
    stored = gated_workload.operands(problem, seed=1)
    run = functools.partial(gated_workload.execute, problem=problem, choice=choice)
    y, *saved = jax.jit(run)(*stored)
    sides = problem.layout + problem.layout[1]
    x, *weights = (
        np.asarray(a, np.float64).swapaxes(-1, -2) if side == "t" else a
        for a, side in zip(stored, sides, strict=True)
    )
    assert_gated(y, x, *weights, roundings=ROUNDINGS[choice.variant])
    for product, weight in zip(saved, weights, strict=False):
        exact(x, weight).assert_near(product)


@pytest.mark.parametrize("name", NAMES)
def test_a_wide_result_of_narrow_operands(name):
    args = arguments(200, 264, 136)
    y = gated_matmul(*args, preferred_element_type="float32", implementation=name)
    assert y.dtype == "float32"
    assert_gated(y, *args)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_batched_products_are_further_results(layout, name, hopper):
    problem = GatedMatmulProblem(
        batch=3,
        m=136,
        n=264,
        k=200,
        lhs="bfloat16",
        rhs="bfloat16",
        out="bfloat16",
        layout=layout,
        lhs_batched=True,
        save_products=True,
    )
    config = get("gated_matmul", name).heuristic(problem, hopper)
    check_products(problem, Choice(variant=name, config=config))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives(activation, name):
    args = arguments(264, 328, 136)

    def gradients(f, args):
        def loss(*args):
            return (f(*args).astype("float32") ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(*args)

    f = functools.partial(gated_matmul, activation=activation, implementation=name)
    found = jax.jit(functools.partial(gradients, f))(args)
    with jax.default_matmul_precision("highest"):
        wide = [a.astype("float32") for a in args]
        expected = gradients(functools.partial(plain_gated, activation), wide)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == "bfloat16"
        assert abs(x.astype("float32") - y).max() <= 3e-2 * abs(y).max()
    # The products forward and four for the gradients: all are ours.
    forward = 1 if name == "gated_sm90" else 2
    assert kernels(functools.partial(gradients, f), args) == 4 + forward


def test_vmap_and_scan():
    x, layers = normal(2, 64, 128) / 2, normal(4, 2, 128, 128) / math.sqrt(128)
    x, layers = x.astype("bfloat16"), layers.astype("bfloat16")

    def run(implementation, x, layers):
        def step(x, w):
            f = functools.partial(gated_matmul, implementation=implementation)
            return x + jax.vmap(f, (0, None, None))(x, *w), None

        return jax.lax.scan(step, x, layers)[0]

    found, expected = (
        jax.jit(functools.partial(run, name))(x, layers)
        for name in ("gated_sm90", "xla")
    )
    difference = abs(found - expected).astype("float32").max()
    assert difference <= 0.05 * abs(expected).astype("float32").max()


def test_what_the_one_kernel_cannot_take_is_left_to_others():
    args = arguments(64, 63, 64)
    problem = GatedMatmulProblem(
        m=64, n=63, k=64, lhs="bfloat16", rhs="bfloat16", out="bfloat16"
    )
    found = plan(problem, device_for("cuda"))
    assert found.variant == "xla" and "n=63 is not a multiple of 8" in str(found)
    assert_gated(gated_matmul(*args, implementation="tracea"), *args, roundings=3)
    plain = jax.jit(functools.partial(plain_gated, "silu"))
    expected = plain(*args).astype("float32")
    difference = abs(gated_matmul(*args).astype("float32") - expected)
    assert difference.max() <= 0.02 * abs(expected).max()
    with pytest.raises(tracea.Unsupported, match="n=63 is not a multiple of 8"):
        gated_matmul(*args, implementation="gated_sm90")


def test_tuning_finds_a_correct_answer():
    problem = GatedMatmulProblem(
        m=2048, n=4096, k=1024, lhs="bfloat16", rhs="bfloat16", out="bfloat16"
    )
    entry = tracea.tune(problem, effort="none", budget_s=20).entry
    # Who is faster is not tested: the GPU may be shared.
    assert entry.best.variant == "xla" or entry.verified["ok"]
    assert entry.best.xla_us
    failures = [o.failure for o in entry.observations]
    assert failures == [None] * 4, entry.observations
    found = plan(problem, device_for("cuda"))
    assert (found.origin, found.variant) == ("tuned", entry.best.variant)


def test_large_products_are_fused_unmeasured():
    args = arguments(2048, 4096, 1024)
    assert kernels(gated_matmul, *args) == 1
    y, plain = (
        jax.jit(f)(*args).astype(jnp.float32)
        for f in (gated_matmul, functools.partial(gated_matmul, implementation="xla"))
    )
    assert abs(y - plain).max() <= 2e-2 * abs(plain).max()
