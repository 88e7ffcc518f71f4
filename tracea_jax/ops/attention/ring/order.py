"""The zigzag order of a sequence: for a whole array, and between devices.

    zigzag     an array in zigzag order, and back
    exchanged  the parts of devices in zigzag order, from parts that follow each other
    returned   the other way round

``plan`` says what the order is and why. Callers: programs, and ``attend``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tracea_jax.mistakes import flag, whole
from tracea_jax.ops.common.shapes import as_array
from tracea_jax.ops.common.typed import lax

SEQUENCE = 1  # the dimension of positions in all operands of attention


def zigzag(
    x: ArrayLike, devices: int, *, axis: int = 1, inverse: bool = False
) -> jax.Array:
    """An array in the order that balances causal ring attention, or back from it.

        tokens, positions = (zigzag(x, 4) for x in (tokens, positions))
        o = zigzag(o, 4, inverse=True)

    The axis is cut into 2 n chunks for n devices. Device r gets the chunks r and
    2n - 1 - r once the result is split evenly over the devices; see the option
    ``sequence_order="zigzag"`` of ``attention``. Whatever depends on positions, such as
    rotary embeddings, needs the positions in the same order.

    Args:
      x: an array whose size along ``axis`` is a multiple of ``devices``.
      devices: how many the axis is split over.
      axis: of positions; 1, as of arrays (batch, length, ...).
      inverse: whether x is in zigzag order, to be put into the usual one.

    Returns:
      An array like x. Where a device has an odd number of positions, the front chunks
      have one more.

    Raises:
      TypeError: on an argument of another type.
      ValueError: if the size is no multiple of ``devices``, or there is no such axis.
    """
    x, devices = as_array("x", x), whole("devices", devices)
    axis, rank = whole("axis", axis), x.ndim
    if not -rank <= axis < rank:
        raise ValueError(f"{axis=} is no axis of an array of shape {x.shape}")
    axis %= rank
    size = x.shape[axis]
    if devices < 1 or size % devices:
        raise ValueError(
            f"axis {axis} has {size} entries; it must be a multiple of {devices=}"
        )
    length = size // devices
    front = -(-length // 2)

    def cut(x: Any, at: int, columns: tuple[int, int]) -> list[Any]:
        parts: list[Any] = jnp.split(x, [at], axis)
        return [
            part.reshape(*x.shape[:axis], devices, n, *x.shape[axis + 1 :])
            for part, n in zip(parts, columns, strict=True)
        ]

    if flag("inverse", inverse):
        rows = x.reshape(*x.shape[:axis], devices, length, *x.shape[axis + 1 :])
        first, second = jnp.split(rows, [front], axis + 1)
        parts = [
            part.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
            for part in (first, jnp.flip(second, axis))
        ]
        return jnp.concatenate(parts, axis)
    first, second = cut(x, devices * front, (front, length - front))
    rows = jnp.concatenate([first, jnp.flip(second, axis)], axis + 1)
    return rows.reshape(x.shape)


def can_be_exchanged(*lengths: int) -> bool:
    """Whether chunks of zigzag order are those of parts that follow each other."""
    return all(length % 2 == 0 for length in lengths)


def exchanged(x: jax.Array, axis: Any, devices: int) -> jax.Array:
    """The device's part in zigzag order, where parts follow each other.

    Device r has the chunks 2r and 2r + 1 of 2n. Chunk c belongs to device c, or to
    2n - 1 - c in the back half. No device gets two chunks with even numbers, or two
    with odd ones: each kind is sent at once.
    """
    even, odd = _halves(x)
    even = lax.ppermute(even, axis, _owners(devices, 0))
    odd = lax.ppermute(odd, axis, _owners(devices, 1))
    return _crossed(even, odd, axis)


def returned(x: jax.Array, axis: Any, devices: int) -> jax.Array:
    """The inverse of ``exchanged``."""
    front, back = _halves(x)
    even, odd = _halves(_crossed(front, back, axis))
    to = [[(to, of) for of, to in _owners(devices, kind)] for kind in (0, 1)]
    halves = [lax.ppermute(even, axis, to[0]), lax.ppermute(odd, axis, to[1])]
    return jnp.concatenate(halves, SEQUENCE)


def _halves(x: jax.Array) -> list[jax.Array]:
    return [*jnp.split(x, 2, SEQUENCE)]


def _owners(devices: int, kind: int) -> list[tuple[int, int]]:
    """(device, new device) of the chunks 2 r + kind."""
    chunks = [2 * r + kind for r in range(devices)]
    return [(r, min(c, 2 * devices - 1 - c)) for r, c in enumerate(chunks)]


def _crossed(first: jax.Array, second: jax.Array, axis: Any) -> jax.Array:
    """Both halves; on devices with odd numbers the second one comes first.

    The front chunk of device r has the number r.
    """
    is_even = lax.axis_index(axis) % 2 == 0
    halves = [jnp.where(is_even, first, second), jnp.where(is_even, second, first)]
    return jnp.concatenate(halves, SEQUENCE)
