"""Elementwise functions in numpy, and operands that try them, for their tests."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tracea_jax.problem.elementwise import ELEMENTS, FUNCTIONS

DTYPES = tuple(ELEMENTS)
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -3.0, 1e-40, -5e-324, 3e38, 1e308)
# (function, side of the scalar): all that the table has.
FORMS = [
    (name, side)
    for name, row in FUNCTIONS.items()
    for side in ("none", "left", "right")[: 1 if row.operands == 1 else 3]
]


def special(dtype: str) -> np.ndarray:
    """Every number of SPECIAL; of complex ones every pair."""
    with np.errstate(over="ignore"):
        if dtype.startswith("complex"):
            pairs = itertools.product(SPECIAL, SPECIAL)
            return np.array([complex(*pair) for pair in pairs]).astype(dtype)
        return np.array(SPECIAL).astype(dtype)


def random(dtype: str, size: int, seed: int = 0) -> np.ndarray:
    """Numbers of every magnitude that the dtype has, and of either sign."""
    rng = np.random.default_rng(seed)
    _, part = ELEMENTS[dtype]
    most = np.log10(np.finfo(part).max) - 1

    def parts() -> np.ndarray:
        return rng.standard_normal(size) * 10 ** rng.uniform(-most, most, size)

    values = parts() + 1j * parts() if dtype.startswith("complex") else parts()
    return values.astype(dtype)


def operands(function: str, side: str, dtype: str, size: int = 331) -> list[np.ndarray]:
    """Special numbers in every pair, and random ones, of a function with a scalar."""
    found = special(dtype)
    x = np.concatenate([np.repeat(found, len(found)), random(dtype, size)])
    y = np.concatenate([np.tile(found, len(found)), random(dtype, size, seed=1)])
    near = np.random.default_rng(2).standard_normal((2, size)).astype(dtype)
    x, y = np.concatenate([x, near[0]]), np.concatenate([y, near[1]])
    if FUNCTIONS[function].operands == 1:
        return [x]
    number = random(dtype, 1, seed=3).reshape(())
    return {"none": [x, y], "left": [number, y], "right": [x, number]}[side]


def expected(function: str, *arrays: Any) -> np.ndarray:
    """The result, each operation rounded once, in the dtype of the operands."""
    with np.errstate(all="ignore"):
        if not np.iscomplexobj(arrays[0]) or function not in ("multiply", "abs"):
            return getattr(np, function)(*arrays)
        x: Any = arrays[0]
        if function == "abs":
            wide = np.hypot(x.real.astype(np.float64), x.imag.astype(np.float64))
            return wide.astype(x.real.dtype)
        y: Any
        x, y = np.broadcast_arrays(*arrays)
        out = np.empty(x.shape, x.dtype)  # numpy's own may fuse a product and a sum
        out.real = x.real * y.real - x.imag * y.imag
        out.imag = x.real * y.imag + x.imag * y.real
        return out


def assert_same(result: Any, wanted: np.ndarray, units: int = 0) -> None:
    """Asserts equal bits, but that any NaN equals any other.

    Args:
      units: by which results may differ in the last place.
    """
    found = np.asarray(result)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    part = np.finfo(wanted.dtype).dtype
    found, wanted = (np.atleast_1d(a).view(part) for a in (found, wanted))
    is_nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    whole = np.dtype(f"int{8 * part.itemsize}")
    ours, theirs = (a[~is_nan].view(whole) for a in (found, wanted))
    if units:
        np.testing.assert_array_less(np.abs(ours - theirs), units + 1)
    else:
        np.testing.assert_array_equal(ours, theirs)


def units_of(function: str, dtype: str) -> int:
    """How far results may be from ``expected``, in units of the last place."""
    return 1 if function == "abs" and dtype.startswith("complex") else 0
