"""Group norms, and the activation that follows one.

    d = x - mean;   z = d * (rsqrt(variance + epsilon) * scale) + bias;   y = act(z)

The anchor is the subtraction. What is taken away must be the mean of a group of
channels over all pixels, and have its place at all of them; the variance must be that
of the same entries, as E[x^2] - E[x]^2 or as E[(x - mean)^2], in whatever shapes. Norms
over channels alone, whose images have one pixel, are left: XLA computes them in one pass
too. So are norms of each channel over all images, which are batch norms.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.group_norm.primitive import bind
from tracea_jax.rewrite.activation import activation_of
from tracea_jax.rewrite.match import Match, Rule
from tracea_jax.rewrite.product import DTYPES, only_rounds
from tracea_jax.rewrite.spread import Dims, Move, followed, origin, refined, regrouped
from tracea_jax.rewrite.view import OUTPUT, Atom, Equation, View

_CHANNEL = "channel"  # names the factors of what has an entry for each channel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupNormSite:
    """A call of ``group_norm_p``.

    Attributes:
      images, pixels, channels: of x.
      groups, epsilon, activation: as the primitive has them.
      has_scale, has_bias: whether they are operands.
      shape: of the result.
    """

    images: int
    pixels: int
    channels: int
    groups: int
    epsilon: float
    activation: str
    has_scale: bool
    has_bias: bool
    shape: tuple[int, ...]

    def __call__(self, x: Any, *parameters: Any) -> Any:
        given = [c.reshape(self.channels) for c in parameters]
        dtype = given[0].dtype if given else x.dtype
        for c in given[1:]:
            dtype = jnp.promote_types(dtype, c.dtype)
        given = [c.astype(dtype) for c in given]
        scale = given.pop(0) if self.has_scale else jnp.ones(self.channels, dtype)
        bias = given.pop(0) if self.has_bias else jnp.zeros(self.channels, dtype)
        y = bind(
            x.reshape(self.images, self.pixels, self.channels),
            scale,
            bias,
            groups=self.groups,
            epsilon=self.epsilon,
            activation=self.activation,
        )
        return y.reshape(self.shape)


def match_group_norm(view: View, index: int) -> Match | str | None:
    """The norm whose subtraction an equation is."""
    eqn = view.eqns[index]
    norm = _Norm.begun(view, eqn)
    if norm is None:
        return None
    norm.equations.add(index)
    value = norm.continued(eqn.outvars[0])
    if value is None or norm.epsilon is None:
        return None
    return norm.match(value)


GROUP_NORM = Rule(
    op="group_norm",
    anchors=frozenset({"sub"}),
    match=match_group_norm,
    is_expected=False,  # most differences are of no norm
)


# --- groups ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """Which entries of x a mean is of.

    Attributes:
      factors: of x's dimensions, the slowest first: (size, whether the mean has an
        entry for each, whether they are channels).
    """

    factors: tuple[tuple[int, bool, bool], ...]

    @classmethod
    def of(
        cls, shape: Sequence[int], seen: Sequence[int], axes: Iterable[int]
    ) -> _Groups | None:
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
        """Whether images come before pixels, and groups before their channels."""
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


def _fits(dims: Dims | None, wanted: Dims | None, shape: Sequence[int]) -> bool:
    """Whether a value's entries are in the places wanted, those of size 1 in all."""
    if dims is None or wanted is None or len(dims) != len(wanted):
        return False
    return all(
        a == b or (n == 1 and all(name is None for _, name in b))
        for a, b, n in zip(dims, wanted, shape, strict=True)
    )


# --- means and variances --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Mean:
    """A mean of some entries of an array.

    Attributes:
      of: the array.
      groups: of x, whose entries are in the same order.
      dims: of the value with the mean, named as in ``groups``.
      equations: that compute it.
    """

    of: Atom
    groups: _Groups
    dims: Dims
    equations: frozenset[int]


def _mean(view: View, atom: Atom, x: Atom) -> _Mean | None:
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
    groups = _Groups.of(x.aval.shape, of.aval.shape, axes)
    if groups is None or not groups.are_of_images:
        return None
    kept = groups.kept_dims(eqn.outvars[0].aval.shape)
    dims = None if kept is None else followed(kept, path)
    if dims is None:
        return None
    return _Mean(of=of, groups=groups, dims=dims, equations=frozenset(passed))


def _factor(view: View, eqn: Equation) -> tuple[Atom, float] | None:
    """What an equation multiplies with a number, and the number."""
    name = eqn.primitive.name
    if name not in ("mul", "div"):
        return None
    for place in (0, 1) if name == "mul" else (0,):
        number = view.scalar(eqn.invars[1 - place])
        if number:
            return eqn.invars[place], number if name == "mul" else 1 / number
    return None


def _square(view: View, atom: Atom) -> tuple[Atom, set[int]] | None:
    """What a value is the square of."""
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


