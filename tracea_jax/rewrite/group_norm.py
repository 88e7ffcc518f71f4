"""Group norms, and the activation that follows one.

    d = x - mean;   z = d * (rsqrt(variance + epsilon) * scale) + bias;   y = act(z)

The anchor is the subtraction. What is taken away must be the mean of a group of
channels over all pixels, and have its place at all of them; the variance must be that
of the same entries, as E[x^2] - E[x]^2 or as E[(x - mean)^2], in whatever shapes. Norms
over channels alone, whose images have one pixel, are sites only where a kernel serves
them. All norms are left where a kernel is demanded and none can run. Norms of each
channel over all images are left: they are batch norms.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.common.promotion import promoted
from tracea_jax.ops.group_norm.primitive import bind
from tracea_jax.rewrite.activation import activation_of
from tracea_jax.rewrite.match import Match, Rule
from tracea_jax.rewrite.moments import Groups, entries_of, fits, mean_of, variance_of
from tracea_jax.rewrite.product import DTYPES, only_rounds
from tracea_jax.rewrite.replace import is_left_to_xla, is_served
from tracea_jax.rewrite.spread import Move, followed, origin
from tracea_jax.rewrite.view import OUTPUT, Atom, Equation, View


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
            dtype = promoted(dtype, c.dtype)
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
    if norm.epsilon is None:
        return None
    found = norm.match(value)
    if not isinstance(found, Match):
        return found if norm.groups.pixels > 1 else None
    root = view.eqns[found.root]
    is_site = is_served(found, root)
    if norm.groups.pixels > 1:  # XLA's unless a kernel was demanded that there is not
        is_site = is_site or is_left_to_xla(found, root)
    return found if is_site else None


GROUP_NORM = Rule(
    op="group_norm",
    anchors=frozenset({"sub"}),
    match=match_group_norm,
    is_expected=False,  # most differences are of no norm
)


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
    groups: Groups
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
        if x.aval.size != result.size or x.aval.ndim < 2 or result.size == 0:
            return None
        mean = mean_of(view, right, x)
        if mean is None or x.aval.dtype.name not in DTYPES:
            return None
        groups, of = mean.groups, entries_of(view, mean.of, x)
        is_batch_norm = groups.images == 1 and groups.of_group == 1
        if of is None or is_batch_norm:
            return None
        if not fits(mean.dims, groups.mean_dims(result.shape), right.aval.shape):
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
        if name == "copy":  # a product with ones, see ``ones``
            return True
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
            found = variance_of(self.view, variance, self.x)
            if found is None or found.groups != self.groups:
                return False
            dims = followed(found.dims, [*path, *moves])
            if not fits(dims, self.groups.mean_dims(shape), last):
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
        if not fits(dims, self.groups.channel_dims(shape), last):
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
