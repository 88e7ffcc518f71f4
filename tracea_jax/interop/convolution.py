"""Convolutions of arrays of JAX as other libraries describe them, on ``ops.conv2d``.

``forward`` and ``gradients`` are compiled once for each shape and geometry; ``as_lax``
takes the arguments of ``lax.conv_general_dilated``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tracea_jax.ops import conv2d
from tracea_jax.ops.common.promotion import promoted
from tracea_jax.typing import Implementation

_TO_HWIO = {"OIHW": (2, 3, 1, 0), "OHWI": (1, 2, 3, 0)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """All but the arrays of a convolution.

    Attributes:
      strides, padding, dilation, groups, precision, implementation: as of
        ``ops.conv2d``.
      weights: the order of the weights' dimensions, "OIHW" or "OHWI".
    """

    strides: tuple[int, int]
    padding: str | tuple[tuple[int, int], tuple[int, int]]
    dilation: tuple[int, int]
    groups: int
    precision: str | None
    implementation: Implementation | None
    weights: str


@functools.partial(jax.jit, static_argnames="geometry")
def forward(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, *, geometry: Geometry
) -> jax.Array:
    """conv(x, w) + bias of (batch, height, width, channels)."""
    g = geometry
    return conv2d(
        x,
        jnp.transpose(w, _TO_HWIO[g.weights]),
        bias=bias,
        strides=g.strides,
        padding=g.padding,
        dilation=g.dilation,
        groups=g.groups,
        precision=g.precision,
        implementation=g.implementation,
    )


@functools.partial(jax.jit, static_argnames=("geometry", "wanted"))
def gradients(
    x: jax.Array,
    w: jax.Array,
    cotangent: jax.Array,
    *,
    geometry: Geometry,
    wanted: tuple[bool, bool, bool],
) -> tuple[jax.Array | None, ...]:
    """The gradients of x, w and bias that are wanted, None in place of the others."""
    operands = {"x": x, "w": w}
    asked = {
        n: operands[n] for n, is_asked in zip("xw", wanted[:2], strict=True) if is_asked
    }

    def of_asked(asked: dict[str, jax.Array]) -> jax.Array:
        given = {**operands, **asked}
        return forward(given["x"], given["w"], None, geometry=geometry)

    found: dict[str, jax.Array] = {}
    if asked:
        (found,) = jax.vjp(of_asked, asked)[1](cotangent)
    if wanted[2]:
        wide = promoted(cotangent.dtype, jnp.float32)
        total = jnp.sum(cotangent, axis=(0, 1, 2), dtype=wide)
        found["bias"] = total.astype(cotangent.dtype)
    return tuple(found.get(name) for name in ("x", "w", "bias"))


def as_lax(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    **more: Any,
) -> jax.Array:
    """``lax.conv_general_dilated``, which still computes what ``ops.conv2d`` cannot."""
    is_known = (
        lhs.ndim == 4
        and _is_one(lhs_dilation)
        and batch_group_count == 1
        and _is_nhwc(lhs, rhs, dimension_numbers)
        and not any(value is not None for value in more.values())
    )
    if not is_known:
        return lax.conv_general_dilated(
            lhs,
            rhs,
            window_strides,
            padding,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            dimension_numbers=dimension_numbers,
            feature_group_count=feature_group_count,
            batch_group_count=batch_group_count,
            precision=precision,
            preferred_element_type=preferred_element_type,
            **more,
        )
    return conv2d(
        lhs,
        rhs,
        strides=tuple(window_strides),
        padding=padding if isinstance(padding, str) else tuple(map(tuple, padding)),
        dilation=tuple(rhs_dilation or (1, 1)),
        groups=feature_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def _is_one(dilation: Sequence[int] | None) -> bool:
    return dilation is None or all(d == 1 for d in dilation)


def _is_nhwc(lhs: Any, rhs: Any, numbers: Any) -> bool:
    found = lax.conv_dimension_numbers(lhs.shape, rhs.shape, numbers)
    return found == lax.conv_dimension_numbers(
        lhs.shape, rhs.shape, ("NHWC", "HWIO", "NHWC")
    )
