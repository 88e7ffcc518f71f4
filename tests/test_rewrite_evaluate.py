"""Equations that the rewrite evaluates, against XLA's results."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tracea_jax.rewrite.evaluate import evaluate, is_known

FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
DTYPES = ("bool", *INTEGERS, *FLOATS)
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.75, 1.7, -2.5, 3.0, 7.0, 100.0, -127.0, 128.0]
NUMBERS += [200.0, -300.0, 6e4, -7e4, 2.0**31, -(2.0**31), 3e9, 3e38, -1e30, 1e-9, 1e-3]
SPECIAL = [np.nan, np.inf, -np.inf]


def probes(dtype):
    """All numbers, as near as the dtype has them."""
    x = np.asarray(NUMBERS + SPECIAL, np.float64)
    if dtype == "bool":
        return np.array([False, True])
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        whole = np.clip(np.nan_to_num(np.trunc(x)), limits.min, limits.max)
        ends = [limits.min, limits.min + 1, limits.max - 1, limits.max]
        return np.unique(np.concatenate([whole.astype(dtype), np.array(ends, dtype)]))
    dtype, info = jnp.dtype(dtype), jnp.finfo(dtype)
    ends = np.array([info.max, info.min, info.tiny, 3 * info.tiny]).astype(dtype)
    with np.errstate(over="ignore"):
        return np.concatenate([x.astype(dtype), ends])


def compare(f, *operands, tolerance=0.0):
    """Asserts that the only equation of f has the value that XLA computes."""
    compare_all([f], *operands, tolerance=tolerance)


def compare_all(functions, *operands, tolerance=0.0):
    """The same of many functions, compiled at once."""
    every = jax.jit(lambda *operands: [f(*operands) for f in functions])(*operands)
    for f, expected in zip(functions, every, strict=True):
        (eqn,) = jax.make_jaxpr(f)(*operands).eqns
        found = evaluate(eqn, *operands)
        assert found is not None, eqn
        assert_equal(found, np.asarray(expected), tolerance)


def assert_equal(found, expected, tolerance):
    assert found.dtype == expected.dtype
    if expected.dtype.kind not in "biu":
        # XLA's CPU backend takes what is below the smallest normal number for zero.
        flushed = float(jnp.finfo(expected.dtype).tiny)
        found, expected = found.astype(np.float64), expected.astype(np.float64)
        close = functools.partial(np.testing.assert_allclose, equal_nan=True)
        close(found, expected, rtol=tolerance, atol=flushed)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("old", DTYPES)
def test_conversions(old):
    to_new = [
        functools.partial(lax.convert_element_type, new_dtype=new)
        for new in DTYPES
        if new != old
    ]
    compare_all(to_new, probes(old))


BINARY = (lax.add, lax.sub, lax.mul, lax.max, lax.min, lax.div, lax.rem)
COMPARISONS = (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
BITS = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor)
SHIFTS = (lax.shift_left, lax.shift_right_arithmetic, lax.shift_right_logical)


def pairs(dtype):
    x = probes(dtype)
    return np.repeat(x, len(x)), np.tile(x, len(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_on_two_values(dtype):
    functions = list(COMPARISONS)
    if dtype in ("bool", *INTEGERS):
        functions += BITS
    if dtype in INTEGERS:
        functions += SHIFTS + BINARY
    if dtype in ("float32", "bfloat16", "float16"):
        functions += BINARY[:5]
    compare_all(functions, *pairs(dtype))


UNARY = (lax.neg, lax.abs, lax.sign)
ROUNDING = (lax.floor, lax.ceil, lax.is_finite)
ELEMENTARY = (lax.exp, lax.log, lax.tanh, lax.logistic, lax.sqrt, lax.rsqrt, lax.erf)


@pytest.mark.parametrize("dtype", [*INTEGERS, "float32", "bfloat16", "float16"])
def test_operations_on_one_value(dtype):
    x = probes(dtype)
    functions = list(UNARY if dtype not in ("uint8", "uint16", "uint32") else UNARY[:1])
    functions += [lax.bitwise_not] if dtype in INTEGERS else ROUNDING
    compare_all(functions, x)
    compare(functools.partial(lax.integer_pow, y=3), x, tolerance=2e-2)
    if dtype not in INTEGERS:
        tolerance = 8 * float(jnp.finfo(dtype).eps)
        compare_all(ELEMENTARY, x, tolerance=tolerance)


def test_selections():
    x = np.arange(6, dtype=np.int8)
    y, z = -x, np.full(6, 7, np.int8)
    compare(lax.select_n, np.array([True, False] * 3), x, y)
    compare(lax.select_n, np.array([0, 1, 2, 2, 1, 0], np.int32), x, y, z)
    compare(lax.clamp, x, y, z)


def test_what_is_not_evaluated():
    (eqn,) = jax.make_jaxpr(lax.cumsum)(np.arange(3.0)).eqns
    assert evaluate(eqn, np.arange(3.0)) is None
    assert not is_known(jax.random.key(0).dtype)
    x = np.array([1j])
    (eqn,) = jax.make_jaxpr(lax.neg)(x).eqns
    assert evaluate(eqn, x) is None
