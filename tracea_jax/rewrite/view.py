"""One jaxpr as a graph that rules can walk: who makes a value, who uses it."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from tracea_jax.rewrite.evaluate import evaluate, is_elementwise

Atom = Any  # a variable or a literal of a jaxpr
Equation = Any
T = TypeVar("T")

OUTPUT = -1  # stands for the jaxpr's results among the consumers of a value
_MAX_CONSTANT = 1 << 16  # elements: larger captured arrays are weights, not masks


class View:
    """The equations of one jaxpr with their producers, consumers and constants.

    Attributes:
      eqns, outvars: the equations, in order, and the jaxpr's results.
      taken: indices that an accepted match replaces; other rules keep off them.
      vain: indices of equations that nothing needs; they are nobody's consumers.
      outside: inputs that always have one value of an enclosing jaxpr, with it.
    """

    def __init__(
        self, eqns: Iterable[Equation], outvars: Iterable[Atom], known: Mapping = {}
    ) -> None:
        """Args:
        eqns, outvars: of the jaxpr.
        known: variables defined outside whose values are known while tracing.
        """
        self.eqns = list(eqns)
        self.outvars = list(outvars)
        self.taken: set[int] = set()
        self.vain = _in_vain(self.eqns, self.outvars)
        self.memory: dict[Any, Any] = {}  # of ``remembered`` functions
        self.outside: dict[Any, tuple[View, Atom]] = {}
        self._known = known
        self._producers: dict[Any, int] = {}
        self._consumers: dict[Any, list[int]] = collections.defaultdict(list)
        self._scalars: dict[Any, Any] = {}
        for index, eqn in enumerate(self.eqns):
            for atom in () if index in self.vain else eqn.invars:
                if not isinstance(atom, Literal):
                    self._consumers[atom].append(index)
            for var in eqn.outvars:
                self._producers[var] = index
        for atom in self.outvars:
            if not isinstance(atom, Literal):
                self._consumers[atom].append(OUTPUT)

    def producer(self, atom: Atom, *names: str) -> Equation | None:
        """The equation that makes a value, if its primitive has one of the names."""
        index = self.producer_index(atom)
        if index is None or (names and self.eqns[index].primitive.name not in names):
            return None
        return self.eqns[index]

    def producer_index(self, atom: Atom) -> int | None:
        return None if isinstance(atom, Literal) else self._producers.get(atom)

    def consumers(self, var: Any) -> list[int]:
        """Indices of the equations that use a value, once for each use; or OUTPUT."""
        return [] if isinstance(var, Literal) else self._consumers.get(var, [])

    def use(self, atom: Atom, index: int) -> None:
        """Notes that a match with this root will use a value."""
        if not isinstance(atom, Literal):
            self._consumers[atom].append(index)

    def sole_consumer(self, var: Any) -> int | None:
        """The equation with the only use of a value, unless a match has taken it."""
        consumers = self.consumers(var)
        if len(consumers) != 1 or consumers[0] == OUTPUT or consumers[0] in self.taken:
            return None
        return consumers[0]

    def are_interior(self, equations: frozenset[int], root: int) -> bool:
        """True if nothing outside of the set needs a result of it but the root's."""
        return all(
            equations.issuperset(self.consumers(var))
            for index in equations
            if index != root
            for var in self.eqns[index].outvars
        )

    def constant(self, atom: Atom) -> np.ndarray | None:
        """The value of a literal or a small captured array; None if it is neither."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        value = self._known.get(atom)
        if value is None or isinstance(value, Tracer):
            return None
        small = math.prod(np.shape(value)) <= _MAX_CONSTANT
        return np.asarray(value) if small else None

    def known(self, atom: Atom) -> Any:
        """The value of a literal or of a captured array, as it is; None for others."""
        return atom.val if isinstance(atom, Literal) else self._known.get(atom)

    def captured(self, atom: Atom) -> np.ndarray | None:
        """The value of a captured array, large ones included; None for others.

        It may have to be copied from a device: for what is likely to be a mask.
        """
        value = None if isinstance(atom, Literal) else self._known.get(atom)
        if value is None or isinstance(value, Tracer):
            return None
        here = getattr(value, "is_fully_addressable", True)
        return np.asarray(value) if here else None

    def scalar(self, atom: Atom) -> float | None:
        """The number that all entries of a value have, if that is known.

        Literals, captured scalars, and arithmetic, conversions and broadcasts of them.
        """
        if isinstance(atom, Literal):
            return _number(np.asarray(atom.val))
        pending = [atom]  # no recursion: programs are longer than Python's stack
        while pending:
            var = pending[-1]
            missing = None if var in self._scalars else self._unfolded(var)
            if missing is not None:
                pending.append(missing)
                continue
            if var not in self._scalars:
                self._scalars[var] = self._fold(var)
            pending.pop()
        return self._scalars[atom]

    def _unfolded(self, var: Any) -> Any | None:
        """An operand whose number must be known before that of its result."""
        for x in self._numbers_in(self.producer(var)):
            if not isinstance(x, Literal) and x not in self._scalars:
                return x
            if self.scalar(x) is None:
                return None
        return None

    def _numbers_in(self, eqn: Equation | None) -> Sequence[Atom]:
        """The operands of an equation that make its result one number, if any can."""
        if eqn is None:
            return ()
        if eqn.primitive.name in _SAME_NUMBER:
            return eqn.invars[:1]
        return eqn.invars if is_elementwise(eqn) else ()

    def _fold(self, var: Any) -> float | None:
        """The number of a value, once that of what it is computed from is known."""
        eqn = self.producer(var)
        if eqn is None and var in self.outside:
            outer, atom = self.outside[var]
            return outer.scalar(atom)
        if eqn is None:
            value = self.constant(var)
            return None if value is None else _number(value)
        values: list[float] = []
        for x in self._numbers_in(eqn):
            if (number := self.scalar(x)) is None:
                return None
            values.append(number)
        if not values:
            return None
        if eqn.primitive.name in _SAME_NUMBER:
            return values[0]
        pairs = zip(values, eqn.invars, strict=True)
        value = evaluate(eqn, *(np.asarray(v, x.aval.dtype) for v, x in pairs))
        return None if value is None else _number(value)


def _in_vain(eqns: Sequence[Equation], outvars: Iterable[Atom]) -> frozenset[int]:
    """Indices of equations without effects whose results no result depends on."""
    needed = {x for x in outvars if not isinstance(x, Literal)}
    found: list[int] = []
    for index in range(len(eqns) - 1, -1, -1):
        eqn = eqns[index]
        if needed.isdisjoint(eqn.outvars) and not eqn.effects:
            found.append(index)
        else:
            needed.update([x for x in eqn.invars if not isinstance(x, Literal)])
    return frozenset(found)


def remembered(f: Callable[..., T]) -> Callable[..., T]:
    """f(view, atom, ...), computed once for each: expressions share their parts.

    For functions of the equations alone, not of what matches have taken.
    """

    @functools.wraps(f)
    def cached(view: View, atom: Atom, *rest: Any) -> T:
        if isinstance(atom, Literal):
            return f(view, atom, *rest)
        key = (f, atom, *rest)
        if key not in view.memory:
            view.memory[key] = f(view, atom, *rest)
        return view.memory[key]

    return cached


def is_reshape(eqn: Equation) -> bool:
    """Returns whether this is a reshape, however it is spelled."""
    if eqn.primitive.name == "reshape":
        return eqn.params.get("dimensions") is None
    return eqn.primitive.name == "squeeze" or (
        eqn.primitive.name == "broadcast_in_dim"
        and len(eqn.invars) == 1
        and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    )


def is_static(aval: Any) -> bool:
    """Returns whether all sizes of an array are known numbers."""
    return all(isinstance(size, int) for size in aval.shape)


def _number(value: np.ndarray) -> float | None:
    """The number that all entries are, bit by bit; integers beyond 2^53 are none."""
    if value.size == 0 or value.dtype.kind not in "fiubV":
        return None
    first = value.flat[0]
    if value.size > 1 and value.tobytes() != first.tobytes() * value.size:
        return None
    if value.dtype.kind in "iu" and abs(int(first)) > 1 << 53:
        return None
    return float(first)


# Of a value whose entries are one number, and never of none.
_SAME_NUMBER = frozenset(
    {"broadcast_in_dim", "reshape", "slice", "squeeze", "stop_gradient", "transpose"}
)
