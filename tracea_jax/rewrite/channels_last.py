"""Programs whose images have channels first, with channels last where kernels want it.

Kernels take images with their channels last. A convolution with channels first could
have its image transposed before, and its result after. In a program of many such
convolutions most of these transpositions cancel: what lies in between computes the
same, entry by entry, on images of either layout.

    conv, relu, add, conv   becomes   transpose, conv, relu, add, conv, transpose
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.extend.core.primitives import transpose_p

from tracea_jax.rewrite.activation import is_jax_relu
from tracea_jax.rewrite.convolution import has_channels_first
from tracea_jax.rewrite.evaluate import is_elementwise
from tracea_jax.rewrite.spliced import is_spliced
from tracea_jax.rewrite.view import Atom, Equation, is_reshape

_CONVOLUTION = "conv_general_dilated"


def with_channels_last(
    eqns: Sequence[Equation], outvars: Iterable[Atom]
) -> Sequence[Equation]:
    """Equations that compute the same, all convolutions with channels last.

    Entry by entry all is the same but for sums, whose order is the compiler's anyway.
    The same sequence comes back if there is nothing to change, or if a convolution is
    of a kind that would stay, as gradients of weights are.
    """
    convolutions = [eqn for eqn in eqns if eqn.primitive.name == _CONVOLUTION]
    first = [eqn for eqn in convolutions if has_channels_first(eqn)]
    if not first or not all(map(_may_change, convolutions)):
        return eqns
    program = _Program(outvars)
    for eqn in eqns:
        program.add(eqn)
    program.finish()
    return _needed(program.eqns, eqns, outvars)


def _may_change(eqn: Equation) -> bool:
    numbers = eqn.params["dimension_numbers"]
    last = tuple(_places(len(numbers.lhs_spec)))
    is_last = tuple(numbers.lhs_spec) == tuple(numbers.out_spec) == last
    axes = [axis for x in eqn.invars for axis in x.aval.sharding.spec]
    is_whole = all(axis is None for axis in axes)
    is_own = is_spliced(eqn.source_info.name_stack)
    return (is_last or has_channels_first(eqn)) and is_whole and not is_own


def _order(rank: int) -> tuple[int, ...]:
    """The dimensions of channels first, in the order of channels last."""
    return (0, *range(2, rank), 1)


def _places(rank: int) -> list[int]:
    """Place of each dimension of channels first in channels last."""
    return [0, rank - 1, *range(1, rank - 1)]


class _Program:
    """Equations that are written one after another.

    Attributes:
      eqns: so far.
      last: variables with channels first, and what has the same with channels last.
      born: those of them that were computed with channels last.
      pending: those of these that have no equation yet.
      names: variables that others stand for.
      sources: equations of the program by the variable that each makes.
    """

    def __init__(self, outvars: Iterable[Atom]) -> None:
        self.eqns: list[Equation] = []
        self.last: dict[Any, Atom] = {}
        self.born: set[Any] = set()
        self.pending: dict[Any, Equation] = {}
        self.names: dict[Any, Atom] = {}
        self.sources: dict[Any, Equation] = {}
        self.outvars = [x for x in outvars if not isinstance(x, Literal)]

    def add(self, eqn: Equation) -> None:
        """Writes an equation, on images with channels last if it follows such ones."""
        invars = [self._named(x) for x in eqn.invars]
        eqn = eqn.replace(invars=invars) if self.names else eqn
        name = eqn.primitive.name
        if name == _CONVOLUTION:
            if has_channels_first(eqn):
                self._convolution(eqn)
                return
        elif any(self._is_born(x) for x in invars):
            if name == "transpose":
                self._transposed(eqn)
                return
            if (follow := _follower(eqn)) is not None and follow(self, eqn):
                return
        if self.born and is_reshape(eqn) and self._restored(eqn):
            return
        for x in invars:
            self.first(x)
        self.eqns.append(eqn)
        if len(eqn.outvars) == 1:
            self.sources[eqn.outvars[0]] = eqn

    def finish(self) -> None:
        for x in self.outvars:
            self.first(x)

    def first(self, x: Atom) -> None:
        """Makes sure that a value has an equation as the program has it."""
        if isinstance(x, Literal):
            return
        if (like := self.pending.pop(x, None)) is not None:
            order = tuple(_places(x.aval.ndim))
            self._write_transpose(like, self.last[x], x, order)

    def channels_last(self, x: Atom, like: Equation) -> Atom:
        """A value of the program with channels last, written if there is none yet."""
        if isinstance(x, Literal):
            return x
        if (known := self.last.get(x)) is not None or x.aval.ndim == 0:
            return x if known is None else known
        order = _order(x.aval.ndim)
        source = self._source(x)
        if source is not None and source.primitive.name == "broadcast_in_dim":
            made = self._broadcast(source)
        elif source is not None and source.primitive.name == "transpose":
            before = [int(i) for i in source.params["permutation"]]
            made = self._turned(source, source.invars[0], [before[i] for i in order])
        else:
            made = self._turned(like, x, order)
        self.last[x] = made
        return made

    def follow(self, eqn: Equation, **params: Any) -> bool:
        """Writes an equation with images, and parameters, for channels last."""
        invars = [self.channels_last(x, eqn) for x in eqn.invars]
        outvars = [self._result(x, eqn) for x in eqn.outvars]
        changed = dict(params={**eqn.params, **params}) if params else {}
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars, **changed))
        return True

    def reduced(self, eqn: Equation, **params: Any) -> bool:
        """The same, for results that have no channels first or last any more."""
        invars = [self.channels_last(x, eqn) for x in eqn.invars]
        self.eqns.append(eqn.replace(invars=invars, params={**eqn.params, **params}))
        return True

    def _named(self, x: Atom) -> Atom:
        return x if isinstance(x, Literal) else self.names.get(x, x)

    def _is_born(self, x: Atom) -> bool:
        return not isinstance(x, Literal) and x in self.born

    def _result(self, x: Any, eqn: Equation) -> Any:
        """The variable with channels last of a result."""
        shape = tuple(x.aval.shape[i] for i in _order(x.aval.ndim))
        made = type(x)(x.aval.update(shape=shape))
        self.last[x] = made
        self.born.add(x)
        self.pending[x] = eqn
        return made

    def _convolution(self, eqn: Equation) -> None:
        x, w = eqn.invars
        self.first(w)
        numbers = eqn.params["dimension_numbers"]
        places = tuple(_places(x.aval.ndim))
        numbers = jax.lax.ConvDimensionNumbers(places, numbers.rhs_spec, places)
        image = self.channels_last(x, eqn)
        outvars = [self._result(eqn.outvars[0], eqn)]
        params = {**eqn.params, "dimension_numbers": numbers}
        self.eqns.append(eqn.replace(invars=[image, w], outvars=outvars, params=params))

    def _transposed(self, eqn: Equation) -> None:
        """A transposition that the program has, of what has channels last already."""
        (x,), (y,) = eqn.invars, eqn.outvars
        places = _places(x.aval.ndim)
        order = tuple(places[int(i)] for i in eqn.params["permutation"])
        image = self.channels_last(x, eqn)
        if order == tuple(range(len(order))) and y not in self.outvars:
            self.names[y] = image
        else:
            self._write_transpose(eqn, image, y, order)

    def _restored(self, eqn: Equation) -> bool:
        """The image that this is again, after reshapes that gave it other dimensions.

        A map of a function of one image puts a dimension of size 1 around it.
        """
        (y,) = eqn.outvars
        before: Equation | None = eqn
        while before is not None and is_reshape(before):
            x = before.invars[0]
            if x.aval == y.aval and self._is_born(x) and y not in self.outvars:
                self.names[y] = x
                return True
            before = self._source(x)
        return False

    def _broadcast(self, source: Equation) -> Atom:
        """The result of a broadcast with its channels last, from the same operand."""
        (y,) = source.outvars
        places, order = _places(y.aval.ndim), _order(y.aval.ndim)
        shape = tuple(y.aval.shape[i] for i in order)
        x, dims = self._spread_from(source)
        dims = [places[i] for i in dims]
        if dims != sorted(dims):
            return self._turned(source, y, order)
        made = type(y)(y.aval.update(shape=shape))
        params = {"shape": shape, "broadcast_dimensions": tuple(dims)}
        params = {**source.params, **params}
        self.eqns.append(source.replace(invars=[x], outvars=[made], params=params))
        return made

    def _spread_from(self, source: Equation) -> tuple[Atom, list[int]]:
        """The operand of a broadcast, before dimensions of size 1 were added.

        Returns:
          The value, and which dimensions of the result its dimensions become.
        """
        x = source.invars[0]
        dims = [int(i) for i in source.params["broadcast_dimensions"]]
        while (before := self._source(x)) is not None:
            if before.primitive.name != "broadcast_in_dim" or len(before.invars) != 1:
                break
            if before.invars[0].aval.size != x.aval.size:
                break
            dims = [dims[int(i)] for i in before.params["broadcast_dimensions"]]
            x = before.invars[0]
        return x, dims

    def _source(self, x: Atom) -> Equation | None:
        return None if isinstance(x, Literal) else self.sources.get(x)

    def _turned(self, like: Equation, x: Atom, order: Sequence[int]) -> Atom:
        """The transposed value, which is the value itself if the order is its own."""
        order = tuple(order)
        if order == tuple(range(len(order))):
            return x
        shape = tuple(x.aval.shape[i] for i in order)
        made = type(like.outvars[0])(x.aval.update(shape=shape))
        self._write_transpose(like, x, made, order)
        return made

    def _write_transpose(
        self, like: Equation, x: Atom, result: Any, order: tuple[int, ...]
    ) -> None:
        eqn = like.replace(
            primitive=transpose_p,
            invars=[x],
            outvars=[result],
            params={"permutation": order},
            effects=frozenset(),
        )
        self.eqns.append(eqn)


def _needed(
    eqns: Sequence[Equation], before: Sequence[Equation], outvars: Iterable[Atom]
) -> list[Equation]:
    """The equations without those that only replaced ones have used."""
    had_uses = {x for e in before for x in e.invars if not isinstance(x, Literal)}
    used = {x for x in outvars if not isinstance(x, Literal)}
    kept = []
    for eqn in reversed(eqns):
        is_used = not used.isdisjoint(eqn.outvars)
        if is_used or eqn.effects or had_uses.isdisjoint(eqn.outvars):
            kept.append(eqn)
            used.update([x for x in eqn.invars if not isinstance(x, Literal)])
    return kept[::-1]


# --- what computes the same on both layouts -------------------------------------------
#
# (program, equation) -> whether it was written, for each primitive. An equation that is
# not written here is given its operands as the program has them.

_Follower = Callable[[_Program, Equation], bool]


def _follower(eqn: Equation) -> _Follower | None:
    if is_elementwise(eqn) or eqn.primitive.name in _ENTRY_BY_ENTRY:
        return _entries
    if eqn.primitive.name == "custom_jvp_call":
        return _relu if is_jax_relu(eqn) else None
    return _FOLLOWERS.get(eqn.primitive.name)


# What ``evaluate`` has no values of.
_ENTRY_BY_ENTRY = frozenset({"name", "reduce_precision"})


def _entries(program: _Program, eqn: Equation) -> bool:
    return _have_one_rank(eqn) and program.follow(eqn)


def _have_one_rank(eqn: Equation) -> bool:
    """True if operands are images of one rank, or numbers; literals are numbers."""
    ranks = {x.aval.ndim for x in (*eqn.invars, *eqn.outvars)}
    return len(ranks - {0}) == 1 and 0 not in {x.aval.ndim for x in eqn.outvars}


def _relu(program: _Program, eqn: Equation) -> bool:
    """``jax.nn.relu``, traced anew: its equation and its derivative have a shape."""
    (x,) = eqn.invars
    shape = tuple(x.aval.shape[i] for i in _order(x.aval.ndim))
    traced = jax.make_jaxpr(jax.nn.relu)(jax.ShapeDtypeStruct(shape, x.aval.dtype))
    (call,) = traced.eqns
    return program.follow(eqn, **call.params)


def _permuted(*names: str) -> _Follower:
    """A follower that permutes parameters with an entry for each dimension."""

    def follow(program: _Program, eqn: Equation) -> bool:
        if not _have_one_rank(eqn):
            return False
        order = _order(eqn.outvars[0].aval.ndim)
        given = {name: eqn.params.get(name) for name in names}
        return program.follow(
            eqn,
            **{
                name: tuple(values[i] for i in order)
                for name, values in given.items()
                if values is not None
            },
        )

    return follow


def _along(name: str) -> _Follower:
    """A follower that renumbers a parameter that is one or several dimensions."""

    def follow(program: _Program, eqn: Equation) -> bool:
        if not _have_one_rank(eqn):
            return False
        places, value = _places(eqn.outvars[0].aval.ndim), eqn.params[name]
        if isinstance(value, int):
            return program.follow(eqn, **{name: places[value]})
        return program.follow(eqn, **{name: tuple(places[int(i)] for i in value)})

    return follow


def _without(name: str) -> _Follower:
    """A follower that renumbers the dimensions that a reduction removes."""

    def follow(program: _Program, eqn: Equation) -> bool:
        if len(eqn.invars) != 1:
            return False
        rank = eqn.invars[0].aval.ndim
        gone = {int(i) for i in eqn.params[name]}
        kept = [i for i in _order(rank) if i not in gone]
        if kept != sorted(kept):
            return False
        places = _places(rank)
        return program.reduced(eqn, **{name: tuple(sorted(places[i] for i in gone))})

    return follow


def _spread(program: _Program, eqn: Equation) -> bool:
    """A broadcast of dimensions of size 1 of an image."""
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if len(eqn.invars) != 1 or tuple(map(int, dims)) != tuple(range(len(shape))):
        return False
    return program.follow(eqn, shape=tuple(shape[i] for i in _order(len(shape))))


_WINDOW = ("window_dimensions", "window_strides", "padding")
_WINDOWS = _permuted(*_WINDOW, "base_dilation", "window_dilation")
_SUMS = _without("axes")
_FOLLOWERS: dict[str, _Follower] = {
    "broadcast_in_dim": _spread,
    "concatenate": _along("dimension"),
    "pad": _permuted("padding_config"),
    "reduce_max": _SUMS,
    "reduce_min": _SUMS,
    "reduce_prod": _SUMS,
    "reduce_sum": _SUMS,
    "reduce_window": _WINDOWS,
    "reduce_window_max": _WINDOWS,
    "reduce_window_min": _WINDOWS,
    "reduce_window_sum": _WINDOWS,
    "rev": _along("dimensions"),
    "select_and_scatter_add": _permuted(*_WINDOW),
    "slice": _permuted("start_indices", "limit_indices", "strides"),
    "split": _along("axis"),
    "squeeze": _without("dimensions"),
}
