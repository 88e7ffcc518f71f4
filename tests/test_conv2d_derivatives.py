"""Derivatives of conv2d, forward and reverse, to second order."""

from __future__ import annotations

import functools
import re

import convolutions
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolutions import arguments, lax_conv, ours, plain
from numerics import normal
from slow_cases import slow_unless
from transforms import assert_close, assert_derivatives_alike, in_f64, products

from tracea_jax.ops import conv2d

pytestmark = pytest.mark.once

EVERY = (0, 1, 2, 3)
count = functools.partial(products, name="tracea_conv2d")


@pytest.mark.parametrize("activation", slow_unless(["gelu"], ["none", "relu", "gelu"]))
def test_derivatives_are_those_of_the_plain_code(activation):
    how = dict(activation=activation, strides=(2, 2))
    pair = (functools.partial(f, **how) for f in (ours, plain))
    assert_derivatives_alike(*pair, *arguments(stride=2))


@hypothesis.settings(max_examples=8)
@hypothesis.given(convolutions.calls())
def test_gradients_of_any_convolution_to_second_order(call):
    x, w, how = call
    x, w = normal(*x), normal(*w)

    def derivatives(f, x, w):
        def gradient(x, w):
            return jax.grad(lambda *a: (f(*a, **how) ** 2).sum(), argnums=(0, 1))(x, w)

        return gradient(x, w), jax.jvp(gradient, (x, w), (jnp.sin(x), jnp.cos(w)))[1]

    found = jax.jit(functools.partial(derivatives, conv2d))(x, w)
    expected = in_f64(jax.jit(functools.partial(derivatives, lax_conv)), x, w)
    assert_close(found, expected, 1e-5)


def convolutions_in(f, *args):
    """The convolutions that XLA is given, without the names of their operands."""
    text = jax.jit(f).lower(*args).as_text()
    lines = re.findall(r"stablehlo\.convolution.*", text)
    return sorted(re.sub(r"%\w+(#\d+)?", "%", line) for line in lines)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "how",
    [
        dict(strides=(2, 2)),
        dict(padding="VALID", dilation=(2, 1)),
        dict(groups=2, padding=((2, 1), (0, 3)), strides=(3, 1)),
        dict(groups=4, layout="NCHW", strides=(2, 1)),
    ],
    ids=str,
)
def test_xla_is_given_the_convolutions_of_jaxs_own_derivatives(how, dtype):
    groups, layout = how.get("groups", 1), how.get("layout", "NHWC")
    x, w, *_ = arguments(layout, groups, size=(8, 7), kernel=(3, 2))
    x, w = x.astype(dtype), w.astype(dtype)

    def gradients(f, x, w):
        return jax.grad(lambda *a: jnp.sin(f(*a, **how)).sum(), argnums=(0, 1))(x, w)

    by_xla = functools.partial(conv2d, implementation="xla")
    found = convolutions_in(functools.partial(gradients, by_xla), x, w)
    expected = convolutions_in(functools.partial(gradients, lax_conv), x, w)
    assert len(found) == 3 and found == expected


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (1, 2)])
def test_derivatives_of_some_operands(wanted):
    args = arguments("NCHW", groups=2)
    how = dict(activation="silu", groups=2, layout="NCHW")

    def gradients(f, *args):
        return jax.grad(lambda *a: (f(*a, **how) ** 2).sum(), argnums=wanted)(*args)

    expected = in_f64(jax.jit(functools.partial(gradients, plain)), *args)
    assert_close(jax.jit(functools.partial(gradients, ours))(*args), expected, 1e-5)


def test_derivatives_have_the_dtypes_of_their_operands():
    dtypes = ("bfloat16", "bfloat16", "float32", "float16")
    args = [x.astype(d) for x, d in zip(arguments(), dtypes, strict=True)]

    def loss(f, *args):
        y = f(*args, activation="gelu")
        return (y.astype(jnp.promote_types(y.dtype, "float32")) ** 2).sum()

    def gradients(f, *args):
        return jax.grad(functools.partial(loss, f), argnums=EVERY)(*args)

    found = jax.jit(functools.partial(gradients, ours))(*args)
    assert [g.dtype for g in found] == list(dtypes)
    expected = in_f64(functools.partial(gradients, plain), *args)
    assert_close(found, expected, 2e-2)


def test_wide_results_of_narrow_operands_have_derivatives():
    x, w = (a.astype("bfloat16") for a in arguments()[:2])

    def loss(x, w):
        return (conv2d(x, w, preferred_element_type="float32") ** 2).sum()

    found = jax.grad(loss, argnums=(0, 1))(x, w)
    assert [g.dtype for g in found] == ["bfloat16"] * 2
    expected = in_f64(jax.grad(lambda *a: (plain(*a) ** 2).sum(), (0, 1)), x, w)
    assert_close(found, expected, 4e-3)


def test_no_examples_have_no_gradient_by_the_weights():
    x, w = normal(0, 4, 4, 2), normal(3, 3, 2, 3)
    dx, dw = jax.grad(lambda *a: conv2d(*a).sum(), argnums=(0, 1))(x, w)
    assert dx.shape == x.shape
    np.testing.assert_array_equal(dw, jnp.zeros_like(w), strict=True)


def test_one_convolution_serves_value_and_derivative():
    x, w, bias, residual = arguments()

    def loss(x, w):
        return ours(x, w, bias, residual, activation="gelu").sum()

    assert count(loss, x, w) == 1
    assert count(jax.grad(loss, argnums=(0, 1)), x, w) == 3


@pytest.mark.parametrize("operand", range(3))
def test_linear_transpose(operand):
    x, w, _, residual = arguments()
    x = jnp.zeros_like(x) if operand == 2 else x  # affine is not linear
    args = [x, w, residual]

    def linear(f, a):
        x, w, residual = [*args[:operand], a, *args[operand + 1 :]]
        x, w = x.astype(a.dtype), w.astype(a.dtype)
        return f(x, w, None, residual if operand == 2 else None)

    def transposed(f, a, cotangent):
        return jax.linear_transpose(functools.partial(linear, f), a)(cotangent)

    cotangent = normal(*residual.shape, seed=1)
    found = transposed(ours, args[operand], cotangent)
    assert_close(
        found, in_f64(functools.partial(transposed, plain), args[operand], cotangent)
    )


def test_an_activation_has_no_transpose():
    x, w, *_ = arguments()
    f = functools.partial(conv2d, w=w, activation="relu")
    with pytest.raises(ValueError, match="activation='relu' is not linear"):
        jax.linear_transpose(f, x)(conv2d(x, w))
