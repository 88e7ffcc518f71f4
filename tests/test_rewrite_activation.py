"""Activations that transform finds after products, and look-alikes that it leaves."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import f64, normal
from transformed import (
    assert_alike,
    assert_all_alike,
    epilogues,
    jit,
    only_matmul,
    transform,
)

import tracea_jax as tracea

SQRT_2_PI = math.sqrt(2 / math.pi)


def after_product(activation):
    return lambda x, w: activation(x @ w)


def operands(dtype="float32", scale=1.0):
    """x, w; no product is near zero, where 16-bit functions have no relative error."""
    x, w = normal(6, 8), normal(8, 5, seed=1) * scale
    assert jnp.abs(x @ w).min() > 1e-2 * scale
    return x.astype(dtype), w.astype(dtype)


@jax.jit
def jitted_silu(x):
    return x * jax.nn.sigmoid(x)


SPELLINGS = {
    "relu": {
        "jax.nn": jax.nn.relu,
        "flax": nn.relu,
        "maximum": lambda x: jnp.maximum(x, 0),
        "maximum, left": lambda x: jnp.maximum(0.0, x),
        "zeros": lambda x: jnp.maximum(x, jnp.zeros_like(x)),
        "lax.max": lambda x: lax.max(x, jnp.zeros((), x.dtype)),
        "clip": lambda x: jnp.clip(x, 0),
        "where <": lambda x: jnp.where(x < 0, 0, x),
        "where <=": lambda x: jnp.where(0 >= x, 0, x),
        "jitted": jax.jit(lambda x: jnp.maximum(x, 0)),
    },
    "gelu": {
        "jax.nn": jax.nn.gelu,
        "flax": nn.gelu,
        "cubed": lambda x: (
            0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        ),
        "power": lambda x: (
            0.5 * x * (1 + jnp.tanh(SQRT_2_PI * (x + 0.044715 * jnp.power(x, 3))))
        ),
        "factored": lambda x: (
            x * 0.5 * (1.0 + jnp.tanh(x * SQRT_2_PI * (1.0 + 0.044715 * x * x)))
        ),
        "cdf": lambda x: (
            x * (0.5 * (1.0 + jnp.tanh(SQRT_2_PI * (x + 0.044715 * (x * x * x)))))
        ),
        "traced root": lambda x: (
            0.5
            * x
            * (
                1
                + jnp.tanh(jnp.sqrt(2 / jnp.pi).astype(x.dtype) * (x + 0.044715 * x**3))
            )
        ),
        "jitted": jax.jit(jax.nn.gelu),
    },
    "gelu_exact": {
        "jax.nn": functools.partial(jax.nn.gelu, approximate=False),
        "divided": lambda x: x * 0.5 * (1 + lax.erf(x / math.sqrt(2))),
        "times": lambda x: 0.5 * x * (1 + jax.scipy.special.erf(x * math.sqrt(0.5))),
        "erfc": lambda x: 0.5 * x * jax.scipy.special.erfc(-x * math.sqrt(0.5)),
    },
    "silu": {
        "jax.nn": jax.nn.silu,
        "swish": jax.nn.swish,
        "sigmoid": lambda x: x * jax.nn.sigmoid(x),
        "sigmoid, left": lambda x: jax.nn.sigmoid(x) * x,
        "exp": lambda x: x / (1 + jnp.exp(-x)),
        "reciprocal": lambda x: x * (1 / (1 + jnp.exp(-x))),
        "tanh": lambda x: 0.5 * x * (1 + jnp.tanh(0.5 * x)),
        "powers of two": lambda x: x / (1 + jnp.exp2(-x * math.log2(math.e))),
        "jitted": jitted_silu,
    },
}
ALL = [(name, spelling) for name in SPELLINGS for spelling in SPELLINGS[name]]
# bfloat16 and float16 models have all constants and steps rounded.
TOLERANCES = {"float32": 2e-5, "bfloat16": 6e-2, "float16": 1e-2}


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
AWKWARD = [0.0, -0.0, 1e-37, -1e-37, 1e-20, -3e8, 1.5, -2.5, 30.0, -60.0, 150.0]
AWKWARD += [2e38, -2e38, 3.3e38, np.nan, np.inf, -np.inf]
ONE = jnp.ones((1, 1))


@pytest.mark.parametrize("name", NEARLY_RELU)
def test_what_is_another_function_of_special_values_is_kept(name):
    f = after_product(NEARLY_RELU[name])
    x = jnp.float32(AWKWARD)[:, None]
    found, expected = jit(lambda x: [g(x, ONE) for g in (transform(f), f)])(x)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert epilogues(f, *operands()) == ["none"]


def test_tiny_floors_before_what_they_guard():
    x, w = -jnp.abs(normal(6, 8)), jnp.abs(normal(8, 5, seed=1))
    cases = {
        "log": lambda x, w: jnp.log(jnp.maximum(x @ w, 1e-9)),
        "reciprocal": lambda x, w: 1 / jnp.clip(x @ w, 1e-12),
        "linear attention": lambda x, w: (x @ w) / jnp.maximum(x @ w, 1e-9),
        "gated": lambda x, w: jnp.log(jnp.maximum(x @ w, 1e-9) * (-x @ w)),
    }
    for name, f in cases.items():
        for fast in (transform(f), tracea.transform(f)):
            found, expected = jit(lambda x, w, f=f, fast=fast: (fast(x, w), f(x, w)))(
                x, w
            )
            np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("name", "spelling"), ALL)
def test_every_spelling_is_found(name, spelling, dtype):
    f = after_product(SPELLINGS[name][spelling])
    params = only_matmul(f, *operands(dtype))
    assert str(params["epilogue"]) == name
    assert params["out"] == dtype


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_spelling_keeps_values_and_gradients(dtype):
    cases = {
        f"{name}, {spelling}": (
            after_product(SPELLINGS[name][spelling]),
            operands(dtype, 0.5),
        )
        for name, spelling in ALL
    }
    assert_all_alike(cases, TOLERANCES[dtype])


@pytest.mark.parametrize("name", SPELLINGS)
def test_activations_in_a_wider_dtype(name):
    # as mixed-precision models write them
    activation = SPELLINGS[name]["jax.nn"]

    def f(x, w):
        return activation((x @ w).astype(jnp.float32)).astype(x.dtype)

    x, w = operands("bfloat16")
    assert str(only_matmul(f, x, w)["epilogue"]) == name
    assert_alike(f, x, w, tolerance=2e-2)


@pytest.mark.parametrize("name", SPELLINGS)
def test_large_and_small_arguments(name):
    # the activations are what they are far beyond where they are interesting
    x = jnp.asarray([[1.0]])
    w = jnp.asarray([[-1e30, -3e4, -50.0, -1e-20, 0, 1e-20, 50.0, 3e4, 1e30]])
    cases = SPELLINGS[name].values()
    found, expected = jit(
        lambda: [[f(x, w) for f in map(g, map(after_product, cases))] for g in PAIR]
    )()
    for y, wanted in zip(found, expected, strict=True):
        wanted = np.where(np.isfinite(f64(wanted)), f64(wanted), f64(expected[0]))
        np.testing.assert_allclose(f64(y), wanted, rtol=2e-5, atol=1e-5)


PAIR = (transform, lambda f: f)


# --- what is no activation ------------------------------------------------------------


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


# --- where it is ----------------------------------------------------------------------


def test_the_first_of_several_activations_is_fused():
    x, w = operands()
    cases = {
        "relu": lambda x, w: jax.nn.relu(jax.nn.relu(x @ w)),
        "silu": lambda x, w: jax.nn.silu(jax.nn.silu(x @ w)),
        "gelu": lambda x, w: jax.nn.gelu(jax.nn.gelu(x @ w)),
        "gelu_exact": lambda x, w: jnp.tanh(
            jax.nn.gelu(x @ w, approximate=False) * 0.3
        ),
    }
    for name, f in cases.items():
        assert epilogues(f, x, w) == [name]
    squared = lambda x, w: jnp.square(jax.nn.relu(x @ w))  # noqa: E731
    capped = lambda x, w: jnp.clip(x @ w, 0, 1)  # noqa: E731
    for f in (squared, capped):
        assert epilogues(f, x, w) in (["relu"], ["none"])
    cases |= {"squared": squared, "capped": capped}
    assert_all_alike({name: (f, (x, w)) for name, f in cases.items()})


def test_a_value_that_is_used_elsewhere_is_not_activated():
    x, w = operands()

    def returned(x, w):
        z = x @ w
        return jax.nn.gelu(z), z

    def gate_returned(x, w):
        z = x @ w
        gate = jax.nn.sigmoid(z)
        return z * gate, gate

    def other_use(x, w):
        z = x @ w
        return jax.nn.silu(z) + jnp.sin(z)

    def inner_use(x, w):
        z = x @ w
        return jax.nn.relu(z), lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, z)

    def two(x, w):
        z = x @ w
        return jax.nn.relu(z), jax.nn.gelu(z)

    cases = [returned, gate_returned, other_use, inner_use, two]
    for f in cases:
        assert epilogues(f, x, w) == ["none"]
    assert_all_alike({f.__name__: (f, (x, w)) for f in cases})


def test_parameters_of_an_activation_are_no_constants():
    x, w = operands()
    a = jnp.float32(0.25)  # at 1 the terms of its gradient cancel

    def gated(x, w, a):
        z = x @ w
        return z * jax.nn.sigmoid(a * z)

    def leaky(x, w, a):
        z = x @ w
        return jnp.where(z > 0, z, (1 - a) * z)

    for f in (gated, leaky):
        assert epilogues(f, x, w, a) == ["none"]
        assert_alike(f, x, w, a)

    def along_columns(x, w):
        z = x @ w
        return jnp.maximum(z, jnp.arange(5.0) * 0.1)

    assert epilogues(along_columns, x, w) == ["none"]
    assert_alike(along_columns, x, w)


def test_captured_numbers_are_constants():
    x, w = operands()
    half, one = jnp.float32(0.5), np.float32(1)

    def f(x, w):
        z = x @ w
        return half * z * (one + jnp.tanh(half * z))

    assert epilogues(f, x, w) == ["silu"]
    assert_alike(f, x, w)

    def with_gradient(half):
        def f(x, w):
            z = x @ w
            return (half * z * (1 + jnp.tanh(half * z))).sum()

        return transform(f)(x, w)

    def plain(half):
        z = x @ w
        return (half * z * (1 + jnp.tanh(half * z))).sum()

    np.testing.assert_allclose(
        jax.grad(with_gradient)(0.5), jax.grad(plain)(0.5), rtol=1e-5
    )


def test_constants_that_overflow_are_no_errors():
    x, w = operands()
    zero, one, big = jnp.float32(0), jnp.float32(1), jnp.float32(3e38)
    cases = {
        "division by zero": lambda z: jnp.maximum(z, 0) * (one / zero),
        "before": lambda z: jnp.maximum(z * (one / zero), 0),
        "overflow": lambda z: jnp.maximum(z * (big * big), 0),
        "power": lambda z: jnp.maximum(z * (zero**-1), 0),
        "root": lambda z: jnp.maximum(z * (-one) ** 0.3, 0),
        "to integers": lambda z: z * (one / zero).astype(jnp.int32),
        "not a number": lambda z: jnp.maximum(z, jnp.nan),
    }
    for name, f in cases.items():
        product = after_product(f)
        assert epilogues(product, x, w) in (["none"], ["relu"]), name
        assert_alike(product, x, w, gradients=False)


def test_selections_by_integers():
    x, w = operands()

    def f(x, w):
        z = x @ w
        which = jnp.clip(z.astype(jnp.int32), 0, 2)
        return lax.select_n(which, z, 2 * z, -z)

    assert epilogues(f, x, w) == ["none"]
    assert_alike(f, x, w)


def test_a_residual_between_product_and_activation():
    x, w = operands()
    r = normal(6, 5, seed=3)
    f = lambda x, w, r: jax.nn.silu(x @ w + r)  # noqa: E731
    assert epilogues(f, x, w, r) == ["residual"]
    assert_alike(f, x, w, r)
