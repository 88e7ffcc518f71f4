"""The gradients of scales and shifts in a row.

The gradient of each operand c is a sum over the entries that share it, of dz or of dz
times the entry that c scales; written one by one they take a pass over both arrays
each. But all of them follow from two sums,

    sum of dz,    sum of dz * v

where v is the entry that the first scale is multiplied with: centred, in a norm. Where
they are sums of each channel, ``ops.channel_sums`` plans them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.channel_affine.steps import SCALES, Result, rounded, row
from tracea_jax.ops.channel_sums.primitive import bind as bind_sums
from tracea_jax.ops.common.typed import broadcast_shapes, full, zeros_like


def gradients(
    dy: Any,
    x: Any,
    source: Any,
    *operands: Any,
    result: Result,
    wanted: tuple[int, ...],
) -> dict[int, Any]:
    """The cotangents of x, the operand 0, and of those of the steps, from 2 on."""
    wide: Any = jnp.promote_types(x.dtype, jnp.float32)
    constants = [c.astype(wide) for c in operands]
    after = _factors(result.steps, constants)
    found: dict[int, Any] = {}
    if 0 in wanted:
        dz = _through_relu(dy, x, operands, result).astype(x.dtype)
        factor = jnp.broadcast_to(after[0], broadcast_shapes(*_shapes(operands)))
        found[0] = dz * factor.astype(x.dtype)
    of_steps = [i for i in wanted if i > 0]
    if of_steps:
        sums = _sums(dy, x, source, operands, result)
        each = _of_operands(sums, result.steps, constants, after)
        for i in of_steps:
            c = operands[i - 2]
            whole = jnp.broadcast_to(each[i - 2], _kept(x.shape, operands))
            axes = [d for d in range(x.ndim) if c.shape[d] != whole.shape[d]]
            found[i] = whole.sum(axes, keepdims=True).astype(c.dtype)
    return found


def _shapes(operands: Sequence[Any]) -> list[tuple[int, ...]]:
    return [c.shape for c in operands]


def _kept(shape: Sequence[int], operands: Sequence[Any]) -> tuple[int, ...]:
    """The shape of sums over all entries that share each operand."""
    return tuple(
        n if any(c.shape[d] != 1 for c in operands) else 1 for d, n in enumerate(shape)
    )


def _factors(steps: Sequence[str], constants: Sequence[Any]) -> list[Any]:
    """What y is multiplied with from each step on, by the number of steps before."""
    factors: list[Any] = [full((), 1, constants[0].dtype)]
    for name, c in zip(reversed(steps), reversed(constants), strict=True):
        last = factors[-1]
        scaled = {"mul": last * c, "div": last / c, "rsub": -last}
        factors.append(scaled.get(name, last))
    return factors[::-1]


def _first_scale(steps: Sequence[str]) -> int:
    return next((i for i, name in enumerate(steps) if name in SCALES), len(steps))


def _sums(
    dy: Any, x: Any, source: Any, operands: Sequence[Any], result: Result
) -> tuple[Any, Any]:
    """(sum of dz, sum of dz * v); v is what the first scale is multiplied with."""
    kept = _kept(x.shape, operands)
    if _may_be_planned(dy, x, source, kept):
        return _planned_sums(dy, x, source, operands, result)
    wide: Any = jnp.promote_types(x.dtype, jnp.float32)
    axes = [d for d, n in enumerate(kept) if n == 1]
    steps = result.steps[: _first_scale(result.steps)]
    v = row(x, operands[: len(steps)], steps).astype(wide)
    dz = _through_relu(dy, x, operands, result).astype(wide)
    return dz.sum(axes, keepdims=True), (dz * v).sum(axes, keepdims=True)


def _may_be_planned(dy: Any, x: Any, source: Any, kept: Sequence[int]) -> bool:
    """Whether the sums are those of ``ops.channel_sums``."""
    return (
        x.ndim > 1
        and all(n == 1 for n in kept[:-1])
        and x.dtype == jnp.float32
        and dy.dtype == source.dtype
    )


def _planned_sums(
    dy: Any, x: Any, source: Any, operands: Sequence[Any], result: Result
) -> tuple[Any, Any]:
    """By v = sign (x - center), and what relu is of, v factor + shift."""
    channels = x.shape[-1]
    each = [jnp.broadcast_to(c.reshape(-1), (channels,)) for c in operands]
    first = _first_scale(result.steps)
    start, later = result.steps[:first], result.steps[first:]
    sign = -1.0 if start.count("rsub") % 2 else 1.0
    zero = full((channels,), 0, jnp.float32)
    center = -sign * row(zero, each[:first], start) if start else zero
    of_relu: list[Any] = []
    if result.activation == "relu":
        factor = _factors(later, each[first:])[0]
        factor = jnp.broadcast_to(sign * factor, (channels,))
        of_relu = [factor, row(zero, each[first:], later)]
    relu = "argument" if of_relu else "none"
    total, scaled = bind_sums(source, dy, center, *of_relu, relu=relu)
    shape = (1,) * (x.ndim - 1) + (channels,)
    return total.reshape(shape), (sign * scaled).reshape(shape)


def _through_relu(dy: Any, x: Any, operands: Sequence[Any], result: Result) -> Any:
    """dz: the cotangent of what relu is of, if there is one."""
    if result.activation != "relu":
        return dy
    y = rounded(row(x, operands, result.steps), result)
    return jnp.where(y > 0, dy, zeros_like(dy))


def _of_operands(
    sums: tuple[Any, Any],
    steps: Sequence[str],
    constants: Sequence[Any],
    after: Sequence[Any],
) -> list[Any]:
    """The gradient of each operand, one for each channel of each of them."""
    total, scaled = sums  # the second with the entry before the step
    found: list[Any] = []
    for i, (name, c) in enumerate(zip(steps, constants, strict=True)):
        factor = after[i + 1]
        match name:
            case "add" | "rsub":
                found.append(factor * total)
            case "sub":
                found.append(-factor * total)
            case "mul":
                found.append(factor * scaled)
                scaled = scaled * c
            case _:
                scaled = scaled / c
                found.append(-factor * scaled / c)
    return found