def _entries(view: View, atom: Atom, x: Atom) -> set[int] | None:
    """The equations that move and widen x to a value with the same entries."""
    found, _, passed = origin(view, atom)
    return set(passed) if found is x and atom.aval.size == x.aval.size else None


def _centred(view: View, atom: Atom, x: Atom, groups: _Groups) -> set[int] | None:
    """The equations that take the mean of its group away from each entry of x."""
    atom, _, passed = origin(view, atom)
    index = view.producer_index(atom)
    if index is None or view.eqns[index].primitive.name != "sub":
        return None
    left, right = view.eqns[index].invars
    own, mean = _entries(view, left, x), _mean(view, right, x)
    if own is None or mean is None or mean.groups != groups:
        return None
    of = _entries(view, mean.of, x)
    wanted = groups.mean_dims(left.aval.shape)
    if of is None or not _fits(mean.dims, wanted, right.aval.shape):
        return None
    return {*passed, index, *own, *of, *mean.equations}


def _variance(view: View, atom: Atom, x: Atom) -> _Mean | None:
    """The variance that a value is; ``of`` is x."""
    mean = _mean(view, atom, x)
    if mean is not None and (squared := _square(view, mean.of)) is not None:
        centred = _centred(view, squared[0], x, mean.groups)
        if centred is None:
            return None
        equations = mean.equations | squared[1] | centred
        return dataclasses.replace(mean, of=x, equations=equations)
    return _variance_of_squares(view, atom, x)


def _variance_of_squares(view: View, atom: Atom, x: Atom) -> _Mean | None:
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
    squares = _mean(view, eqn.invars[0], x)
    root = _square(view, eqn.invars[1])
    if squares is None or root is None:
        return None
    squared, mean = _square(view, squares.of), _mean(view, root[0], x)
    if squared is None or mean is None or mean.groups != squares.groups:
        return None
    own = [_entries(view, v, x) for v in (squared[0], mean.of)]
    dims = followed(mean.dims, path)
    if None in own or squares.dims != mean.dims or dims is None:
        return None
    equations = squares.equations.union(
        passed, root[1], squared[1], mean.equations, *(e for e in own if e)
    )
    return dataclasses.replace(mean, of=x, dims=dims, equations=equations)


