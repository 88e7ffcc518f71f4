"""How random programs are computed: as they are written, or rounded otherwise."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a program is computed.

    Attributes:
      is_wide: whether 16-bit values of the program are float32.
      shift: by how many units products and elementary functions are moved; 0 for none.
      seed: of random signs of the shift; None for one sign.
      overflows: receives whether a sum of finite numbers may overflow on its way: what
        it is then depends on the order of the summands.
    """

    is_wide: bool = False
    shift: float = 0.0
    seed: int | None = None
    overflows: list[bool] = dataclasses.field(default_factory=list, compare=False)

    def dtype(self, name: Any) -> Any:
        name = jnp.dtype(name).name
        return "float32" if self.is_wide and name in FLOATS else name

    def of(self, x: Any) -> Any:
        """A captured array or argument: the same numbers."""
        return jnp.asarray(x).astype(self.dtype(x.dtype))

    def near(self, y: Any, scale: Any = None) -> Any:
        """y, or a number near it.

        Args:
          y: the result of something that may be rounded otherwise.
          scale: the magnitude of what was summed; |y| if None.
        """
        if not self.shift or y.dtype.name not in FLOATS:
            return y
        sign: Any = 1.0
        if self.seed is not None:
            rng = np.random.default_rng([self.seed, *y.shape])
            sign = rng.choice([-1.0, 0.0, 1.0], y.shape).astype("float32")
        wide = y.astype("float32")
        by = jnp.abs(wide) if scale is None else scale.astype("float32")
        moved = wide + sign * self.shift * jnp.where(jnp.isfinite(by), by, 0)
        if scale is not None:
            self.overflows.append(bool(jnp.isinf(by).any()))
        return moved.astype(y.dtype)


# Exact functions, of which most are nearly relu.
CLAMPED: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "max": lambda y: jnp.maximum(y, 0),
    "where >": lambda y: jnp.where(y > 0, y, 0),
    "where <": lambda y: jnp.where(y < 0, 0, y),
    "where >=": lambda y: jnp.where(y >= 0, y, 0),
    "times sign": lambda y: y * (y > 0),
    "converted sign": lambda y: (y > 0).astype(y.dtype) * y,
    "min": lambda y: -jnp.minimum(-y, 0),
    "abs": lambda y: (y + jnp.abs(y)) / 2,
    "relu6": jax.nn.relu6,
    "finite": lambda y: jnp.maximum(jnp.nan_to_num(y), 0),
    "where finite": lambda y: jnp.where(jnp.isfinite(y), y, 0),
    "leaky": jax.nn.leaky_relu,
    "hard tanh": jax.nn.hard_tanh,
    "sign": jnp.sign,
    "negated": jnp.negative,
    "halved": lambda y: y * 0.5,
    "squared relu": lambda y: jnp.square(jax.nn.relu(y)),
}
# Elementary functions; those of GATES are sums of two that may cancel.
GATES: dict[str, Callable[[Any], Any]] = {
    "gelu": jax.nn.gelu,
    "exact gelu": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "swish": lambda y: y / (1 + jnp.exp(-y)),
    "quick gelu": lambda y: y * jax.nn.sigmoid(1.702 * y),
}
SMOOTH: dict[str, Callable[[Any], Any]] = {
    **GATES,
    "tanh": jnp.tanh,
    "gated by int": lambda y: y * jax.nn.sigmoid(y).astype("int8").astype(y.dtype),
    "log": jnp.log,
    "root": jnp.sqrt,
}
INVERSE: dict[str, Callable[[Any], Any]] = {"inverse": lambda y: 1 / y}
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "radd": lambda y, c: c + y,
    "sub": jnp.subtract,
    "rsub": lambda y, c: c - y,
    "mul": jnp.multiply,
    "rmul": lambda y, c: c * y,
    "div": jnp.divide,
    "max": jnp.maximum,
    "min": jnp.minimum,
}
BITS = (jnp.bitwise_and, jnp.bitwise_or, jnp.bitwise_xor)
SHIFTS = (lax.shift_left, lax.shift_right_arithmetic, lax.shift_right_logical)
COMPARISONS = (jnp.equal, jnp.not_equal, jnp.less, jnp.less_equal, jnp.greater)


def convert(x: Any, dtype: Any) -> Any:
    return lax.convert_element_type(x, dtype)


def is_float(y: Any) -> bool:
    return y.dtype.name in FLOATS


def near_product(reading: Reading, multiply: Any, x: Any, w: Any) -> Any:
    y = multiply(x, w)
    if not reading.shift:
        return y
    sizes = (jnp.where(jnp.isfinite(a), jnp.abs(a), 0).astype(a.dtype) for a in (x, w))
    return reading.near(y, multiply(*sizes))


def applied(reading: Reading, name: str, y: Any) -> Any:
    if name in CLAMPED:
        return CLAMPED[name](y)
    result = (SMOOTH | INVERSE)[name](y)
    if name not in GATES:
        return reading.near(result)
    return reading.near(result, jnp.where(jnp.isfinite(y), jnp.abs(y), 0))


def promoted(reading: Reading, y: Any, c: Any) -> tuple[Any, Any]:
    """Both in one dtype, the wider one; integers and booleans take the float's."""
    if y.dtype.name.startswith("float8"):
        y = convert(y, "float32")
    dtype = jnp.promote_types(y.dtype, c.dtype)
    dtype = "float32" if not jnp.issubdtype(dtype, jnp.floating) else dtype
    dtype = reading.dtype(dtype)
    return convert(y, dtype), convert(c, dtype)
