"""A convolution whose windows do not overlap, as views of one matrix product.

Which product it is says ``variants.conv2d_product``. Its rows are the pixels of y; its
columns, or the terms of its sums, are the taps of a window, in the order in which the
weights have them in memory. So weights are only reshaped, and x is cut into windows: a
reshape, too, if the kernel is 1 x 1 without strides. The gradient of x is put together
by the transpose of that cut. NCHW images are transposed on the way, which XLA drops
where the program has the inverse. Caller: the primitive, for the rule of the variant.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax

from tracea_jax.ops.common.epilogue import ACTIVATION_FUNCTIONS
from tracea_jax.ops.common.typed import lax, linear_transpose
from tracea_jax.ops.conv2d.directions import ROLES, SPECS
from tracea_jax.ops.matmul.definition import split
from tracea_jax.ops.matmul.primitive import bind
from tracea_jax.problem import Conv2dProblem, Epilogue
from tracea_jax.variants.conv2d_product import (
    Windows,
    product_epilogue,
    product_of,
    windows_of,
)


def convolved(
    operands: Sequence[jax.Array],
    problem: Conv2dProblem,
    *,
    epilogue: Epilogue,
    **how: Any,
) -> list[jax.Array]:
    """The results of the convolution's primitive, by those of a product's.

    Args:
      operands: of the convolution.
      problem: what they ask; ``variants.conv2d_product`` can serve it.
      epilogue: the convolution's parameter.
      **how: ``out``, ``precision`` and ``implementation`` of the product.
    """
    lhs, rhs, bias, residual = split(operands, epilogue)
    first, second, _ = ROLES[problem.direction]
    factors = [_matrix(lhs, first, problem), _matrix(rhs, second, problem)]
    if problem.direction == "weight_grad" and problem.layout == "nchw":
        factors.reverse()  # dw is (out channels, taps)
    if bias is not None:
        factors.append(bias)
    if residual is not None:
        factors.append(_matrix(residual, "y", problem))
    results = bind(
        *factors,
        layout=product_of(problem).layout,
        epilogue=product_epilogue(epilogue),
        config=None,
        **how,
    )
    return [_array(y, problem) for y in _activated(results, epilogue)]


def _activated(results: list[jax.Array], epilogue: Epilogue) -> list[jax.Array]:
    """The convolution's results: with the activation that the product left."""
    if product_epilogue(epilogue) == epilogue:
        return results
    (z,) = results
    y = ACTIVATION_FUNCTIONS[epilogue.activation](z)
    return [y, z] if epilogue.save_preactivation else [y]


def _matrix(x: jax.Array, role: str, problem: Conv2dProblem) -> jax.Array:
    """x cut into windows, or y by pixels, or w by taps: a matrix in memory's order."""
    if role == "x":
        return _windows(x, problem)
    if role == "y":
        return _channels_last(x, problem).reshape(-1, problem.out_channels)
    o = SPECS[problem.layout]["w"][0]
    shape = (-1, x.shape[o]) if o else (x.shape[o], -1)
    return x.reshape(shape)


def _array(matrix: jax.Array, problem: Conv2dProblem) -> jax.Array:
    """The convolution's result that a product's is."""
    p = problem
    if p.direction == "forward":
        y = matrix.reshape(p.batch, *p.out_size, p.out_channels)
        return y if p.layout == "nhwc" else y.transpose(0, 3, 1, 2)
    kernel, channels = (p.kernel_height, p.kernel_width), p.in_channels
    if p.direction == "weight_grad":
        if p.layout == "nhwc":
            return matrix.reshape(*kernel, channels, p.out_channels)
        return matrix.reshape(p.out_channels, channels, *kernel)
    image = (p.height, p.width, channels)
    shape = (p.batch, *(image if p.layout == "nhwc" else (channels, *image[:2])))
    x = jax.ShapeDtypeStruct(shape, matrix.dtype)
    (dx,) = linear_transpose(functools.partial(_windows, problem=p), x)(matrix)
    return dx


def _channels_last(x: jax.Array, problem: Conv2dProblem) -> jax.Array:
    return x if problem.layout == "nhwc" else x.transpose(0, 2, 3, 1)


def _windows(x: jax.Array, problem: Conv2dProblem) -> jax.Array:
    """(pixels of y, taps) of an image; taps are in the order of the weights."""
    _, c, rows, columns = SPECS[problem.layout]["x"]
    high, wide = windows_of(problem)
    x = _cut(_cut(x, columns, wide), rows, high)
    # nhwc: (N, P, R, Q, S, C); nchw: (N, C, P, R, Q, S)
    order = (0, 1, 3, 2, 4, 5) if c == 3 else (0, 2, 4, 1, 3, 5)
    pixels = math.prod((problem.batch, *problem.out_size))
    return x.transpose(order).reshape(pixels, -1)


def _cut(x: jax.Array, dim: int, windows: Windows) -> jax.Array:
    """x with a dimension in two: windows, and the taps in each."""
    before, after = windows.before, windows.after
    if before or after:
        config = [(0, 0, 0)] * x.ndim
        config[dim] = (before, after, 0)
        x = lax.pad(x, x.dtype.type(0), config)
    sizes = (windows.count, windows.step)
    x = x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])
    return lax.slice_in_dim(x, 0, windows.taps, axis=dim + 1)
