"""transform changes only roundings of random programs."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jaxprs import count
from numerics import f64, normal, shifted
from programs import SMOOTH, programs
from transformed import jit, kind

import tracea_jax as tracea

SLOW = pytest.mark.slow
OPS = st.sampled_from([None, None, ["matmul"]])
reproducible = hypothesis.settings(
    derandomize=True,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.filter_too_much,
        hypothesis.HealthCheck.large_base_example,
    ],
    phases=[hypothesis.Phase.generate],
)


def assert_judged_alike(program, found, expected, changed, arguments):
    """Asserts that only rounding separates a transformed from the plain program.

    Args:
      program: the plain one.
      found, expected: their results.
      changed: the plain program's for slightly other arguments: how much rounding
        matters.
      arguments: of the programs; intermediate values are not much larger.
    """
    values = [*arguments, *expected]
    largest = max(np.abs(f64(x)).max(initial=1) for x in values)
    narrow = "bf16[" in str(jax.make_jaxpr(program)(*program.arguments))
    allowed = (12 * 2.0**-7 if narrow else 256 * 2.0**-23) * largest
    for x, y, z in zip(found, expected, changed, strict=True):
        assert kind(x) == kind(y)
        x, y, z = f64(x), f64(y), f64(z)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
        error, change = (np.abs(v - y).max(initial=0) for v in (x, z))
        assert error <= 4 * change + allowed, (error, change, allowed)


# How many examples: a few of thousands.
few = pytest.mark.parametrize("examples", [6, pytest.param(1000, marks=SLOW)])


@few
@pytest.mark.parametrize("dtypes", [["float32"], ["float32", "bfloat16"]])
def test_random_programs(dtypes, examples):
    sites = []

    @hypothesis.settings(reproducible, max_examples=examples)
    @hypothesis.given(programs(dtypes=dtypes), OPS)
    def check(program, ops):
        fast, args = tracea.transform(program, ops=ops), program.arguments
        kinds = [[kind(x) for x in jax.eval_shape(f, *args)] for f in (program, fast)]
        assert kinds[0] == kinds[1]
        effects = [count(f, *args, name="debug_callback") for f in (program, fast)]
        assert effects[0] == effects[1]
        sites.append(count(fast, *args, name="tracea_matmul"))

        run = jit(lambda *args: (fast(*args), program(*args)))
        found, expected = run(*args)
        changed = run(*shifted(args))[1]
        assert_judged_alike(program, found, expected, changed, args)

    check()
    assert sum(sites) > examples


def gradients(f, floats, rest):
    """Gradients of weighted results with respect to the floating arguments."""

    def total(*floats):
        results = f(*floats, *rest)
        weights = [normal(*np.shape(y), seed=i) for i, y in enumerate(results)]
        return sum((y * w).sum() for y, w in zip(results, weights, strict=True))

    return jax.grad(total, argnums=tuple(range(len(floats))))(*floats)


@few
def test_gradients_of_random_programs(examples):
    @hypothesis.settings(reproducible, max_examples=examples // 2)
    @hypothesis.given(programs(SMOOTH, dtypes=["float32"], length=8), OPS)
    def check(program, ops):
        *floats, rest = program.arguments
        fast = tracea.transform(program, ops=ops)
        pair = (fast, program)
        run = jit(lambda *floats: [gradients(f, floats, [rest]) for f in pair])
        found, expected = run(*floats)
        changed = run(*shifted(floats))[1]
        assert_judged_alike(program, found, expected, changed, floats)

    check()
