"""Origins of the dimensions of values, through transposes, reshapes, broadcasts.

A dimension is a list of factors, major first; a factor is a part of one axis of the
products: ``size`` steps of ``stride``. So (2, 3) merged from the axes a and b is
(a: 2 x 1, b: 3 x 1), and 6 split into (2, 3) is (2 x 3), (3 x 1). A dimension of size
one has no factors.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from tracea_jax.rewrite.view import Equation


class Factor(NamedTuple):
    axis: int
    size: int
    stride: int


Factors = tuple[Factor, ...]  # of one dimension, major first
Dims = tuple[Factors, ...]  # of a value

# They change where values lie, not what they are.
MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "tile", "transpose"})


def axis(number: int, size: int) -> Factors:
    """A dimension that is a whole axis."""
    return () if size == 1 else (Factor(number, size, 1),)


def merged(factors: Iterable[Factor]) -> Factors:
    """The same dimension with as few factors as possible."""
    result: list[Factor] = []
    for f in factors:
        last = result[-1] if result else None
        if last and last.axis == f.axis and last.stride == f.stride * f.size:
            result[-1] = Factor(f.axis, last.size * f.size, f.stride)
        else:
            result.append(f)
    return tuple(result)


def aligned(atom: Any, dims: Dims) -> Dims:
    """Dimensions of an operand of an elementwise equation whose result has these."""
    if atom.aval.ndim == 0:
        return ()
    sizes = atom.aval.shape
    return tuple(() if n == 1 else d for n, d in zip(sizes, dims, strict=True))


def regrouped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Dimensions after a reshape; None if it cuts through factors unevenly."""
    pending = [f for d in dims for f in d][::-1]
    result = []
    for size in shape:
        group: list[Factor] = []
        rest = size
        while rest > 1:
            if not pending:
                return None
            f = pending.pop()
            if rest % f.size == 0:
                group.append(f)
                rest //= f.size
            elif f.size % rest == 0:
                minor = f.size // rest
                group.append(Factor(f.axis, rest, f.stride * minor))
                pending.append(Factor(f.axis, minor, f.stride))
                rest = 1
            else:
                return None
        result.append(merged(group))
    return tuple(result)


def forward(eqn: Equation, dims: Dims) -> Dims | None:
    """Dimensions of the result of a move of a value that has these.

    None if the value is repeated, or does not factor.
    """
    shape = eqn.outvars[0].aval.shape
    match eqn.primitive.name:
        case "transpose":
            return tuple(dims[int(i)] for i in eqn.params["permutation"])
        case "reshape" if eqn.params["dimensions"] is None:
            return regrouped(dims, shape)
        case "squeeze":
            return regrouped(dims, shape)
        case "broadcast_in_dim":
            if math.prod(shape) != math.prod(eqn.invars[0].aval.shape):
                return None
            result: list[Factors] = [()] * len(shape)
            for place, d in zip(eqn.params["broadcast_dimensions"], dims, strict=True):
                result[int(place)] = d
            return tuple(result)
    return None


def backward(eqn: Equation, dims: Dims) -> Dims | None:
    """Dimensions of the operand of a move whose result has these; None as above.

    What the operand is repeated along, its dimensions do not mention.
    """
    shape = eqn.invars[0].aval.shape
    match eqn.primitive.name:
        case "transpose":
            result: list[Factors] = [()] * len(shape)
            for d, source in zip(dims, eqn.params["permutation"], strict=True):
                result[int(source)] = d
            return tuple(result)
        case "reshape" if eqn.params["dimensions"] is None:
            return regrouped(dims, shape)
        case "squeeze":
            return regrouped(dims, shape)
        case "broadcast_in_dim" if len(eqn.invars) == 1:
            places = [int(i) for i in eqn.params["broadcast_dimensions"]]
            pairs = zip(places, shape, strict=True)
            return tuple(() if n == 1 else dims[place] for place, n in pairs)
        case "tile":
            pairs = zip(dims, shape, strict=True)
            halves = [regrouped((d,), _tiles(d, n)) for d, n in pairs]
            if any(h is None for h in halves):
                return None
            return tuple(h[1] for h in halves if h is not None)
    return None


def _tiles(d: Factors, size: int) -> tuple[int, int]:
    return math.prod(f.size for f in d) // size, size


class Labels:
    """The parts into which all the dimensions of a site cut the axes.

    A label is a factor that no dimension cuts further.
    """

    def __init__(self, dimensions: Iterable[Factors]) -> None:
        self._cuts: dict[int, list[int]] = {}
        cuts: dict[int, set[int]] = collections.defaultdict(set)
        for d in dimensions:
            for f in d:
                cuts[f.axis] |= {f.stride, f.stride * f.size}
        for number, places in cuts.items():
            self._cuts[number] = sorted(places)

    @property
    def fit(self) -> bool:
        """Returns whether the cuts of each axis divide one another."""
        return all(
            b % a == 0
            for cuts in self._cuts.values()
            for a, b in zip(cuts, cuts[1:], strict=False)
        )

    def of(self, factors: Iterable[Factor]) -> tuple[Factor, ...]:
        """The labels of a dimension, major first."""
        result: list[Factor] = []
        for f in factors:
            end = f.stride * f.size
            cuts = [c for c in self._cuts[f.axis] if f.stride <= c <= end]
            pairs = list(zip(cuts, cuts[1:], strict=False))
            result += [Factor(f.axis, b // a, a) for a, b in reversed(pairs)]
        return tuple(result)

    def of_all(self, dims: Dims) -> tuple[Factor, ...]:
        return self.of(f for d in dims for f in d)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrange:
    """Steps that make a value canonical: split, permute, repeat, merge.

    Attributes:
      split: its shape cut into labels.
      permutation: of these.
      expand: then, with 1 for each label that it lacks, ...
      full: ... broadcast to this, ...
      shape: ... and reshaped to this.
    """

    split: tuple[int, ...]
    permutation: tuple[int, ...]
    expand: tuple[int, ...]
    full: tuple[int, ...]
    shape: tuple[int, ...]

    def __call__(self, x: Any) -> Any:
        in_order = self.permutation == tuple(range(len(self.permutation)))
        if in_order and self.expand == self.full:
            return x.reshape(self.shape)
        x = x.reshape(self.split).transpose(self.permutation).reshape(self.expand)
        return jnp.broadcast_to(x, self.full).reshape(self.shape)


def arrange(
    source: Sequence[Factor],
    groups: Sequence[Sequence[Factor]],
    whole: Sequence[int] = (),
) -> Arrange:
    """A value's way to one dimension for each group.

    Args:
      source: the value's labels, in order.
      groups: labels of the canonical dimensions; they include the value's.
      whole: the groups that must have all their labels; others may be of size 1.
    """
    order = [label for group in groups for label in group]
    expand, full, shape = [], [], []
    for place, group in enumerate(groups):
        sizes = [label.size for label in group]
        present = [label.size if label in source else 1 for label in group]
        needed = sizes if place in whole or any(x in source for x in group) else present
        expand += present
        full += needed
        shape.append(math.prod(needed))
    return Arrange(
        split=tuple(label.size for label in source),
        permutation=tuple(list(source).index(x) for x in order if x in source),
        expand=tuple(expand),
        full=tuple(full),
        shape=tuple(shape),
    )
