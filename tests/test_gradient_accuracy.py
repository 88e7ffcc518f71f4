"""Gradients of float32 results of narrow operands: as exact as the plain program's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import f64, normal
from slow_cases import slow_unless
from transforms import in_f64

from tracea_jax.ops import conv2d, gated_matmul, matmul
from tracea_jax.transform import transform

pytestmark = pytest.mark.once


def wide(x, w):
    out = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.matmul(x, w, preferred_element_type=out)


def convolution(x, w):
    y = lax.conv_general_dilated(
        *(x, w, (1, 1), "SAME"), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y.astype(jnp.promote_types(y.dtype, jnp.float32))


FACTORS = (32, 64), (64, 48), (64, 48)
IMAGES = (2, 9, 9, 16), (3, 3, 16, 24)
PROGRAMS = {
    "product": (wide, FACTORS[:2]),
    "activation": (lambda x, w: jax.nn.gelu(wide(x, w)), FACTORS[:2]),
    "batches": (wide, [(3, *shape) for shape in FACTORS[:2]]),
    "shared": (wide, [(3, 32, 64), FACTORS[1]]),
    "gated": (lambda x, w, u: jax.nn.silu(wide(x, w)) * wide(x, u), FACTORS),
    "convolution": (convolution, IMAGES),
    "steps": (lambda x, w: jax.nn.relu(convolution(x, w) * 0.5 + 1), IMAGES),
}
OPS = {
    "product": matmul,
    "activation": functools.partial(matmul, activation="gelu"),
    "batches": matmul,
    "shared": matmul,
    "gated": gated_matmul,
    "convolution": conv2d,
}


def gradients(f, ct, *args):
    result, pull = jax.vjp(f, *args)
    return pull(ct.astype(result.dtype))


def error(found, exact):
    """The root of the mean square, relative to that of the exact values."""
    return np.sqrt(((f64(found) - exact) ** 2).mean() / (exact**2).mean())


def assert_as_exact(f, plain, *args):
    """Asserts errors of gradients that are at most 1.05 times the plain program's."""
    ct = normal(*jax.eval_shape(plain, *args).shape, seed=1)
    found, usual = (
        jax.jit(functools.partial(gradients, g))(ct, *args) for g in (f, plain)
    )
    exact = in_f64(functools.partial(gradients, plain), ct, *args)
    for x, y, z in zip(found, usual, exact, strict=True):
        assert x.dtype == y.dtype == args[0].dtype
        assert error(x, z) <= 1.05 * error(y, z)


@pytest.mark.parametrize("dtype", slow_unless(["bfloat16"], ["bfloat16", "float16"]))
@pytest.mark.parametrize("name", PROGRAMS)
def test_rewritten_programs(name, dtype):
    f, shapes = PROGRAMS[name]
    args = [normal(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    assert_as_exact(transform(f), f, *args)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPS)
def test_ops(name, dtype):
    plain, shapes = PROGRAMS[name]
    args = [normal(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    op = functools.partial(OPS[name], preferred_element_type=jnp.float32)
    assert_as_exact(op, plain, *args)
