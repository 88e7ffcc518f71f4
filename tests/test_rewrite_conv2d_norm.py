"""Batch norms and other scales after convolutions of plain programs."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolved import (
    NHWC,
    C,
    after_conv,
    check,
    check_all,
    conv,
    exactly,
    images,
    layouts,
    sites,
)
from flax import nnx
from jax import lax
from jaxprs import equations
from numerics import f64, normal
from transforms import assert_close

from tracea_jax.transform import transform

pytestmark = pytest.mark.usefixtures("calls_only")


def moments(shape=(C,)):
    """mean, variance, scale and bias of a batch norm."""
    mean, variance, scale, bias = (normal(*shape, seed=i) for i in range(4))
    return mean, jnp.abs(variance) + 0.5, scale, bias


NORMS = {
    "scale last": lambda y, m, v, s, b: (y - m) * lax.rsqrt(v + 1e-5) * s + b,
    "one scale": lambda y, m, v, s, b: (y - m) * (s * lax.rsqrt(v + 1e-5)) + b,
    "division": lambda y, m, v, s, b: s * ((y - m) / jnp.sqrt(v + 1e-5)) + b,
    "power": lambda y, m, v, s, b: (y - m) * (v + 1e-5) ** -0.5 * s + b,
    "reciprocal": lambda y, m, v, s, b: (y - m) * (s / jnp.sqrt(1e-5 + v)) + b,
}

# Scales that may be anything, so their values must be known.
AFFINE = {
    "affine": lambda y, m, v, s, b: y * s + b,
    "turned": lambda y, m, v, s, b: b - s * (m - y),
    "negated": lambda y, m, v, s, b: -(y * s) + b,
    "divided": lambda y, m, v, s, b: (y - m) / v + b,
    "numbers": lambda y, m, v, s, b: (y * 0.5 - 1.5) / 3 * 1.25 + b,
}


def residual_and_moments(numbers):
    r = normal(2, 7, 5, C).transpose(["NHWC".index(d) for d in numbers[2]])
    return r, moments((C,) if numbers == NHWC else (C, 1, 1))


def normed(norm, *known):
    """relu(norm(y, *moments) + r) of y and r and the moments that are not known."""
    return lambda y, r, *m: jax.nn.relu(norm(y, *known, *m) + r)


@layouts
def test_batch_norm_by_hand(numbers):
    x, w = images(2, 7, 5, 3, numbers=numbers)
    r, norm = residual_and_moments(numbers)
    programs = {name: after_conv(normed(f), numbers) for name, f in NORMS.items()}
    check_all(programs, x, w, r, *norm, epilogue="bias+relu+residual")


@layouts
def test_known_scales(numbers):
    x, w = images(2, 7, 5, 3, numbers=numbers)
    r, norm = residual_and_moments(numbers)
    programs = {n: after_conv(normed(f, *norm), numbers) for n, f in AFFINE.items()}
    check_all(programs, x, w, r, epilogue="bias+relu+residual")


def test_a_scale_alone_needs_no_bias():
    s = normal(C)
    check(lambda x, w: conv(x, w) * s, *images(2, 7, 5, 3), epilogue="none")


def test_a_scale_made_outside_of_a_nested_function():
    @jax.checkpoint
    def layer(x, w, scale, shift):
        return jnp.sin(conv(x, w) * scale + shift)

    def f(x, w, v, s, b):
        return layer(x, w, s * lax.rsqrt(v + 1e-5), b)

    args = *images(2, 7, 5, 3), *moments()[1:]
    assert sites(f, *args) == ["bias"]
    assert_close(transform(f)(*args), exactly(f, *args))


def assert_alike_by_channel(found, expected, name, sizes=None):
    """Asserts equal special values, and others that differ by rounding.

    ``sizes``: of what was rounded on the way, for each channel, if that was larger.
    """
    found, expected = f64(found).T, f64(expected).T
    sizes = np.zeros(len(found)) if sizes is None else sizes
    for x, y, size in zip(found, expected, sizes, strict=True):
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite], name)
        bound = 1e-5 * np.abs(y[finite]).max(initial=1e-36) + 2.0**-22 * size
        assert (np.abs(x[finite] - y[finite]) <= bound).all(), name


SPECIAL = [1.0, 0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 1e-40, 1e-38, -1e-30, 3e38]
SCALES = {
    "divided": lambda y, s: y / s,
    "multiplied": lambda y, s: y * s,
    "affine": lambda y, s: jax.nn.relu((y - 1) * s + 1),
    "no epsilon": lambda y, s: y * lax.rsqrt(s),
    "tiny epsilon": lambda y, s: y / jnp.sqrt(s + 1e-38),
    "no variance": lambda y, s: y / (s + 1e-5),
    "subtracted epsilon": lambda y, s: y * lax.rsqrt(s - 1e-5),
    "epsilon inside": lambda y, s: y * lax.rsqrt((s + 1e-5) * s),
}


@pytest.mark.parametrize(
    "is_known",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["unknown", "known"],
)
@pytest.mark.parametrize("name", SCALES)
def test_special_scales_keep_their_meaning(name, is_known):
    """Zeros, infinities and NaN are where they were, and so are large and tiny values.

    Scaled weights would make sums of infinities, and overflow or vanish themselves.
    """
    x, w = images(2, 5, 4, 3)
    scale = jnp.asarray(SPECIAL, jnp.float32)
    w = jnp.concatenate([w * 1e-3, w[..., :2] * 1e3], -1)
    programs = {"as they are": (x, w), "large and tiny": (x * 1e20, w * 1e-19)}
    for which, args in programs.items():
        for value in [scale] if not is_known else [scale, scale[:1], scale[-1:]]:
            s = jnp.broadcast_to(value, scale.shape)

            def f(x, w, s=s):
                return SCALES[name](conv(x, w), s)

            args = (*args[:2],) if is_known else (*args[:2], s)
            # What is added and taken away again was rounded as the number it was.
            sizes = 1 + np.abs(f64(s)) if name == "affine" else np.zeros(len(s))
            assert_alike_by_channel(
                transform(f)(*args), jax.jit(f)(*args), which, sizes
            )


@pytest.mark.parametrize("name", ["times", "minus"])
def test_zeros_of_both_signs_are_two_numbers(name):
    x, w = images(1, 9, 9, 3)
    follow = {"times": lambda y, c: y * c, "minus": lambda y, c: c - jax.nn.relu(y)}
    for zero in (0.0, -0.0):
        f = lambda x, w, c=zero: jnp.sign(1 / follow[name](conv(x, w), c))  # noqa: E731
        found, expected = jax.jit(lambda *a, f=f: (transform(f)(*a), f(*a)))(x, w)
        np.testing.assert_array_equal(found, expected)


def test_batch_norm_keeps_special_moments():
    """No variance, no weight, and what is lost already."""
    x, w = images(2, 5, 4, 3)
    mean = jnp.asarray([0, 1, jnp.inf, jnp.nan, 0, 0, 1, 0], jnp.float32)
    variance = jnp.asarray([0, 1e-40, 1, 1, jnp.inf, jnp.nan, 1e30, 1], jnp.float32)
    scale = jnp.asarray([1, -1, 1, 1, 1, 1, 0, jnp.nan], jnp.float32)
    for name, norm in NORMS.items():
        args = x, w, mean, variance, scale, normal(C)
        f = after_conv(norm)
        assert sites(f, *args) == ["bias"], name
        assert_alike_by_channel(transform(f)(*args), jax.jit(f)(*args), name)


def test_known_factors_of_a_norm_are_judged_by_their_values():
    x, w = images(2, 5, 4, 3)
    _, v, s, b = moments()
    v, s = v.at[0].set(0.1), s.at[0].set(3e38)

    def f(x, w):
        return conv(x, w) * lax.rsqrt(v + 1e-5) * s + b

    assert_alike_by_channel(transform(f)(x, w), jax.jit(f)(x, w), "infinite product")


class Block(nn.Module):
    """Convolution, batch norm, relu; conv_dtype is what both round to."""

    conv_dtype: Any = None
    is_training: bool = False
    use_bias: bool = False

    @nn.compact
    def __call__(self, x):
        dtype, is_fixed = self.conv_dtype, not self.is_training
        x = nn.Conv(C, (3, 3), use_bias=self.use_bias, dtype=dtype)(x)
        return nn.relu(nn.BatchNorm(use_running_average=is_fixed, dtype=dtype)(x))


def block_variables(x, **fields):
    """Random variables of a block; the variances are positive."""
    shapes = jax.eval_shape(Block(**fields).init, jax.random.key(0), x)

    def leaf(path, like):
        value = normal(*like.shape, seed=len(str(path)))
        return jnp.abs(value) + 0.5 if "var" in str(path) else value / 4

    return jax.tree_util.tree_map_with_path(leaf, shapes)


@pytest.mark.parametrize("use_bias", [False, True])
def test_batch_norm_of_linen(use_bias):
    block, x = Block(use_bias=use_bias), normal(2, 7, 5, 3)
    variables = block_variables(x, use_bias=use_bias)
    check(block.apply, variables, x, epilogue="bias+relu")


def test_batch_norm_of_nnx():
    class Module(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, C, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(C, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.norm(self.conv(x)))

    module = nnx.eval_shape(lambda: Module(nnx.Rngs(0)))
    module.eval()
    graph, state = nnx.split(module)
    state = jax.tree.map(lambda a: jnp.abs(normal(*a.shape)) / 4 + 0.1, state)
    f = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    check(f, state, normal(2, 7, 5, 3), epilogue="bias+relu")


def test_batch_norm_around_bfloat16():
    x = normal(4, 9, 8, 16)
    narrow: Any = Block(conv_dtype="bfloat16", use_bias=True).apply
    wide = Block(use_bias=True).apply
    variables = block_variables(x, use_bias=True)
    assert sites(narrow, variables, x) == ["bias+relu"]
    assert not equations(transform(narrow), variables, x, name="sub")  # no image is
    expected = exactly(wide, variables, x)
    plain = np.abs(f64(jax.jit(narrow)(variables, x)) - expected)
    found = transform(narrow)(variables, x)
    assert found.dtype == jnp.bfloat16
    assert np.abs(f64(found) - expected).mean() <= 2 * plain.mean()
    assert np.abs(f64(found) - expected).max() <= 2 * plain.max()


def test_batch_norm_in_training_is_not_folded():
    block, x = Block(is_training=True, use_bias=True), normal(2, 7, 5, 3)
    variables = block_variables(x, use_bias=True)
    f = functools.partial(block.apply, mutable=["batch_stats"])
    assert sites(f, variables, x) == ["bias"]
    assert_close(transform(f)(variables, x), exactly(f, variables, x), 1e-5)


def test_gradients_reach_all_of_a_folded_batch_norm():
    block, x = Block(), normal(2, 7, 5, 3)
    variables = block_variables(x)
    weights = normal(2, 7, 5, C)

    def gradients(apply, variables, x, weights):
        def loss(variables, x):
            return (apply(variables, x) * weights).sum()

        return jax.grad(loss, argnums=(0, 1))(variables, x)

    found = jax.jit(functools.partial(gradients, transform(block.apply)))
    expected = exactly(functools.partial(gradients, block.apply), variables, x, weights)
    assert_close(found(variables, x, weights), expected, 1e-5)


def products(f, *args):
    """Shapes of the elementwise products that are left."""
    return [e.outvars[0].aval.shape for e in equations(transform(f), *args, name="mul")]


def test_float16_is_not_scaled():
    """Its weights might overflow or vanish."""
    x, w = (a.astype(jnp.float16) for a in images(2, 7, 5, 3))
    b = normal(C, dtype="float16")
    f = after_conv(lambda y, b: y * b)
    assert products(f, x, w, b) == [(2, 7, 5, C)]
    assert sites(after_conv(lambda y, b: y + b), x, w, b) == ["bias"]


def test_narrow_weights_are_not_scaled_for_a_wide_result():
    x, w = (a.astype(jnp.bfloat16) for a in images(2, 7, 5, 3))
    s = normal(C)

    def f(x, w, s):
        return jax.nn.relu(conv(x, w, preferred_element_type=jnp.float32) * s)

    found, expected = transform(f)(x, w, s), jax.jit(f)(x, w, s)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_many_weights_are_not_scaled_for_a_small_result():
    mean, variance, *_ = moments()
    f = after_conv(lambda y, m, v: (y - m) * lax.rsqrt(v + 1e-5))
    few, many = images(1, 9, 9, 3), images(1, 3, 3, 64)
    assert (1, 9, 9, C) not in products(f, *few, mean, variance)
    assert products(f, *many, mean, variance) == [(1, 3, 3, C)]
    assert sites(f, *many, mean, variance) == ["bias"]
