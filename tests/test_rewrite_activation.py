"""Activations that transform finds after products, and where it finds them."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activations import SQRT_2_PI, after_product, operands
from jax import lax
from numerics import f64, normal
from slow_cases import slow_unless
from transformed import (
    assert_alike,
    assert_all_alike,
    epilogues,
    jit,
    only_matmul,
    transform,
)

import tracea_jax as tracea


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


@pytest.mark.parametrize("dtype", slow_unless(["float32", "bfloat16"], TOLERANCES))
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
