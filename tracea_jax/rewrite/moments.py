"""Which values of a program are the mean, or the variance, of groups of channels.

An array x has images, pixels and channels; the mean of a group of channels is that over
all pixels of an image and the channels of the group. Programs reshape x so that sums
have axes for that, and the means until each entry of x has its own; where these are,
``spread`` tells. Caller: ``group_norm``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from tracea_jax.rewrite.spread import Dims, followed, origin, refined, regrouped
from tracea_jax.rewrite.view import Atom, Equation, View

_CHANNEL = "channel"  # names the factors of what has an entry for each channel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Which entries of x a mean is of.

    Attributes:
      factors: of x's dimensions, the slowest first: (size, whether the mean has an
        entry for each, whether they are channels).
    """

    factors: tuple[tuple[int, bool, bool], ...]

    @classmethod
    def of(
        cls, shape: Sequence[int], seen: Sequence[int], axes: Iterable[int]
    ) -> Groups | None:
        """Those of sums over some axes of x in another shape."""
        own, cut = refined(shape, seen), refined(seen, shape)
        if own is None or cut is None:
            return None
        kept = [d not in axes for d, sizes in enumerate(cut) for _ in sizes]
        places = [(n, d + 1 == len(own)) for d, sizes in enumerate(own) for n in sizes]
        return cls(
            factors=tuple(
                (n, is_kept, is_channel)
                for (n, is_channel), is_kept in zip(places, kept, strict=True)
            )
        )

    def _size(self, *, kept: bool, channels: bool) -> int:
        return math.prod(n for n, k, c in self.factors if (k, c) == (kept, channels))

    @property
    def images(self) -> int:
        return self._size(kept=True, channels=False)

    @property
    def pixels(self) -> int:
        return self._size(kept=False, channels=False)

    @property
    def groups(self) -> int:
        return self._size(kept=True, channels=True)

    @property
    def of_group(self) -> int:
        return self._size(kept=False, channels=True)

    @property
    def are_of_images(self) -> bool:
        """Tests whether images come before pixels, and groups before their channels."""
        orders = [[k for _, k, c in self.factors if c == is_c] for is_c in (0, 1)]
        return all(order == sorted(order, reverse=True) for order in orders)

    def mean_dims(self, shape: Sequence[int]) -> Dims | None:
        """The dimensions of a value of this shape with the mean at each entry."""
        names = [(n, i if k else None) for i, (n, k, _) in enumerate(self.factors)]
        return regrouped(names, shape)

    def channel_dims(self, shape: Sequence[int]) -> Dims | None:
        """The same of a value of each channel."""
        return regrouped(self._channel_names(), shape)

    def _channel_names(self) -> list[tuple[int, Any]]:
        return [
            (n, (_CHANNEL, i) if c else None)
            for i, (n, _, c) in enumerate(self.factors)
        ]

    def kept_dims(self, shape: Sequence[int]) -> Dims | None:
        """The dimensions of the sums, of this shape."""
        names = [(n, i) for i, (n, k, _) in enumerate(self.factors) if k]
        return regrouped(names, shape)

    def channels(self, shape: Sequence[int]) -> Dims | None:
        """The dimensions of a vector of all channels, of this shape."""
        return regrouped([f for f in self._channel_names() if f[1]], shape)


def fits(dims: Dims | None, wanted: Dims | None, shape: Sequence[int]) -> bool:
    """True if a value's entries are in the places wanted, those of size 1 in all."""
    if dims is None or wanted is None or len(dims) != len(wanted):
        return False
    return all(
        a == b or (n == 1 and all(name is None for _, name in b))
        for a, b, n in zip(dims, wanted, shape, strict=True)
    )


