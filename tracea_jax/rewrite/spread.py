"""Spread of a small array's entries over a large one, dimension by dimension.

A mean of each group of channels, (n, g), takes a few reshapes and broadcasts until it
has a place for each entry of an image, (n, 1, 1, g * c). Here each dimension of a value
is a row of factors, the slowest first: pairs of a size and a name, which is None where
the value is the same all along.

    (n, g)             (n: "n") (g: "g")
    (n, g, c)          (n: "n") (g: "g") (c: None)
    (n, g * c)         (n: "n") (g: "g", c: None)
    (n, 1, 1, g * c)   (n: "n") () () (g: "g", c: None)

Caller: ``group_norm``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tracea_jax.rewrite.view import Atom, Equation, View

Factor = tuple[int, Any]
Dims = tuple[tuple[Factor, ...], ...]
Move = Equation | tuple[int, ...]  # or the shape that dimensions of size 1 grow to

_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})


def followed(dims: Dims, path: Sequence[Move]) -> Dims | None:
    """The dimensions of a value after moves, the last of which comes first.

    None if a move cuts a factor in two.
    """
    for eqn in reversed(path):
        if isinstance(eqn, tuple):
            dims = dims or ((),) * len(eqn)  # a number meets arrays of any rank
            pairs = zip(dims, eqn, strict=True)
            dims = tuple(dim or ((n, None),) * (n > 1) for dim, n in pairs)
            continue
        shape = eqn.outvars[0].aval.shape
        if eqn.primitive.name != "broadcast_in_dim":
            moved = regrouped([f for dim in dims for f in dim], shape)
            if moved is None:
                return None
            dims = moved
            continue
        new: list[tuple[Factor, ...]] = [((n, None),) if n > 1 else () for n in shape]
        for dim, place in zip(dims, eqn.params["broadcast_dimensions"], strict=True):
            if dim:
                new[place] = dim
        dims = tuple(new)
    return tuple(map(_merged, dims))


def origin(view: View, atom: Atom) -> tuple[Atom, list[Equation], list[int]]:
    """The origin of a value, the moves from it, the last one first, and all equations.

    Conversions to a wider dtype are passed too, and choices that are known.
    """
    path: list[Equation] = []
    passed: list[int] = []
    while (index := view.producer_index(atom)) is not None:
        eqn = view.eqns[index]
        if (chosen := _chosen(view, eqn)) is None:
            break
        if _moves(eqn):
            path.append(eqn)
        passed.append(index)
        atom = chosen
    return atom, path, passed


def _moves(eqn: Equation) -> bool:
    if eqn.primitive.name == "reshape":
        return eqn.params["dimensions"] is None
    return eqn.primitive.name in _MOVES and len(eqn.invars) == 1


def _chosen(view: View, eqn: Equation) -> Atom | None:
    """The operand whose entries an equation's result has, no others."""
    if _moves(eqn) or widens(eqn) or eqn.primitive.name == "copy":
        return eqn.invars[0]
    if eqn.primitive.name == "select_n":
        which = view.scalar(eqn.invars[0])  # as of whether a variance is of any entries
        return None if which is None else eqn.invars[1 + int(which)]
    return None


def widens(eqn: Equation) -> bool:
    """Returns whether this is a conversion between floats that loses nothing."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if old == new:
        return True
    return new.name in ("float32", "float64") and old.name in ("bfloat16", "float16")


def _merged(dim: Iterable[Factor]) -> tuple[Factor, ...]:
    """Neighbours that are the same all along as one."""
    found: list[Factor] = []
    for size, name in dim:
        if found and name is None and found[-1][1] is None:
            found[-1] = (found[-1][0] * size, None)
        elif size > 1:
            found.append((size, name))
    return tuple(found)


def regrouped(factors: Iterable[Factor], shape: Sequence[int]) -> Dims | None:
    """Factors as the dimensions of a shape; None if a dimension ends within one."""
    left = list(factors)[::-1]
    dims: list[tuple[Factor, ...]] = []
    for size in shape:
        dim: list[Factor] = []
        while size > 1:
            if not left:
                return None
            n, name = left.pop()
            if size % n:
                if name is not None or n % size:
                    return None
                left.append((n // size, None))
                n = size
            dim.append((n, name))
            size //= n
        dims.append(tuple(dim))
    return None if left else tuple(map(_merged, dims))


def refined(*shapes: Sequence[int]) -> list[list[int]] | None:
    """Each shape's dimensions, cut where those of the others begin.

    Returns:
      For each dimension of the first shape its sizes, of which the dimensions of the
      others are products too; None if there are no such sizes.
    """
    cuts = sorted({c for shape in shapes for c in _cuts(shape)})
    if any(b % a for a, b in zip(cuts, cuts[1:], strict=False)):
        return None
    found: list[list[int]] = []
    inner = math.prod(shapes[0])
    for size in shapes[0]:
        outer, inner = inner, inner // size if size else 0
        inside = [c for c in cuts if inner <= c <= outer]
        sizes = [b // a for a, b in zip(inside, inside[1:], strict=False)]
        found.append(sizes[::-1])
    return found


def _cuts(shape: Sequence[int]) -> Iterable[int]:
    """Products of the last dimensions: none, one, two, ... of them."""
    total = 1
    yield total
    for size in reversed(shape):
        total *= size
        yield total