# --- the norm -------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, kw_only=True)
class _Norm:
    """What is known of a norm, equation by equation.

    Attributes:
      view: the equations.
      x: what is normalised.
      groups: of x.
      equations: that belong to it.
      epsilon, scale, bias: as far as they were met.
    """

    view: View
    x: Atom
    groups: _Groups
    equations: set[int]
    epsilon: float | None = None
    scale: Atom | None = None
    bias: Atom | None = None

    @classmethod
    def begun(cls, view: View, eqn: Equation) -> _Norm | None:
        """With the subtraction."""
        left, right = eqn.invars
        result = eqn.outvars[0].aval
        if result.dtype.name not in DTYPES or left.aval.shape != result.shape:
            return None
        x, _, passed = origin(view, left)
        if x.aval.size != result.size or x.aval.ndim < 3 or result.size == 0:
            return None
        mean = _mean(view, right, x)
        if mean is None or x.aval.dtype.name not in DTYPES:
            return None
        groups, of = mean.groups, _entries(view, mean.of, x)
        is_batch_norm = groups.images == 1 and groups.of_group == 1
        if of is None or groups.pixels == 1 or is_batch_norm:
            return None
        if not _fits(mean.dims, groups.mean_dims(result.shape), right.aval.shape):
            return None
        equations = {*passed, *of, *mean.equations}
        return cls(view=view, x=x, groups=groups, equations=equations)

    def continued(self, value: Any) -> Any:
        """The value after all steps that follow."""
        while (after := self._step(value)) is not None:
            value = after
        return value

    def _step(self, value: Any) -> Any:
        """The value after one more step; None if there is none."""
        consumers = self.view.consumers(value)
        # The variance may be of the same difference.
        if self.epsilon is not None and len(consumers) != 1:
            return None
        for index in consumers:
            if index == OUTPUT or index in self.view.taken:
                continue
            eqn = self.view.eqns[index]
            if self._takes(eqn, value):
                self.equations.add(index)
                return eqn.outvars[0]
        return None

    def _takes(self, eqn: Equation, value: Any) -> bool:
        name = eqn.primitive.name
        if name == "reshape":
            return eqn.params.get("dimensions") is None
        if only_rounds(eqn):
            return self.epsilon is not None
        if name not in ("mul", "div", "add") or eqn.outvars[0].aval.size != self.size:
            return False
        places = [i for i, v in enumerate(eqn.invars) if v is value]
        if len(places) != 1 or (name == "div" and places != [0]):
            return False
        other = eqn.invars[1 - places[0]]
        shape = eqn.outvars[0].aval.shape
        if name == "add":
            return (
                self.bias is None
                and self.epsilon is not None
                and (self._takes_parameter("bias", other, [], other.aval.shape, shape))
            )
        if self.bias is not None:
            return False
        return self._takes_factor(
            other, [], other.aval.shape, shape, inverse=name == "mul"
        )

    @property
    def size(self) -> int:
        return self.x.aval.size

    def _takes_factor(
        self,
        atom: Atom,
        path: Sequence[Move],
        last: Sequence[int],
        shape: Sequence[int],
        *,
        inverse: bool,
    ) -> bool:
        """Takes the inverse of the deviation, the scale, or their product.

        Args:
          atom: the factor, before the moves of ``path``.
          path: moves, the last one first.
          last: the factor's shape after them.
          shape: of what is multiplied.
          inverse: whether it multiplies; else it divides.
        """
        atom, moves, passed = origin(self.view, atom)
        path = [*path, *moves]
        index = self.view.producer_index(atom)
        eqn = None if index is None else self.view.eqns[index]
        name = "" if eqn is None else eqn.primitive.name
        if eqn is not None and name == ("rsqrt" if inverse else "sqrt"):
            found = self._takes_root(eqn.invars[0], path, last, shape)
        elif eqn is not None and name == "mul" and inverse:
            grown = [*path, tuple(eqn.outvars[0].aval.shape)]
            found = all(
                self._takes_factor(v, grown, last, shape, inverse=True)
                for v in eqn.invars
            )
        else:
            return (
                inverse
                and self.scale is None
                and (self._takes_parameter("scale", atom, path, last, shape))
            )
        if found:
            assert index is not None
            self.equations |= {*passed, index}
        return found

    def _takes_root(
        self,
        atom: Atom,
        path: Sequence[Move],
        last: Sequence[int],
        shape: Sequence[int],
    ) -> bool:
        """Takes variance + epsilon."""
        atom, moves, passed = origin(self.view, atom)
        index = self.view.producer_index(atom)
        if index is None or self.epsilon is not None:
            return False
        eqn = self.view.eqns[index]
        if eqn.primitive.name != "add":
            return False
        for variance, number in (eqn.invars, eqn.invars[::-1]):
            epsilon = self.view.scalar(number)
            if epsilon is None or not 0 <= epsilon < math.inf:
                continue
            found = _variance(self.view, variance, self.x)
            if found is None or found.groups != self.groups:
                return False
            dims = followed(found.dims, [*path, *moves])
            if not _fits(dims, self.groups.mean_dims(shape), last):
                return False
            self.epsilon = epsilon
            self.equations |= {*passed, index, *found.equations}
            return True
        return False

    def _takes_parameter(
        self,
        name: str,
        atom: Atom,
        path: Sequence[Move],
        last: Sequence[int],
        shape: Sequence[int],
    ) -> bool:
        """Takes a vector of all channels."""
        atom, moves, passed = origin(self.view, atom)
        vector = self.groups.channels(atom.aval.shape)
        dims = None if vector is None else followed(vector, [*path, *moves])
        if not _fits(dims, self.groups.channel_dims(shape), last):
            return False
        setattr(self, name, atom)
        self.equations |= set(passed)
        return True

    def match(self, value: Any) -> Match | str | None:
        """The match, the result of which is a value."""
        activation, x = "none", self.x
        if value.aval.dtype != x.aval.dtype:
            return f"its result is {value.aval.dtype}, and it normalises {x.aval.dtype}"
        root = self.view.producer_index(value)
        assert root is not None and self.epsilon is not None
        if (activated := activation_of(self.view, value)) is not None:
            activation, root = activated.name, activated.root
            self.equations |= activated.equations
        parameters = [v for v in (self.scale, self.bias) if v is not None]
        if any(v.aval.dtype.name not in DTYPES for v in parameters):
            return "its scale or bias is of a dtype that kernels do not read"
        equations = _without_shared(self.view, self.equations, root)
        if equations is None:
            return "its mean, its variance or a value in between is used elsewhere"
        g = self.groups
        site = GroupNormSite(
            images=g.images,
            pixels=g.pixels,
            channels=g.groups * g.of_group,
            groups=g.groups,
            epsilon=self.epsilon,
            activation=activation,
            has_scale=self.scale is not None,
            has_bias=self.bias is not None,
            shape=self.view.eqns[root].outvars[0].aval.shape,
        )
        return Match(
            root=root, equations=equations, operands=(x, *parameters), site=site
        )


def _without_shared(view: View, inside: set[int], root: int) -> frozenset[int] | None:
    """The equations without moves and conversions whose results others need too.

    None if others need anything else.
    """
    left = set(inside)
    while True:
        shared = {
            i
            for i in left
            if i != root
            and any(
                c not in left for v in view.eqns[i].outvars for c in view.consumers(v)
            )
        }
        if not shared:
            return frozenset(left)
        if not all(_is_cheap(view.eqns[i]) for i in shared):
            return None
        left -= shared


def _is_cheap(eqn: Equation) -> bool:
    return eqn.primitive.name in (
        "broadcast_in_dim",
        "convert_element_type",
        "reshape",
        "squeeze",
    )
