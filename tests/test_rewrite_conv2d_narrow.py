"""Convolutions of 16-bit numbers in plain programs, with float32 steps after them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolved import C, after_conv, conv, exactly, images, sites
from jax import lax
from jaxprs import equations
from numerics import f64, normal

import tracea_jax as tracea
from tracea_jax.transform import transform

pytestmark = pytest.mark.usefixtures("calls_only")


def wide(y, b, r):
    return jax.nn.relu(y.astype("float32") + b + r.astype("float32"))


def test_steps_in_float32_belong_to_a_narrow_convolution_if_its_result_is_narrow():
    x, w = (a.astype(jnp.bfloat16) for a in images(2, 7, 5, 3))
    r = normal(2, 7, 5, C, dtype="bfloat16")

    def narrow(y, b, r):
        return wide(y, b, r).astype("bfloat16")

    args = x, w, normal(C), r
    (e,) = equations(transform(after_conv(narrow)), *args, name="tracea_conv2d")
    assert str(e.params["epilogue"]) == "bias+relu+residual"
    bias, residual = e.invars[2:]
    assert (bias.aval.dtype, residual.aval.dtype) == (jnp.float32, jnp.bfloat16)
    expected = exactly(lambda *a: jax.nn.relu(conv(*a[:2]) + a[2] + a[3]), *args)
    error = np.abs(f64(transform(after_conv(narrow))(*args)) - expected)
    assert (error <= 2.0**-8 * np.abs(expected) + 1e-6).all()


AFTER_NARROW = {
    "bias": (lambda y, b: y.astype("float32") + b, "bias"),
    "promoted": (lambda y, b: y + b, "bias"),
    "activation": (lambda y, b: jax.nn.relu(y.astype("float32") - b), "bias+relu"),
    "scale": (lambda y, b: y.astype("float32") * b, "none"),
    "norm": (lambda y, b: (y - b) * lax.rsqrt(b * b + 1e-5) + b, "bias"),
    "residual": (lambda y, b: y + (b + jnp.zeros(y.shape)), "residual"),
}


@pytest.mark.parametrize("implementation", ["xla", "tracea"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_rounding_comes_before_steps_in_float32(dtype, implementation):
    """XLA leaves out that of bfloat16; that of float16 stays, for it has infinities."""
    x, w = (a.astype(dtype) for a in images(2, 7, 5, 3))
    b = normal(C)
    for name, (follow, epilogue) in AFTER_NARROW.items():
        f = after_conv(follow)
        if dtype == "bfloat16":
            assert sites(f, x, w, b) == [epilogue], name
        else:
            assert sites(f, x, w, b) == ["none"], name
        expected = exactly(f, x, w, b)
        with tracea.options(implementation=implementation):
            found = jax.jit(transform(f))(x, w, b)
        plain = jax.jit(f)(x, w, b)
        assert found.dtype == plain.dtype == jnp.float32
        error, usual = (np.abs(f64(y) - expected).mean() for y in (found, plain))
        assert error <= 1.1 * usual + 1e-7, name


@pytest.mark.parametrize("implementation", ["xla", "tracea"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_in_float32_are_rounded_once(dtype, implementation):
    """Before the result is narrow, whatever the operands of the convolution are."""
    x, w = images(2, 7, 5, 3)
    args = x.astype(dtype), w.astype(dtype), normal(C)

    def of_narrow(x, w, b):
        y = conv(x, w, preferred_element_type=jnp.float32)
        return jax.nn.gelu(y + b).astype(dtype)

    def of_wide(x, w, b):
        y = conv(x.astype("float32"), w.astype("float32"))
        return jax.nn.gelu(y + b).astype(dtype)

    expected = exactly(lambda x, w, b: jax.nn.gelu(conv(x, w) + b), *args)
    for f in (of_narrow, of_wide):
        assert sites(f, *args) == ["bias+gelu"]
        with tracea.options(implementation=implementation):
            found = jax.jit(transform(f))(*args)
        error, usual = (
            np.abs(f64(y) - expected).mean() for y in (found, jax.jit(f)(*args))
        )
        assert error <= 1.1 * usual
