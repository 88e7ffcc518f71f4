"""Random operands, float64 results and the error that rounding allows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from tracea_jax.problem import ACTIVATIONS, Epilogue

ACTIVATED = tuple(a for a in ACTIVATIONS if a != "none")


def array(x: np.ndarray) -> jax.Array:
    """The numbers as an array of JAX.

    For ``jnp.asarray`` XLA compiles a program for each shape and dtype, which takes a
    hundred times as long.
    """
    return jax.device_put(x)


def normal(*shape: int, dtype: Any = "float32", seed: int = 0) -> jax.Array:
    """Standard normal numbers; other shapes and seeds give independent ones."""
    rng = np.random.default_rng([seed, *shape])
    return array(rng.standard_normal(shape).astype(dtype))


def poison(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """NaN in memory of JAX's own, which can be donated; no program is compiled for it.

    JAX copies what does not begin at a multiple of 64 bytes, and else uses it.
    """
    wanted = np.dtype(dtype)
    room = np.empty(math.prod(shape) * wanted.itemsize + 128, np.uint8)
    start = (16 - room.ctypes.data) % 64
    nan = room[start : start + room.size - 128].view(wanted).reshape(shape)
    nan[...] = np.nan
    return jax.device_put(nan)


def shifted(arguments: Iterable[Any]) -> list[jax.Array]:
    """The arguments with each floating entry moved by up to one unit of its dtype."""

    def shift(x: Any) -> jax.Array:
        a = np.asarray(x)
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return x
        unit = a.dtype.type(jnp.finfo(a.dtype).eps)
        with np.errstate(all="ignore"):
            moved = a * (1 + unit * np.cos(9 * a))
        return array(moved.astype(a.dtype))

    return [shift(x) for x in arguments]


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def activate(z: np.ndarray, activation: str) -> np.ndarray:
    """The activation in float64, from its definition."""
    match activation:
        case "none":
            return z
        case "relu":
            return np.where(z < 0, 0, z)
        case "gelu":
            return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        case "gelu_exact":
            return 0.5 * z * special.erfc(-z / np.sqrt(2))
        case "silu":
            return z / (1 + np.exp(-z))
    raise AssertionError(activation)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """A result in float64 with the magnitude of what was summed for each entry."""

    value: np.ndarray
    scale: np.ndarray

    def assert_near(self, result: jax.Array, *, unit: float = 2.0**-24) -> None:
        """Asserts that only rounding separates a result from the exact one.

        Args:
          result: of any floating dtype; one rounding to it is allowed ...
          unit: ... beside some roundings of this unit, relative to ``scale``.
        """
        assert result.shape == self.value.shape
        rounding = float(jnp.finfo(result.dtype).eps) / 2
        tiny = float(jnp.finfo(result.dtype).tiny)
        allowed = rounding * np.abs(self.value) + 16 * unit * self.scale + tiny
        excess = np.abs(f64(result) - self.value) / allowed
        assert excess.max(initial=0) <= 1, f"{excess.max():.3g} of the allowed error"


def exact(
    a: Any,
    b: Any,
    bias: Any = None,
    activation: str = "none",
    residual: Any = None,
) -> Exact:
    """activation(a @ b + bias) + residual in float64."""
    a, b = f64(a), f64(b)
    value, scale = a @ b, np.abs(a) @ np.abs(b)
    if bias is not None:
        value, scale = value + f64(bias), scale + np.abs(f64(bias))
    value = activate(value, activation)
    if residual is not None:
        value, scale = value + f64(residual), scale + np.abs(f64(residual))
    return Exact(value=value, scale=scale)


def multiplied(product: Exact, factor: Any) -> Exact:
    """A result times an exact array."""
    factor = f64(factor)
    return Exact(value=product.value * factor, scale=product.scale * np.abs(factor))


def differentiated(product: Exact, z: Any, epilogue: Epilogue) -> list[Exact]:
    """activation'(z) times a product, and the sums of its columns if wanted."""
    slope = derivative(f64(z), epilogue.activation)
    with np.errstate(invalid="ignore"):
        value = np.where(slope == 0, 0, product.value * slope)
    # The error of a slope is one of functions about 1, also where it is 0 itself.
    y = Exact(value=value, scale=product.scale * np.maximum(np.abs(slope), 1))
    rows = tuple(range(value.ndim - 1))
    sums = Exact(value=value.sum(rows), scale=np.sqrt(np.square(y.scale).sum(rows)))
    return [y, sums] if epilogue.column_sums else [y]


def derivative(z: np.ndarray, activation: str) -> np.ndarray:
    """That of the activation in float64, from its definition."""
    match activation:
        case "none":
            return np.ones_like(z)
        case "relu":
            return np.where(z > 0, 1.0, 0.0)
        case "gelu":
            u = np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)
            du = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z**2)
            return 0.5 * (1 + np.tanh(u)) + 0.5 * z * du / np.cosh(u) ** 2
        case "gelu_exact":
            density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
            return 0.5 * special.erfc(-z / np.sqrt(2)) + z * density
        case "silu":
            s = 1 / (1 + np.exp(-z))
            return s * (1 + z * (1 - s))
    raise AssertionError(activation)


def exact_gemm(
    layout: str, epilogue: Epilogue, lhs: Any, rhs: Any, *rest: Any
) -> list[Exact]:
    """The results of a product with an epilogue: y, then z if it is saved, or sums.

    Args:
      layout: of lhs and rhs as they are stored, such as "nt".
      *rest: bias and residual, if the epilogue has them.
    """
    lhs, rhs, *others = (f64(x) for x in (lhs, rhs, *rest))
    lhs = lhs.swapaxes(-1, -2) if layout[0] == "t" else lhs
    rhs = rhs.swapaxes(-1, -2) if layout[1] == "t" else rhs
    bias = others.pop(0) if epilogue.bias != "none" else None
    if bias is not None and epilogue.bias == "batched_row":
        bias = bias[:, None]
    residual = others.pop(0) if epilogue.residual else None
    if epilogue.is_derivative:
        return differentiated(exact(lhs, rhs), residual, epilogue)
    if epilogue.residual_op == "multiply" and residual is not None:
        y = multiplied(exact(lhs, rhs, bias, epilogue.activation), residual)
    else:
        y = exact(lhs, rhs, bias, epilogue.activation, residual)
    return [y, exact(lhs, rhs, bias)] if epilogue.save_preactivation else [y]
