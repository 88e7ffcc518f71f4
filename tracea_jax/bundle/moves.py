"""Equations that only move numbers in memory: slices, padding, transposes, and so on.

    moves(eqn) -> the parts of each result, each a strided copy of an operand

A copy takes a run of contiguous bytes at a time, along dimensions with a stride in the
operand and one in the result.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracea_jax.bundle.arrays import View, inner_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A strided copy, in elements.

    Attributes:
      operand: of the equation.
      counts: of each dimension that is copied, the outermost first.
      sources, targets: strides of each in the operand and in the result.
      source, target: the first element.
    """

    operand: int
    counts: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    source: int = 0
    target: int = 0

    def fields(self, itemsize: int) -> dict[str, Any]:
        """As the manifest has it, in bytes; dimensions that are one are joined."""
        dims: list[tuple[int, int, int]] = []
        for dim in zip(self.counts, self.sources, self.targets, strict=True):
            if dim[0] == 1:
                continue
            if dims and dims[-1][1:] == (dim[1] * dim[0], dim[2] * dim[0]):
                dim = (dims.pop()[0] * dim[0], *dim[1:])
            dims.append(dim)
        run = dims.pop()[0] if dims and dims[-1][1:] == (1, 1) else 1
        return {
            "run": run * itemsize,
            "counts": [count for count, _, _ in dims],
            "from_strides": [source * itemsize for _, source, _ in dims],
            "to_strides": [target * itemsize for _, _, target in dims],
            "from_offset": self.source * itemsize,
            "to_offset": self.target * itemsize,
        }


def strides(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous array, in elements."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def moves(eqn: Any, operands: Sequence[Any]) -> tuple[tuple[Move, ...], ...] | None:
    """The copies that each result of an equation is; None if it is something else.

    Parts of a result that no copy writes are zero.

    Args:
      eqn: the equation.
      operands: views, or arrays that are known.
    """
    name, x = eqn.primitive.name, eqn.invars[0]
    outs = [tuple(out.aval.shape) for out in eqn.outvars]
    if name not in (*_RULES, "split") or any(0 in out for out in outs):
        return None
    if any(out.aval.dtype != x.aval.dtype for out in eqn.outvars):
        return None
    if name == "pad" and not _is_zero(operands[1]):
        return None
    shape = tuple(x.aval.shape)
    if name == "split":
        return _split(eqn, shape, outs)
    (out,) = outs
    made = _RULES[name](eqn, shape, out)
    return None if made is None else (made,)


def _slice(eqn: Any, shape: Any, out: Any) -> tuple[Move, ...]:
    params, whole = eqn.params, strides(shape)
    steps = params["strides"] or (1,) * len(shape)
    first = params["start_indices"]
    return (
        Move(
            operand=0,
            counts=out,
            sources=tuple(w * s for w, s in zip(whole, steps, strict=True)),
            targets=tuple(strides(out)),
            source=sum(w * i for w, i in zip(whole, first, strict=True)),
        ),
    )


def _is_zero(value: Any) -> bool:
    return not isinstance(value, View) and value == 0 and not np.signbit(value)


def _pad(eqn: Any, shape: Any, out: Any) -> tuple[Move, ...] | None:
    counts, source, target, steps = [], 0, 0, []
    of_x, of_out = strides(shape), strides(out)
    for axis, config in enumerate(eqn.params["padding_config"]):
        low, high, inner = map(int, config)
        if inner and min(low, high) < 0:
            return None
        skipped = max(-low, 0)
        counts.append(shape[axis] - skipped - max(-high, 0))
        source += of_x[axis] * skipped
        target += of_out[axis] * max(low, 0)
        steps.append(of_out[axis] * (inner + 1))
    if min(counts) <= 0:
        return ()
    return (
        Move(
            operand=0,
            counts=tuple(counts),
            sources=tuple(of_x),
            targets=tuple(steps),
            source=source,
            target=target,
        ),
    )


def transposed(shape: Sequence[int], order: Sequence[int]) -> Move:
    """The copy of an array with its dimensions in another order."""
    whole = strides(shape)
    out = tuple(shape[axis] for axis in order)
    sources = tuple(whole[axis] for axis in order)
    return Move(operand=0, counts=out, sources=sources, targets=tuple(strides(out)))


def widened(shape: Sequence[int], out: Sequence[int]) -> Move:
    """The copy of an array into a shape of its rank, repeated where its size is 1."""
    return _spread(shape, range(len(shape)), out)


def _transpose(eqn: Any, shape: Any, out: Any) -> tuple[Move, ...]:
    return (transposed(shape, eqn.params["permutation"]),)


def inner_of_spread(eqn: Any) -> int | None:
    """Repetitions of each element in a row by a broadcast; see ``arrays.Spread``.

    None of other equations, and of broadcasts between dimensions that stay.
    """
    if eqn.primitive.name != "broadcast_in_dim":
        return None
    shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return inner_of(shape, eqn.params["broadcast_dimensions"], out)


def _broadcast(eqn: Any, shape: Any, out: Any) -> tuple[Move, ...]:
    return (_spread(shape, eqn.params["broadcast_dimensions"], out),)


def _spread(shape: Sequence[int], axes: Sequence[int], out: Sequence[int]) -> Move:
    sources = [0] * len(out)
    for axis, size, stride in zip(axes, shape, strides(shape), strict=True):
        sources[axis] = stride if size > 1 else 0
    targets = tuple(strides(out))
    return Move(operand=0, counts=tuple(out), sources=tuple(sources), targets=targets)


def _concatenate(eqn: Any, shape: Any, out: Any) -> tuple[Move, ...]:
    axis, whole = eqn.params["dimension"], strides(out)
    sizes = [x.aval.shape for x in eqn.invars]
    starts = itertools.accumulate((size[axis] for size in sizes), initial=0)
    return tuple(
        Move(
            operand=i,
            counts=tuple(size),
            sources=tuple(strides(size)),
            targets=tuple(whole),
            target=whole[axis] * start,
        )
        for i, (size, start) in enumerate(zip(sizes, starts, strict=False))
        if 0 not in size
    )


def _stack(eqn: Any, shape: Any, out: Any) -> tuple[Move, ...]:
    axis, whole = eqn.params["axis"], strides(out)
    return tuple(
        Move(
            operand=i,
            counts=shape,
            sources=tuple(strides(shape)),
            targets=(*whole[:axis], *whole[axis + 1 :]),
            target=whole[axis] * i,
        )
        for i in range(len(eqn.invars))
    )


def _split(eqn: Any, shape: Any, outs: Sequence[Any]) -> tuple[tuple[Move, ...], ...]:
    axis, whole = eqn.params["axis"], strides(shape)
    starts = itertools.accumulate((out[axis] for out in outs), initial=0)
    moves = (
        Move(
            operand=0,
            counts=out,
            sources=tuple(whole),
            targets=tuple(strides(out)),
            source=whole[axis] * start,
        )
        for out, start in zip(outs, starts, strict=False)
    )
    return tuple((move,) for move in moves)


_RULES = {
    "slice": _slice,
    "pad": _pad,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "stack": _stack,
}