# --- means and variances --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A mean of some entries of an array.

    Attributes:
      of: the array.
      groups: of x, whose entries are in the same order.
      dims: of the value with the mean, named as in ``groups``.
      equations: that compute it.
    """

    of: Atom
    groups: Groups
    dims: Dims
    equations: frozenset[int]


def mean_of(view: View, atom: Atom, x: Atom) -> Moment | None:
    """The mean that a value is, of what has as many entries as x."""
    path: list[Equation] = []
    passed: list[int] = []
    share = 1.0
    while True:
        atom, moves, others = origin(view, atom)
        path += moves
        passed += others
        index = view.producer_index(atom)
        if index is None:
            return None
        passed.append(index)
        eqn = view.eqns[index]
        if eqn.primitive.name == "reduce_sum":
            break
        factor = _factor(view, eqn)
        if factor is None:
            return None
        atom, number = factor
        share *= number
    of, axes = eqn.invars[0], eqn.params["axes"]
    count = math.prod(of.aval.shape[d] for d in axes)
    if of.aval.size != x.aval.size or not math.isclose(share * count, 1, rel_tol=1e-6):
        return None
    groups = Groups.of(x.aval.shape, of.aval.shape, axes)
    if groups is None or not groups.are_of_images:
        return None
    kept = groups.kept_dims(eqn.outvars[0].aval.shape)
    dims = None if kept is None else followed(kept, path)
    if dims is None:
        return None
    return Moment(of=of, groups=groups, dims=dims, equations=frozenset(passed))


def _factor(view: View, eqn: Equation) -> tuple[Atom, float] | None:
    """The operand that an equation multiplies by a number, and the number."""
    name = eqn.primitive.name
    if name not in ("mul", "div"):
        return None
    for place in (0, 1) if name == "mul" else (0,):
        number = view.scalar(eqn.invars[1 - place])
        if number:
            return eqn.invars[place], number if name == "mul" else 1 / number
    return None


def _square(view: View, atom: Atom) -> tuple[Atom, set[int]] | None:
    """The operand that a value is the square of."""
    atom, _, passed = origin(view, atom)
    index = view.producer_index(atom)
    if index is None:
        return None
    eqn = view.eqns[index]
    name, operands = eqn.primitive.name, eqn.invars
    is_square = (
        name == "square"
        or (name == "integer_pow" and eqn.params["y"] == 2)
        or (name == "mul" and operands[0] is operands[1])
    )
    return (operands[0], {*passed, index}) if is_square else None


def entries_of(view: View, atom: Atom, x: Atom) -> set[int] | None:
    """The equations that move and widen x to a value with the same entries."""
    found, _, passed = origin(view, atom)
    return set(passed) if found is x and atom.aval.size == x.aval.size else None


def _centred(view: View, atom: Atom, x: Atom, groups: Groups) -> set[int] | None:
    """The equations that take the mean of its group away from each entry of x."""
    atom, _, passed = origin(view, atom)
    index = view.producer_index(atom)
    if index is None or view.eqns[index].primitive.name != "sub":
        return None
    left, right = view.eqns[index].invars
    own, mean = entries_of(view, left, x), mean_of(view, right, x)
    if own is None or mean is None or mean.groups != groups:
        return None
    of = entries_of(view, mean.of, x)
    wanted = groups.mean_dims(left.aval.shape)
    if of is None or not fits(mean.dims, wanted, right.aval.shape):
        return None
    return {*passed, index, *own, *of, *mean.equations}


def variance_of(view: View, atom: Atom, x: Atom) -> Moment | None:
    """The variance that a value is; ``of`` is x."""
    mean = mean_of(view, atom, x)
    if mean is not None and (squared := _square(view, mean.of)) is not None:
        centred = _centred(view, squared[0], x, mean.groups)
        if centred is None:
            return None
        equations = mean.equations | squared[1] | centred
        return dataclasses.replace(mean, of=x, equations=equations)
    return _of_squares(view, atom, x)


def _of_squares(view: View, atom: Atom, x: Atom) -> Moment | None:
    """E[x^2] - E[x]^2, perhaps cut off at zero."""
    path: list[Equation] = []
    passed: list[int] = []
    while True:
        atom, moves, others = origin(view, atom)
        path += moves
        passed += others
        index = view.producer_index(atom)
        if index is None:
            return None
        passed.append(index)
        eqn = view.eqns[index]
        if eqn.primitive.name != "max":
            break
        numbers = [view.scalar(v) for v in eqn.invars]
        if 0.0 not in numbers:
            return None
        atom = eqn.invars[1 - numbers.index(0.0)]
    if eqn.primitive.name != "sub":
        return None
    squares = mean_of(view, eqn.invars[0], x)
    root = _square(view, eqn.invars[1])
    if squares is None or root is None:
        return None
    squared, mean = _square(view, squares.of), mean_of(view, root[0], x)
    if squared is None or mean is None or mean.groups != squares.groups:
        return None
    own = [entries_of(view, v, x) for v in (squared[0], mean.of)]
    dims = followed(mean.dims, path)
    if None in own or squares.dims != mean.dims or dims is None:
        return None
    equations = squares.equations.union(
        passed, root[1], squared[1], mean.equations, *(e for e in own if e)
    )
    return dataclasses.replace(mean, of=x, dims=dims, equations=equations)
