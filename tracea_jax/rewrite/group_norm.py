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
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from tracea_jax.ops.common.promotion import promoted
from tracea_jax.ops.group_norm.primitive import bind
from tracea_jax.rewrite.activation import activation_of
from tracea_jax.rewrite.match import Match, Rule
from tracea_jax.rewrite.moments import Groups, entries_of, fits, mean_of, variance_of
from tracea_jax.rewrite.product import DTYPES, only_rounds
from tracea_jax.rewrite.replace import is_left_to_xla, is_served
from tracea_jax.rewrite.spread import Dims, Move, followed, origin
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
        images, pixels = self._outer(x.shape)
        y = bind(
            x.reshape(*images, *pixels, self.channels),
            scale,
            bias,
            ranks=len(images),
            groups=self.groups,
            epsilon=self.epsilon,
            activation=self.activation,
        )
        return y.reshape(self.shape)

    def _outer(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Dimensions of images and of pixels: those of x, where they are apart."""
        sizes = [math.prod(shape[:i]) for i in range(len(shape) + 1)]
        ends = self.images, self.images * self.pixels
        if not all(end in sizes for end in ends):
            return (self.images,), (self.pixels,)
        first, second = map(sizes.index, ends)
        return tuple(shape[:first]) or (1,), tuple(shape[first:second]) or (1,)


def match_group_norm(view: View, index: int) -> Match | str | None:
    """The norm whose subtraction an equation is."""
    begun = _Norm.begun(view, index)
    norm = None if begun is None else begun.continued()
    if norm is None or norm.epsilon is None:
        return None
    found = norm.match(norm.epsilon)
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Operand:
    """Broadcast of an operand of an elementwise equation to the shape of the result.

    Attributes:
      path: moves of its entries, the last one first.
      last: its shape after them.
      shape: of the result.
    """

    path: tuple[Move, ...] = ()
    last: tuple[int, ...]
    shape: tuple[int, ...]

    def after(self, *moves: Move) -> _Operand:
        """The operand before some moves, the last one first."""
        return dataclasses.replace(self, path=(*self.path, *moves))

    def has(self, dims: Dims | None, wanted: Dims | None) -> bool:
        """True if entries with these dimensions before the moves end as wanted."""
        moved = None if dims is None else followed(dims, self.path)
        return fits(moved, wanted, self.last)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """A norm as far as it was read.

    Each step returns another norm, or None where an equation is no part of one, so that
    nothing remains of a step that was refused.

    Attributes:
      view: the equations.
      x: what is normalised.
      groups: of x.
      value: the result so far.
      equations: indices of those that belong to it.
      epsilon, scale, bias: None until they are met.
    """

    view: View
    x: Atom
    groups: Groups
    value: Any
    equations: frozenset[int]
    epsilon: float | None = None
    scale: Atom | None = None
    bias: Atom | None = None

    @classmethod
    def begun(cls, view: View, index: int) -> _Norm | None:
        """With the subtraction."""
        eqn = view.eqns[index]
        left, right = eqn.invars
        (difference,) = eqn.outvars
        result = difference.aval
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
        equations = frozenset({index, *passed, *of, *mean.equations})
        return cls(view=view, x=x, groups=groups, value=difference, equations=equations)

    def continued(self) -> _Norm:
        """The norm with all steps that follow."""
        norm = self
        while (longer := norm._extended()) is not None:
            norm = longer
        return norm

    def _with(self, equations: Iterable[int], **changes: Any) -> _Norm:
        equations = self.equations.union(equations)
        return dataclasses.replace(self, equations=equations, **changes)

    def _extended(self) -> _Norm | None:
        """The norm with one more step; None if there is none."""
        consumers = self.view.consumers(self.value)
        # The variance may be of the same difference.
        if self.epsilon is not None and len(consumers) != 1:
            return None
        for index in consumers:
            if index == OUTPUT or index in self.view.taken:
                continue
            eqn = self.view.eqns[index]
            if (norm := self._after(eqn)) is not None:
                return norm._with({index}, value=eqn.outvars[0])
        return None

    def _after(self, eqn: Equation) -> _Norm | None:
        """The norm with what an equation does to its result."""
        name = eqn.primitive.name
        if name == "copy":  # a product with ones, see ``ones``
            return self
        if name == "reshape":
            return self if eqn.params.get("dimensions") is None else None
        if only_rounds(eqn):
            return None if self.epsilon is None else self
        if name not in ("mul", "div", "add") or self.bias is not None:
            return None
        places = [i for i, v in enumerate(eqn.invars) if v is self.value]
        result = eqn.outvars[0].aval
        if len(places) != 1 or result.size != self.x.aval.size:
            return None
        if name == "div" and places != [0]:
            return None
        other = eqn.invars[1 - places[0]]
        operand = _Operand(last=other.aval.shape, shape=result.shape)
        if name != "add":
            return self._times(other, operand, inverse=name == "mul")
        return None if self.epsilon is None else self._with_bias(other, operand)

    def _times(self, atom: Atom, operand: _Operand, *, inverse: bool) -> _Norm | None:
        """The norm with the inverse of the deviation, a scale, or their product.

        Args:
          atom: the factor, before the moves of the operand.
          operand: how it is multiplied.
          inverse: whether it multiplies; else it divides.
        """
        source, moves, passed = origin(self.view, atom)
        before = operand.after(*moves)
        index = self.view.producer_index(source)
        if index is not None:
            eqn = self.view.eqns[index]
            norm = self._times_result(eqn, before, inverse=inverse)
            if norm is not None:
                return norm._with([*passed, index])
        if not inverse or self.scale is not None:
            return None
        return self._with_parameter("scale", atom, operand)

    def _times_result(
        self, eqn: Equation, operand: _Operand, *, inverse: bool
    ) -> _Norm | None:
        """The same with what an equation makes of the deviation."""
        name = eqn.primitive.name
        if name == ("rsqrt" if inverse else "sqrt"):
            return self._over_root(eqn.invars[0], operand)
        if name != "mul" or not inverse:
            return None
        grown = operand.after(tuple(eqn.outvars[0].aval.shape))
        norm: _Norm | None = self
        for factor in eqn.invars:
            norm = norm and norm._times(factor, grown, inverse=True)
        return norm

    def _over_root(self, atom: Atom, operand: _Operand) -> _Norm | None:
        """The norm with variance + epsilon."""
        atom, moves, passed = origin(self.view, atom)
        index = self.view.producer_index(atom)
        if index is None or self.epsilon is not None:
            return None
        eqn = self.view.eqns[index]
        if eqn.primitive.name != "add":
            return None
        before = operand.after(*moves)
        for variance, number in (eqn.invars, eqn.invars[::-1]):
            epsilon = self.view.scalar(number)
            if epsilon is None or not 0 <= epsilon < math.inf:
                continue
            found = variance_of(self.view, variance, self.x)
            if found is None or found.groups != self.groups:
                return None
            if not before.has(found.dims, self.groups.mean_dims(operand.shape)):
                return None
            return self._with([*passed, index, *found.equations], epsilon=epsilon)
        return None

    def _with_bias(self, atom: Atom, operand: _Operand) -> _Norm | None:
        return self._with_parameter("bias", atom, operand)

    def _with_parameter(self, name: str, atom: Atom, operand: _Operand) -> _Norm | None:
        """The norm with a vector of all channels."""
        atom, moves, passed = origin(self.view, atom)
        if isinstance(atom, Literal):
            return None
        vector = self.groups.channels(atom.aval.shape)
        wanted = self.groups.channel_dims(operand.shape)
        if not operand.after(*moves).has(vector, wanted):
            return None
        return self._with(passed, **{name: atom})

    def match(self, epsilon: float) -> Match | str:
        """The match, with what activates the result."""
        x, value = self.x, self.value
        if value.aval.dtype != x.aval.dtype:
            return f"its result is {value.aval.dtype}, and it normalises {x.aval.dtype}"
        root, equations = self.view.producer_index(value), self.equations
        assert root is not None
        activated = activation_of(self.view, value)
        if activated is not None:
            root, equations = activated.root, equations | activated.equations
        parameters = [v for v in (self.scale, self.bias) if v is not None]
        if any(v.aval.dtype.name not in DTYPES for v in parameters):
            return "its scale or bias is of a dtype that kernels do not read"
        operands = (x, *parameters)
        own = _without_shared(self.view, equations, root, operands)
        if own is None:
            return "its mean, its variance or a value in between is used elsewhere"
        g = self.groups
        site = GroupNormSite(
            images=g.images,
            pixels=g.pixels,
            channels=g.groups * g.of_group,
            groups=g.groups,
            epsilon=epsilon,
            activation="none" if activated is None else activated.name,
            has_scale=self.scale is not None,
            has_bias=self.bias is not None,
            shape=self.view.eqns[root].outvars[0].aval.shape,
        )
        return Match(root=root, equations=own, operands=operands, site=site)


def _without_shared(
    view: View, inside: frozenset[int], root: int, operands: Sequence[Atom]
) -> frozenset[int] | None:
    """The equations without moves and conversions whose results others need too.

    None if others, or the operands of the site, need anything else.
    """
    left = set(inside)
    made = (view.producer_index(x) for x in operands)
    needed = {i for i in made if i is not None}
    while True:
        shared = {
            i
            for i in left
            if i in needed
            or i != root
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
