"""The functions that programs call, ``tracea_jax.ops.elementwise``."""

from __future__ import annotations

import functools
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tracea_jax import variants
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.typed import asarray, eval_shape, jit
from tracea_jax.ops.elementwise.primitive import bind
from tracea_jax.typing import Implementation

_OPERANDS = (jax.Array, np.ndarray, np.generic, Number)


def add(
    x: ArrayLike,
    y: ArrayLike,
    /,
    *,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """x + y, element by element.

    Args:
      x, y: arrays of one shape, or one of them a number. Other shapes do not broadcast.
        They are promoted to one dtype as in jnp.
      implementation: None for the best known, "xla", "tracea" (kernels of ours or an
        error with every reason), "elementwise_cpu" or "elementwise_cuda".
      config: explicit config of the variant.

    Returns:
      An array of that shape and dtype. Kernels exist for float32, float64, complex64
      and complex128; XLA computes others.

    Raises:
      ValueError: on shapes that differ, an unknown implementation or a wrong config.
      TypeError: on operands that are no arrays or numbers.
    """
    return _call("add", x, y, implementation=implementation, config=config)


def subtract(
    x: ArrayLike,
    y: ArrayLike,
    /,
    *,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """x - y, element by element; arguments are those of ``add``."""
    return _call("subtract", x, y, implementation=implementation, config=config)


def multiply(
    x: ArrayLike,
    y: ArrayLike,
    /,
    *,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """x * y, element by element; arguments are those of ``add``.

    Complex ones are (re re' - im im', re im' + im re'), where each product and each sum
    rounds. XLA and numpy may fuse some of these, as suits the processor.
    """
    return _call("multiply", x, y, implementation=implementation, config=config)


def divide(
    x: ArrayLike,
    y: ArrayLike,
    /,
    *,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """x / y, element by element; arguments are those of ``add``.

    Complex ones are divided by Smith's algorithm (Algorithm 116, 1962), as in numpy:
    with p the larger part of y in magnitude and q the other one, products of x with 1
    and q / p are multiplied by 1 / (p + q (q / p)). No part of y is squared. Where both
    are infinite, the kernels have NaN, as numpy; XLA has zero. Integers are divided as
    in jnp.
    """
    return _call("divide", x, y, implementation=implementation, config=config)


def negative(
    x: ArrayLike,
    /,
    *,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """-x, element by element: the sign of each part changes, of zeros too.

    Args:
      x: an array, or a number.
      implementation, config: as of ``add``.
    """
    return _call("negative", x, implementation=implementation, config=config)


def abs(
    x: ArrayLike,
    /,
    *,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """``|x|``, element by element; of complex elements their length, a real number.

    A length overflows only if it is too large itself: both parts are scaled by a power
    of two where their squares would overflow or vanish. It is within a unit of the last
    place.

    Args:
      x: an array, or a number.
      implementation, config: as of ``add``.
    """
    return _call("abs", x, implementation=implementation, config=config)


def _call(function: str, *operands: Any, implementation: Any, config: Any) -> jax.Array:
    variants.check_implementation("elementwise", implementation)
    for x in operands:
        if not isinstance(x, _OPERANDS) and not hasattr(x, "__jax_array__"):
            raise TypeError(
                f"elementwise.{function} takes arrays and numbers, not a "
                f"{type(x).__name__} (jnp.asarray makes an array of a list)"
            )
    return _elementwise(
        *operands,
        function=function,
        implementation=implementation,
        config=lowering.hashable_config(config),
    )


@functools.partial(
    jit, static_argnames=("function", "implementation", "config"), inline=True
)
def _elementwise(*operands: Any, function: str, **how: Any) -> jax.Array:
    shapes = [jnp.shape(x) for x in operands]
    arrays = {shape for shape in shapes if shape != ()}
    if len(arrays) > 1:
        raise ValueError(
            f"elementwise.{function} takes arrays of one shape, or an array and a "
            f"number; the shapes are {shapes[0]} and {shapes[1]} "
            "(jnp.broadcast_to makes them equal)"
        )
    dtype: Any = jnp.result_type(*operands)
    if function == "divide":  # of integers it is a float, as wide as jnp has it
        dtype = eval_shape(jnp.divide, *operands).dtype
    return bind(*(asarray(x, dtype) for x in operands), function=function, **how)
