"""The gradients of scales and shifts in a row.

The gradient of each operand c is a sum over the entries that share it, of dz or of dz
times the entry that c scales; written one by one they take a pass over both arrays
each. But all of them follow from two sums,

    sum of dz,    sum of dz * v

where v is the entry that the first scale is multiplied with: centred, in a norm. Where
they are sums of each channel, ``ops.channel_sums`` plans them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.channel_affine.steps import SCALES, Result, rounded, row
from tracea_jax.ops.channel_sums.primitive import bind as bind_sums
from tracea_jax.ops.channel_sums.primitive import channel_sums_p
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.promotion import promoted
from tracea_jax.ops.common.typed import broadcast_shapes, full, zeros_like


def gradients(
    dys: Sequence[Any],
    x: Any,
    source: Any,
    *others: Any,
    result: Result,
    wanted: tuple[int, ...],
) -> dict[int, Any]:
    """The cotangents of operands of the primitive.

    Args:
      dys: cotangents of copies of the result, one at least.
      x, source, others: operands of the primitive, and its result if it has a residual.
      result: see ``Result``.
      wanted: places of operands: 0 of x, from 2 on those of the steps, and a residual.
    """
    steps = result.steps
    operands, kept = others[: len(steps)], others[len(steps) + 1 :]
    wide: Any = promoted(x.dtype, jnp.float32)
    constants = [c.astype(wide) for c in operands]
    after = _factors(steps, constants)
    of_steps = [i for i in wanted if 2 <= i < 2 + len(steps)]
    given = _Given(dys, x, source, operands, kept, result)
    dz, sums = given.both() if of_steps else (given.dz(), None)
    found: dict[int, Any] = {}
    if 0 in wanted:
        factor = jnp.broadcast_to(after[0], broadcast_shapes(*_shapes(operands)))
        found[0] = dz.astype(x.dtype) * factor.astype(x.dtype)
    if result.residual and 2 + len(steps) in wanted:
        found[2 + len(steps)] = dz
    if sums is not None:
        each = _of_operands(sums, steps, constants, after)
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
    """Factors of y from each step on, by the number of steps before."""
    factors: list[Any] = [full((), 1, constants[0].dtype)]
    for name, c in zip(reversed(steps), reversed(constants), strict=True):
        last = factors[-1]
        scaled = {"mul": last * c, "div": last / c, "rsub": -last}
        factors.append(scaled.get(name, last))
    return factors[::-1]


def _first_scale(steps: Sequence[str]) -> int:
    return next((i for i, name in enumerate(steps) if name in SCALES), len(steps))


Sums = tuple[Any, Any]  # of dz, and of dz * v


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """Operands of the gradients: see ``gradients``; ``kept`` is the result."""

    dys: Sequence[Any]
    x: Any
    source: Any
    operands: Sequence[Any]
    kept: Sequence[Any]
    result: Result

    def dz(self) -> Any:
        """The cotangent of the last step's result, with or without a residual."""
        dy, result = sum(self.dys[1:], self.dys[0]), self.result
        if result.activation != "relu":
            return dy
        y = rounded(row(self.x, self.operands, result.steps), result)
        (y,) = self.kept or (y,)
        return jnp.where(y > 0, dy, zeros_like(dy))

    def both(self) -> tuple[Any, Sums]:
        """dz, and (sum of dz, sum of dz * v) where v is what the first scale scales."""
        kept = _kept(self.x.shape, self.operands)
        if self._may_be_planned(kept):
            return self._planned()
        wide: Any = promoted(self.x.dtype, jnp.float32)
        axes = [d for d, n in enumerate(kept) if n == 1]
        steps = self.result.steps[: _first_scale(self.result.steps)]
        v = row(self.x, self.operands[: len(steps)], steps).astype(wide)
        dz = self.dz()
        term = dz.astype(wide)
        return dz, (term.sum(axes, keepdims=True), (term * v).sum(axes, keepdims=True))

    def _may_be_planned(self, kept: Sequence[int]) -> bool:
        """Returns whether the sums are those of ``ops.channel_sums``."""
        x, dy = self.x, self.dys[0]
        return (
            x.ndim > 1
            and all(n == 1 for n in kept[:-1])
            and x.dtype == jnp.float32
            and dy.dtype == self.source.dtype
            and (len(self.dys) == 1 or self.result.residual)
            and lowering.has_kernel(channel_sums_p, [self.source], relu="none")
        )

    def _planned(self) -> tuple[Any, Sums]:
        """By v = sign (x - center), and what relu is of, v factor + shift."""
        steps, channels = self.result.steps, self.x.shape[-1]
        each = [jnp.broadcast_to(c.reshape(-1), (channels,)) for c in self.operands]
        first = _first_scale(steps)
        start, later = steps[:first], steps[first:]
        sign = -1.0 if start.count("rsub") % 2 else 1.0
        zero = full((channels,), 0, jnp.float32)
        center = -sign * row(zero, each[:first], start) if start else zero
        if self.result.residual:
            arrays = (self.source, *self.dys, *self.kept)
            total, scaled, dz = bind_sums(*arrays, center, relu="result")
        elif self.result.activation == "relu":
            factor = sign * _factors(later, each[first:])[0]
            shift = row(zero, each[first:], later)
            vectors = (center, jnp.broadcast_to(factor, (channels,)), shift)
            arrays = (self.source, *self.dys)
            total, scaled = bind_sums(*arrays, *vectors, relu="argument")
            dz = self.dz()
        else:
            (dz,) = self.dys
            total, scaled = bind_sums(self.source, dz, center)
        shape = (1,) * (self.x.ndim - 1) + (channels,)
        return dz, (total.reshape(shape), (sign * scaled).reshape(shape))


def _of_operands(
    sums: Sums,
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
