"""Masks that are known while tracing: captured arrays, and what is computed of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tracea_jax.rewrite.attention.dims import Dims
from tracea_jax.rewrite.attention.positions import Linear
from tracea_jax.rewrite.view import Atom, Equation, View, remembered

_LARGEST = 1 << 26  # entries


def is_table(dims: Dims) -> bool:
    """Whether a value varies along two dimensions, as masks of positions do."""
    return sum(d != () for d in dims) == 2


@remembered
def table(view: View, atom: Atom) -> np.ndarray | None:
    """The value of an array that only depends on captured arrays and numbers."""
    if math.prod(atom.aval.shape) > _LARGEST or atom.aval.dtype.kind not in "bifV":
        return None
    known = view.scalar(atom)
    if known is not None:
        return np.full(atom.aval.shape, known)
    eqn = view.producer(atom)
    if eqn is None:
        value = view.captured(atom)
        wide = value is not None and value.dtype.kind in "fV"
        return value.astype(np.float64) if value is not None and wide else value
    compute = _COMPUTED.get(eqn.primitive.name)
    if compute is None:
        return None
    operands = [table(view, x) for x in eqn.invars]
    if any(x is None for x in operands):
        return None
    with np.errstate(all="ignore"):
        return compute(eqn, *operands)


def _moved(eqn: Equation, x: np.ndarray) -> Any:
    shape = eqn.outvars[0].aval.shape
    return x.reshape(shape) if x.size == math.prod(shape) else None


def _plain(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *operands: f(*operands)


_COMPUTED: dict[str, Callable[..., Any]] = {
    "add": _plain(operator.add),
    "and": _plain(np.logical_and),
    "broadcast_in_dim": _moved,
    "convert_element_type": lambda eqn, x: (
        x != 0 if eqn.outvars[0].aval.dtype == bool else x + 0
    ),
    "copy": _plain(lambda x: x),
    "eq": _plain(operator.eq),
    "ge": _plain(operator.ge),
    "gt": _plain(operator.gt),
    "le": _plain(operator.le),
    "lt": _plain(operator.lt),
    "mul": _plain(operator.mul),
    "ne": _plain(operator.ne),
    "neg": _plain(lambda x: 0 - x),
    "not": _plain(np.logical_not),
    "or": _plain(np.logical_or),
    "pvary": _plain(lambda x: x),
    "reshape": _moved,
    "squeeze": _moved,
    "sub": _plain(operator.sub),
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
}


def band_of(mask: np.ndarray, dims: Dims) -> tuple[Linear, Linear] | None:
    """What is >= 0 where a table is True, if that is a band along the diagonal."""
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
