"""Parts of random programs: arrays, numbers, and masks of captured arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numerics import array
from value_readings import BITS, COMPARISONS, FLOATS, convert

INTEGERS = ("int8", "uint8", "int16", "int32", "uint32")
DTYPES = ("bool", *INTEGERS, *FLOATS, "float8_e4m3fn", "float8_e5m2")
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-38, 1e-30, 1e30, 3e38, -3e38)
# Numbers whose products are exact in every dtype, so that nothing may differ at all.
EXACT = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)


class Draws:
    """Draws of one generator of random numbers."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self.dtype: str = self.pick(
            ["float32"] * 3 + ["bfloat16", "bfloat16", "float16"]
        )
        self.special = self.pick([0.0, 0.0, 0.3])
        self.is_exact = self.chance(0.5)
        self.narrow = {self.dtype} - {"float32"}
        self.keeps_zeros = self.sums_exactly = True

    def pick(self, values: Any) -> Any:
        return list(values)[self.rng.integers(len(values))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    @np.errstate(all="ignore")
    def array(
        self, *shape: int, dtype: str | None = None, special: Any = SPECIAL
    ) -> jax.Array:
        """Numbers of any dtype, with some special ones if the program has them."""
        dtype = dtype or self.dtype
        if dtype == "bool":
            return array(self.rng.random(shape) < self.pick([0.5, 0.9, 1.0]))
        if dtype in INTEGERS:
            limits = np.iinfo(dtype)
            low, high = self.pick([(0, 2), (-3, 4), (1, 2), (-200, 300)])
            x = self.rng.integers(low, high, shape)
            return array(np.clip(x, limits.min, limits.max).astype(dtype))
        if self.is_exact:
            x = self.rng.choice(EXACT, shape)
        else:
            x = self.rng.standard_normal(shape)
        x = x.astype("float32")
        if x.size and self.chance(self.special):
            for _ in range(self.rng.integers(1, 3)):
                x.flat[self.rng.integers(x.size)] = self.pick(special)
        return array(x.astype(jnp.dtype(dtype)))

    def used(self, dtype: str) -> str:
        """The dtype, noted for what roundings there are."""
        if dtype in ("bfloat16", "float16"):
            self.narrow.add(dtype)
        return dtype

    # -- masks of captured arrays

    def mask(self, rows: int, columns: int, depth: int) -> Callable[[], Any]:
        kind = self.pick(["compare", "compare", "and", "or", "not", "where", "leaf"])
        shape = (rows, columns)
        if depth == 0 or kind == "leaf":
            row, column = np.indices(shape)
            seed = self.rng.integers(4)
            value = self.pick(
                [
                    row >= column,
                    np.abs(row - column) <= seed,
                    self.rng.random(shape) < 0.6,
                    np.ones(shape, bool),
                ]
            )
            return lambda: jnp.asarray(value)
        if kind == "compare":
            f = self.pick(COMPARISONS)
            x, y = (self.table(rows, columns, depth - 1) for _ in range(2))
            dtype = self.pick(["int32", "int8", "float32", "bfloat16"])
            return lambda: f(convert(x(), dtype), convert(y(), dtype))
        x, y, z = (self.mask(rows, columns, depth - 1) for _ in range(3))
        return {
            "and": lambda: x() & y(),
            "or": lambda: x() | y(),
            "not": lambda: ~x(),
            "where": lambda: jnp.where(x(), y(), z()),
        }[kind]

    def table(self, rows: int, columns: int, depth: int) -> Callable[[], Any]:
        """Numbers of some dtype, of captured arrays and positions."""
        dtype, shape = self.pick(DTYPES), (rows, columns)
        kind = self.pick(["leaf", "leaf", "cast", "choice", "binary", "bits", "number"])
        if kind == "number":
            c = jnp.float32(
                self.pick([0, 1, 2, -1, 127, 200, 0.5, -1.5, np.nan, np.inf])
            )
            return lambda: jnp.broadcast_to(convert(c, dtype), shape)
        if depth == 0 or kind == "leaf":
            factor = self.pick([1, 1, 1, -1, 2, 50])
            row, column = np.indices(shape)
            if self.chance(0.4):
                axis = self.pick([0, 1])
                own = dtype if dtype in ("int8", "int32", "float32") else "int32"
                by = jnp.asarray(factor, own)
                return lambda: lax.broadcasted_iota(own, shape, axis) * by
            value = self.pick([row, column, row - column]).astype("int32") * factor
            return lambda: jnp.asarray(value)
        if kind == "cast":
            x = self.table(rows, columns, depth - 1)
            return lambda: convert(x(), dtype)
        if kind == "choice":
            mask = self.mask(rows, columns, depth - 1)
            a, b = self.pick([0, 1, 1.7, 257]), self.pick([0, 0.5, -1, 256])
            return lambda: convert(jnp.where(mask(), a, b), dtype)
        x, y = (self.table(rows, columns, depth - 1) for _ in range(2))
        f = self.pick(BITS if kind == "bits" else [jnp.add, jnp.multiply, jnp.maximum])
        own = dtype if kind == "binary" and dtype in INTEGERS else "int32"
        return lambda: f(convert(x(), own), convert(y(), own))
