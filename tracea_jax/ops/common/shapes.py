"""Operands of ops: checked, broadcast, and with mapped axes in front.

The shapes of problems are computed in each op's own folder. Callers: the public
functions and the primitives of ops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.mistakes import shown
from tracea_jax.ops.common.ranks import Ranks
from tracea_jax.ops.common.typed import asarray


def check_arrays(op: str, **operands: Any) -> None:
    """Raises TypeError unless all operands are arrays."""
    for name, x in operands.items():
        if not isinstance(x, jax.Array):
            raise TypeError(
                f"{op} takes arrays; {name} is a {type(x).__name__} (jnp.asarray makes "
                "an array of it)"
            )


def as_array(name: str, x: Any) -> jax.Array:
    """An operand as an array, by ``jnp.asarray``.

    Raises:
      TypeError: naming the operand, if that is nothing.
    """
    try:
        return asarray(x)
    except (TypeError, ValueError) as e:
        raise TypeError(f"{name} must be an array, not {shown(x)}") from e


def fold(
    lhs: jax.Array, *rights: jax.Array, batch: Any
) -> tuple[list[jax.Array], Ranks]:
    """Operands of any batch rank as those of one product, and its ranks.

    Args:
      lhs: (..., m, k).
      rights: (..., k, n), all of one shape.
      batch: the shape that the batch dimensions of all operands broadcast to.
    """
    if math.prod(rights[0].shape[:-2]) == 1:  # batches of lhs become its rows
        matrices = [x.reshape(x.shape[-2:]) for x in rights]
        return [lhs, *matrices], Ranks(rows=lhs.ndim - 1)
    spread = [_broadcast(x, batch) for x in rights]
    if math.prod(lhs.shape[:-2]) == 1:
        return [lhs.reshape(lhs.shape[-2:]), *spread], Ranks(batch=len(batch))
    return [_broadcast(lhs, batch), *spread], Ranks(batch=len(batch))


def _broadcast(x: jax.Array, batch: Any) -> jax.Array:
    return jnp.broadcast_to(x, (*batch, *x.shape[-2:]))


def flat(x: jax.Array, core: int) -> jax.Array:
    """x with all dimensions before the last ``core`` ones merged into one."""
    split = x.ndim - core
    return x.reshape(math.prod(x.shape[:split]), *x.shape[split:])  # -1 fails on size 0


def move_mapped(
    operands: Sequence[jax.Array], dims: Sequence[int | None]
) -> tuple[list[jax.Array], list[bool], int]:
    """Moves the mapped axis of each operand to the front.

    Returns:
      The operands, for each whether it is mapped, and the size of the mapped axis.
    """
    mapped = [d is not None for d in dims]
    moved = [
        x if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    size = next(x.shape[0] for x, m in zip(moved, mapped, strict=True) if m)
    return moved, mapped, size
