"""Rows of neighbouring devices, next to a device's own: a halo.

Callers: the sharding rules of ops with windows, conv2d and max_pool.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tracea_jax.ops.common.sharding import Axes
from tracea_jax.ops.common.typed import full, lax


def exchanged(
    x: jax.Array,
    dimension: int,
    low: int,
    high: int,
    axes: Axes,
    count: int,
    fill: float = 0.0,
) -> jax.Array:
    """x with ``low`` rows of the devices before it, and ``high`` of those after it.

    Args:
      x: the rows of this device.
      dimension: along which they are rows.
      low, high: how many; a negative number of rows is cut off.
      axes: of the mesh, over which the rows are split.
      count: of devices there.
      fill: the value of rows before the first device and behind the last one.
    """
    before = _received(x, dimension, low, axes, count, 1, fill)
    after = _received(x, dimension, high, axes, count, -1, fill)
    whole = jnp.concatenate([*before, x, *after], dimension)
    start, stop = max(-low, 0), whole.shape[dimension] - max(-high, 0)
    return lax.slice_in_dim(whole, start, stop, axis=dimension)


def _received(
    x: jax.Array,
    dimension: int,
    wanted: int,
    axes: Axes,
    count: int,
    direction: int,
    fill: float,
) -> list[jax.Array]:
    """Rows of the devices before (direction 1) or after (-1), in their order."""
    rows, found, hop = x.shape[dimension], list[jax.Array](), 1
    while wanted > 0:
        taken = min(wanted, rows)
        start = rows - taken if direction > 0 else 0
        part = lax.slice_in_dim(x, start, start + taken, axis=dimension)
        found.append(_shifted(part, direction * hop, axes, count, fill))
        wanted, hop = wanted - taken, hop + 1
    return found[::-1] if direction > 0 else found


def _shifted(x: jax.Array, by: int, axes: Axes, count: int, fill: float) -> jax.Array:
    """The array of the device ``by`` places before this one."""
    pairs = [(i, i + by) for i in range(count) if 0 <= i + by < count]
    outside = full(x.shape, fill, x.dtype)
    if not pairs:
        return outside
    received = lax.ppermute(x, axes, pairs)  # zero where there is no device
    if fill == 0:
        return received
    source = lax.axis_index(axes) - by
    return jnp.where((source >= 0) & (source < count), received, outside)
