"""Integers in masks as linear functions of positions and of unknown values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tracea_jax.rewrite.attention.dims import MOVES, Dims, Factors, aligned, backward
from tracea_jax.rewrite.view import Atom, Equation, View, remembered

Limits = tuple[int, int]
_FRACTION = 256  # offsets that are no whole numbers, such as 0.5, are parts of this


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """An integer array that is only known at run time, such as lengths.

    With limits its values are cut to them.
    """

    atom: Atom
    dims: Dims
    limits: Limits | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """Sum of positions and unknown integers, times coefficients, plus an offset."""

    positions: frozenset[tuple[Factors, int]] = frozenset()
    unknowns: frozenset[tuple[Unknown, int]] = frozenset()
    offset: float = 0.0

    @classmethod
    def position(cls, along: Factors) -> Linear:
        """The position along a dimension; 0 along one of size 1."""
        return cls(positions=frozenset({(along, 1)} if along else ()))

    def __add__(self, other: Linear | float) -> Linear:
        if not isinstance(other, Linear):
            return dataclasses.replace(self, offset=self.offset + other)
        return Linear(
            positions=_sum((*self.positions, *other.positions)),
            unknowns=_sum((*self.unknowns, *other.unknowns)),
            offset=self.offset + other.offset,
        )

    def __sub__(self, other: Linear) -> Linear:
        return self + other.times(-1)

    def times(self, factor: int) -> Linear:
        return Linear(
            positions=_sum((x, n * factor) for x, n in self.positions),
            unknowns=_sum((x, n * factor) for x, n in self.unknowns),
            offset=self.offset * factor,
        )

    def fits(self, dtype: Any) -> bool:
        """Returns whether a dtype holds all its values exactly.

        Unknown values are integers of the program: of 32 bits or more they are taken to
        be far from the limits, as lengths are.
        """
        ends = [self.offset, self.offset]
        for along, factor in self.positions:
            span = factor * (math.prod(f.size for f in along) - 1)
            ends[span > 0] += span
        if self.unknowns and dtype.itemsize < 4:
            return False
        if dtype.kind == "f":
            limit = 2.0 ** (np.finfo(dtype).nmant + 1)
            exact = self.offset * _FRACTION == int(self.offset * _FRACTION)
            limit /= 1 if self.offset == int(self.offset) else _FRACTION
            return exact and -limit <= ends[0] and ends[1] <= limit
        limits = np.iinfo(dtype)
        return limits.min <= ends[0] and ends[1] <= limits.max

    def rounded(self, how: Callable[[float], int]) -> Linear:
        return dataclasses.replace(self, offset=float(how(self.offset)))


def _sum(terms: Iterable[tuple[Any, int]]) -> frozenset[tuple[Any, int]]:
    total: dict[Any, int] = {}
    for x, n in terms:
        total[x] = total.get(x, 0) + n
    return frozenset((x, n) for x, n in total.items() if n)


@remembered
def linear(view: View, atom: Atom, dims: Dims) -> Linear | None:
    """An integer, or a float that holds integers, as a linear function.

    None for what may be no integer, and for unsigned ones: they wrap around at 0.
    """
    known = view.scalar(atom)
    if known is not None:
        return Linear(offset=known) if math.isfinite(known) else None
    eqn = view.producer(atom)
    if eqn is not None:
        found = _calculated(view, eqn, dims)
        if found is not None and not found.fits(atom.aval.dtype):
            found = None
    else:
        found = _from_outside(view, atom, dims) or _captured(view, atom, dims)
    if found is None and atom.aval.dtype.kind == "i":
        return Linear(unknowns=frozenset({(Unknown(atom, dims), 1)}))
    return found


def _from_outside(view: View, atom: Atom, dims: Dims) -> Linear | None:
    """Positions that were made outside of a loop, say."""
    outer = view.outside.get(atom)
    found = None if outer is None else linear(*outer, dims)
    return found if found is not None and not found.unknowns else None


def _calculated(view: View, eqn: Equation, dims: Dims) -> Linear | None:
    if eqn.outvars[0].aval.dtype.kind not in "if":
        return None
    name = eqn.primitive.name
    if name == "iota":
        return Linear.position(dims[eqn.params["dimension"]])
    if name in MOVES:
        source = backward(eqn, dims)
        return None if source is None else linear(view, eqn.invars[0], source)
    if name in ("convert_element_type", "copy", "stop_gradient", "pvary"):
        old, new = (x.aval.dtype.kind for x in (eqn.invars[0], eqn.outvars[0]))
        if old == "f" and new == "i" and name == "convert_element_type":
            return None  # rounds
        return linear(view, eqn.invars[0], dims) if old in "if" else None
    if name not in ("add", "mul", "neg", "sub"):
        return None
    operands = [linear(view, x, aligned(x, dims)) for x in eqn.invars]
    match name, *operands:
        case ("neg", Linear() as x):
            return x.times(-1)
        case ("add", Linear() as x, Linear() as y):
            return x + y
        case ("sub", Linear() as x, Linear() as y):
            return x - y
        case ("mul", Linear() as x, Linear() as y):
            return _product(view, eqn.invars, x, y)
    return None


def _product(view: View, atoms: Sequence[Atom], x: Linear, y: Linear) -> Linear | None:
    for atom, other in zip(atoms, (y, x), strict=True):
        known = view.scalar(atom)
        if known is not None and known == int(known):
            return other.times(int(known))
    return None


def _captured(view: View, atom: Atom, dims: Dims) -> Linear | None:
    """Captured positions, such as an arange made outside of the function."""
    value = view.constant(atom)
    if value is None or value.dtype.kind not in "if" or value.size == 0:
        return None
    table = value.astype(np.float64)
    origin = table.flat[0]
    expected, result = np.full(table.shape, origin), Linear(offset=float(origin))
    for place, (d, size) in enumerate(zip(dims, table.shape, strict=True)):
        if size == 1:
            continue
        step = np.moveaxis(table, place, 0)[1].flat[0] - origin
        if abs(step) != 1 or (origin != 0 and size == 2):
            return None  # more likely lengths
        shape = [-1 if i == place else 1 for i in range(table.ndim)]
        expected = expected + (step * np.arange(size)).reshape(shape)
        result = result + Linear.position(d).times(int(step))
    return result if np.array_equal(expected, table) else None
