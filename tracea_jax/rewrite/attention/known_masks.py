"""Masks that are known while tracing: captured arrays, and what is computed of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tracea_jax.rewrite.attention.dims import Dims
from tracea_jax.rewrite.attention.positions import Linear
from tracea_jax.rewrite.evaluate import evaluate, is_elementwise, is_known
from tracea_jax.rewrite.view import Atom, Equation, View, remembered

_LARGEST = 1 << 26  # entries


def is_table(dims: Dims) -> bool:
    """Returns whether a value varies along two dimensions, as masks of positions do."""
    return sum(d != () for d in dims) == 2


@remembered
def table(view: View, atom: Atom) -> np.ndarray | None:
    """The value of an array that only depends on captured arrays and numbers."""
    aval = atom.aval
    if math.prod(aval.shape) > _LARGEST or not is_known(aval.dtype):
        return None
    known = view.scalar(atom)
    if known is not None:
        return np.full(aval.shape, known, aval.dtype)
    eqn = view.producer(atom)
    if eqn is None:
        return view.captured(atom)
    if eqn.primitive.name not in _MOVED and not is_elementwise(eqn):
        return None
    found = [table(view, x) for x in eqn.invars]
    operands = [x for x in found if x is not None]
    if len(operands) < len(found):
        return None
    move = _MOVED.get(eqn.primitive.name)
    return evaluate(eqn, *operands) if move is None else move(eqn, *operands)


def _reshaped(eqn: Equation, x: np.ndarray) -> np.ndarray | None:
    if eqn.params.get("dimensions") is not None:
        return None
    return x.reshape(eqn.outvars[0].aval.shape)


def _repeated(eqn: Equation, x: np.ndarray) -> np.ndarray:
    shape = eqn.outvars[0].aval.shape
    expanded = [1] * len(shape)
    for place, size in zip(eqn.params["broadcast_dimensions"], x.shape, strict=True):
        expanded[int(place)] = size
    return np.broadcast_to(x.reshape(expanded), shape)


_MOVED: dict[str, Callable[..., np.ndarray | None]] = {
    "broadcast_in_dim": _repeated,
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
}


def band_of(mask: np.ndarray, dims: Dims) -> tuple[Linear, Linear] | None:
    """Bounds that are >= 0 where a table is True, if that is a diagonal band."""
    varying = [i for i, d in enumerate(dims) if d]
    mask = mask.reshape([mask.shape[i] for i in varying])
    rows, columns = mask.shape
    row = np.arange(rows)
    first, last = mask.argmax(1), columns - 1 - mask[:, ::-1].argmax(1)
    filled = mask.any(1)
    if not filled.any():
        return None
    low, high = int((first - row)[filled].min()), int((last - row)[filled].max())
    start, end = np.maximum(row + low, 0), np.minimum(row + high, columns - 1)
    count = np.maximum(end - start + 1, 0)
    same = np.where(count > 0, (first == start) & (last == end), True)
    if not (same.all() and np.array_equal(mask.sum(1), count)):
        return None
    i, j = (Linear.position(dims[place]) for place in varying)
    return (j - i) + -low, (i - j) + high
