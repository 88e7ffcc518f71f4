"""Functions that look like activations but are not: transform leaves them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activations import AWKWARD, ONE, SQRT_2_PI, after_product, operands
from jax import lax
from numerics import normal
from transformed import (
    assert_alike,
    assert_all_alike,
    epilogues,
    jit,
    transform,
)

pytestmark = pytest.mark.once

# What is relu of all numbers but NaN or an infinity, or but for an overflow.
NEARLY_RELU = {
    "where >": lambda x: jnp.where(x > 0, x, 0),
    "where >=": lambda x: jnp.where(x >= 0, x, 0.0),
    "times its sign": lambda x: x * (x > 0),
    "converted sign": lambda x: (x > 0).astype(x.dtype) * x,
    "with abs": lambda x: (x + jnp.abs(x)) / 2,
    "scaled": lambda x: jnp.maximum(x * 1e38, 0) * 1e-38,
    "vanishing": lambda x: jnp.maximum(x * 1e-37, 0) * 1e37,
    "finite": lambda x: jnp.maximum(jnp.nan_to_num(x), 0),
    "floor 1e-9": lambda x: jnp.maximum(x, 1e-9),
    "floor 1e-12": lambda x: jnp.clip(x, 1e-12),
    "smallest normal": lambda x: jnp.maximum(x, jnp.finfo(x.dtype).tiny),
    "tiny slope": lambda x: jnp.where(x < 0, 1e-20 * x, x),
    "gelu of what is finite": lambda x: jax.nn.gelu(jnp.nan_to_num(x)),
    "silu by its limit": lambda x: x * jnp.exp(x) / (1 + jnp.exp(x)),
}


@pytest.mark.parametrize("name", NEARLY_RELU)
def test_what_is_another_function_of_special_values_is_kept(name):
    f = after_product(NEARLY_RELU[name])
    x = jnp.float32(AWKWARD)[:, None]
    found, expected = jit(lambda x: [g(x, ONE) for g in (transform(f), f)])(x)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert epilogues(f, *operands()) == ["none"]


@jax.custom_jvp
def straight_through(x):
    return jnp.maximum(x, 0)


straight_through.defjvp(lambda x, dx: (straight_through(*x), dx[0]))


@jax.custom_jvp
def relu(x):  # has jax.nn.relu's name and values
    return jax.nn.relu(x)


relu.defjvp(lambda x, dx: (relu(*x), jnp.where(x[0] > -1, 0.5, 0.0) * dx[0]))


@jax.custom_vjp
def guided(x):
    return jax.nn.relu(x)


guided.defvjp(lambda x: (guided(x), x), lambda x, ct: ((x > 0) * jax.nn.relu(ct),))

NO_ACTIVATION = {
    "quick gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "leaky relu": jax.nn.leaky_relu,
    "leaky relu, nearly relu": lambda x: jnp.where(x > 0, x, 1e-3 * x),
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "softplus": jax.nn.softplus,
    "mish": jax.nn.mish,
    "hard swish": jax.nn.hard_swish,
    "relu6": jax.nn.relu6,
    "sharper silu": lambda x: x * jax.nn.sigmoid(2 * x),
    "squared silu": lambda x: x * jax.nn.sigmoid(x) ** 2,
    "another gelu": lambda x: 0.5 * x * (1 + jnp.tanh(SQRT_2_PI * (x + 0.05 * x**3))),
    "rounded gelu": lambda x: 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.044715 * x**3))),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "abs": jnp.abs,
    "minimum": lambda x: jnp.minimum(x, 0),
    "of the negative": lambda x: jax.nn.relu(-x),
    "threshold": lambda x: jnp.maximum(x, 0.1),
    "small threshold": lambda x: jnp.where(x > 0.02, x, 0),
    "doubled": lambda x: 2 * jnp.maximum(x, 0) - jnp.minimum(x, 0) * 1e-3,
    "step": lambda x: (x > 0) * 1.0,
    "identity": lambda x: x * 1.0,
    "squareplus": jax.nn.squareplus,
    "log sigmoid": jax.nn.log_sigmoid,
    # The values of an activation, and another derivative.
    "straight through": straight_through,
    "own relu": relu,
    "guided": guided,
    "detached gate": lambda x: x * lax.stop_gradient(jax.nn.sigmoid(x)),
    "detached step": lambda x: x + lax.stop_gradient(jax.nn.relu(x) - x),
    "detached": lambda x: lax.stop_gradient(jax.nn.relu(x)) + 0.5 * (x - x),
}


@pytest.mark.parametrize("name", NO_ACTIVATION)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_looks_alike_is_left(name, dtype):
    f = after_product(NO_ACTIVATION[name])
    x, w = operands(dtype)
    assert epilogues(f, x, w) == ["none"]


def test_what_looks_alike_keeps_values_and_gradients():
    x, w = operands()
    cases = NO_ACTIVATION.items()
    assert_all_alike({name: (after_product(f), (x, w)) for name, f in cases})


# What is relu but for the sign of zeros.
WITH_OTHER_ZEROS = {
    "negative floor": lambda x: jnp.maximum(x, -0.0),
    "negated minimum": lambda x: -jnp.minimum(-x, 0),
    "negative zero": lambda x: jnp.where(x < 0, -0.0, x),
}


@pytest.mark.parametrize("name", WITH_OTHER_ZEROS)
def test_what_has_other_zeros_is_kept(name):
    f = after_product(lambda x: 1 / WITH_OTHER_ZEROS[name](x))
    # The sign of a product that is zero depends on where its sum begins.
    x = jnp.float32([value for value in AWKWARD if value != 0])[:, None]
    found, expected = jit(lambda x: [g(x, ONE) for g in (transform(f), f)])(x)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert epilogues(f, *operands()) == ["none"]


def test_zeros_of_both_signs_are_two_constants():
    x, w = operands()
    for zero in (0.0, -0.0):  # what was recognised with the one is kept
        f = lambda x, w, c=zero: 1 / jnp.maximum(x @ w, c)  # noqa: E731
        found, expected = jit(lambda *args, f=f: (transform(f)(*args), f(*args)))(x, w)
        np.testing.assert_array_equal(np.isposinf(found), np.isposinf(expected))


# Equal to an activation wherever one usually looks.
SATURATING = {
    "capped relu": lambda x: jax.nn.relu(jnp.minimum(x, 100.0)),
    "clamped relu": lambda x: jax.nn.relu(jnp.clip(x, -1e4, 1e4)),
    "clamped silu": lambda x: jax.nn.silu(jnp.clip(x, -1e3, 1e3)),
    "clamped gelu": lambda x: jax.nn.gelu(jnp.clip(x, max=700.0)),
    "selected": lambda x: jnp.where(x < 3e3, jnp.maximum(x, 0), -x),
    "outlier": lambda x: jnp.where(jnp.abs(x) > 1e5, 0, jax.nn.relu(x)),
}


@pytest.mark.parametrize("name", SATURATING)
def test_limits_far_out_are_kept(name):
    f = after_product(SATURATING[name])
    x, w = operands()
    assert_alike(f, x * 1e6, w)
    assert_alike(f, x, w)


def to(dtype):
    return lambda x: x.astype(dtype).astype(jnp.float32)


CONVERSIONS = {
    "integers": lambda x: jax.nn.relu(to(jnp.int32)(x)),
    "float8": lambda x: jax.nn.relu(to(jnp.float8_e4m3fn)(x)),
    "silu of float8": lambda x: jax.nn.silu(to(jnp.float8_e5m2)(x)),
    "booleans": lambda x: jax.nn.relu(to(bool)(x)),
    "an integer gate": lambda x: x * to(jnp.int8)(jax.nn.sigmoid(x)),
    "integer results": lambda x: jax.nn.relu(x.astype(jnp.int32)),
    "integer maximum": lambda x: jnp.maximum(x.astype(jnp.int16), 0),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_that_lose_more_than_a_rounding(name):
    f = after_product(CONVERSIONS[name])
    assert_alike(f, *operands(scale=3.0), gradients="results" not in name)


def test_wider_results_under_x64():
    with jax.enable_x64(True):
        x, w = normal(6, 8), normal(8, 5, seed=1)
        assert_alike(lambda x, w: jax.nn.relu((x @ w).astype(jnp.float64)), x, w)
        assert_alike(lambda x, w: jax.nn.relu(x @ w).astype(jnp.float64), x, w)
        assert_alike(lambda x, w: jnp.maximum(x @ w, np.float64(0)), x, w)
