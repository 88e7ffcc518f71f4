"""Elementwise functions on a GPU: the same bits as on a CPU, and 64-bit sizes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elementwise import (
    DTYPES,
    FORMS,
    assert_same,
    expected,
    operands,
    random,
    units_of,
)

from tracea_jax.ops import elementwise

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


def call(function: str, *arrays: Any, **how: Any) -> jax.Array:
    how = {"implementation": "elementwise_cuda", **how}
    return getattr(elementwise, function)(*arrays, **how)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_function_has_the_bits_that_ieee_defines(dtype):
    arrays = {form: operands(*form, dtype, size=20_011) for form in FORMS}
    with jax.enable_x64(True):
        results = jax.jit(
            lambda arrays: {(f, s): call(f, *xs) for (f, s), xs in arrays.items()}
        )(arrays)
    for form, result in results.items():
        wanted = expected(form[0], *arrays[form])
        assert_same(result, wanted, units_of(form[0], dtype))


@pytest.mark.parametrize("threads", [128, 256, 512])
@pytest.mark.parametrize("packs", [1, 2, 4])
def test_every_config_at_a_size_that_no_tile_divides(threads, packs):
    config = {"threads": threads, "packs": packs}
    x, y = random("float32", 100_003), random("float32", 100_003, seed=1)
    assert_same(call("add", x, y, config=config), expected("add", x, y))


@pytest.mark.parametrize("size", [1, 3, 4, 2047, 2048, 2049])
def test_one_config_at_every_size(size):
    for dtype in ("float32", "complex64"):
        x = random(dtype, size)
        assert_same(call("multiply", x, x[0]), expected("multiply", x, x[:1]))


def test_more_elements_than_31_bits_count():
    size = 2**31 + 5
    x = jnp.arange(size, dtype=jnp.uint32).astype(jnp.float32)
    result = jax.jit(lambda x: call("add", x, 1.0))(x)
    for part in (slice(0, 9), slice(2**30, 2**30 + 9), slice(size - 9, size)):
        np.testing.assert_array_equal(result[part], x[part] + 1)
    assert int(jnp.sum(result != x + 1)) == 0
