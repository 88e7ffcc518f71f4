"""Meanings of the values that a program computes from logits.

A ``Value`` is a sum, with whole coefficients, of the logit, the log-sum-exp of its row
and the row's maximum; or it is a step on the way to the log-sum-exp. Values of a row
are in the order of the rows, whatever their shape.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from tracea_jax.rewrite.cross_entropy.labels import Labels, gathered, is_spread, one_hot
from tracea_jax.rewrite.product import only_rounds
from tracea_jax.rewrite.view import OUTPUT, Equation, View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The meaning of one value.

    Attributes:
      kind: "full" for an entry a logit, "rows" for an entry a row. Steps are "exp", of
        logits less a maximum, their "sum", whether a maximum is "finite", and "picked",
        which is full and zero but at the labels.
      logit: coefficient of the logit; of rows, of the label's.
      lse: coefficient of the log-sum-exp.
      raw: coefficient of the maximum.
      guarded: coefficient of the maximum, or 0 where that is not finite.
      moving: coefficient of the maximum in derivatives, which ``stop_gradient`` zeroes.
    """

    kind: str
    logit: int = 0
    lse: int = 0
    raw: int = 0
    guarded: int = 0
    moving: int = 0

    @property
    def stopped(self) -> Value:
        """As it is where nothing is differentiated."""
        return dataclasses.replace(self, moving=0)

    def plus(self, other: Value, factor: int) -> Value:
        kind = "full" if "full" in (self.kind, other.kind) else "rows"
        names = ("logit", "lse", "raw", "guarded", "moving")
        sums = {n: getattr(self, n) + factor * getattr(other, n) for n in names}
        return Value(kind=kind, **sums)

    @property
    def difference(self) -> int:
        """1 for the label's logit less the log-sum-exp, -1 for its negative, or 0."""
        for sign in (1, -1):
            if self == Value(kind="rows", logit=sign, lse=-sign):
                return sign
        return 0


_LOGITS = Value(kind="full", logit=1)
_RAW = Value(kind="rows", raw=1)
_GUARDED = Value(kind="rows", guarded=1)
_LSE = Value(kind="rows", lse=1)
_SAME = frozenset({"copy", "pvary"})


def _as_full(value: Value) -> Value:
    return dataclasses.replace(value, kind="full")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Site of a loss.

    Attributes:
      root: index of the equation with the result.
      labels: that it is of.
      equations: indices of all from the logits to it.
      sign, is_whole, is_raw, summed, lead: as in ``CrossEntropySite``.
    """

    root: int
    labels: Labels
    equations: frozenset[int]
    sign: int
    is_whole: bool
    is_raw: bool
    summed: tuple[int, ...]
    lead: tuple[int, ...]


class Reading:
    """One reading of what a program does with logits.

    Values are read in the order of the program, until all uses of all are understood.
    """

    def __init__(self, view: View, logits: Any) -> None:
        self._view = view
        self._values: dict[Any, Value] = {}
        self._pending: list[int] = []
        self._read: set[int] = set()
        self._labels: list[Labels] = []
        self._roots: list[Loss] = []
        self._shift: Value | None = None  # what logits are shifted by before the exp
        self._obstacle: str | None = None
        self._rows = math.prod(logits.aval.shape[:-1])
        self._columns = logits.aval.shape[-1]
        self._add(logits, _LOGITS)

    def loss(self) -> Loss | str | None:
        """The loss; why there is none; None if there is no log-sum-exp of logits."""
        while self._pending:
            index = heapq.heappop(self._pending)
            if index not in self._read:
                self._read.add(index)
                self._visit(index)
        if not any(v.lse for v in self._values.values()) and not self._roots:
            return None
        if self._obstacle or len(self._roots) != 1:
            return self._obstacle or "no single loss is computed of the logits"
        (loss,) = self._roots
        return dataclasses.replace(loss, equations=frozenset(self._read))

    def _add(self, var: Any, value: Value) -> None:
        self._values[var] = value
        for index in self._view.consumers(var):
            if index == OUTPUT:
                self._refuse(value, "a result of the program")
            else:
                heapq.heappush(self._pending, index)

    def _value(self, atom: Any) -> Value | None:
        return None if isinstance(atom, Literal) else self._values.get(atom)

    def _refuse(self, value: Value, use: str) -> None:
        what = "the logits are" if value.kind == "full" else "what is made of logits is"
        self._obstacle = self._obstacle or f"{what} also {use}"

    def _visit(self, index: int) -> None:
        eqn = self._view.eqns[index]
        if index in self._view.taken:
            self._obstacle = self._obstacle or "parts of it belong to another site"
            return
        if not any(self._view.consumers(var) for var in eqn.outvars):
            return  # computed in vain, as signs of sums are
        args = [self._value(x) for x in eqn.invars]
        value = self._meaning(eqn, args)
        if value is None:
            known = next(v for v in args if v is not None)
            self._refuse(known, f"used by {eqn.primitive.name}")
        elif value.difference:
            self._end(index, value.difference)
        else:
            (result,) = eqn.outvars
            self._add(result, value)

    def _end(self, index: int, sign: int) -> None:
        eqn = self._view.eqns[index]
        is_pick = eqn.primitive.name in ("gather", "reduce_sum")
        summed, lead = (), ()
        if eqn.primitive.name == "reduce_sum":
            lead = eqn.invars[0].aval.shape[:-1]
            summed = tuple(i for i in map(int, eqn.params["axes"]) if i < len(lead))
        self._roots.append(
            Loss(
                root=index,
                labels=self._labels[0],
                equations=frozenset(),
                sign=sign,
                is_whole=is_pick,
                is_raw=self._shift is not None and self._shift.stopped == _RAW,
                summed=summed,
                lead=lead,
            )
        )

    # --- one equation -----------------------------------------------------------------

    def _meaning(self, eqn: Equation, args: Sequence[Value | None]) -> Value | None:
        """The meaning of the result; None if it is not understood."""
        name, first = eqn.primitive.name, args[0]
        if name in ("add", "sub"):
            return self._sum(eqn, *args, factor=1 if name == "add" else -1)
        if name in ("max", "mul", "select_n", "gather"):
            return getattr(self, f"_{name}")(eqn, *args)
        if first is None:
            return None
        if name in _SAME or (name == "convert_element_type" and only_rounds(eqn)):
            return first
        if name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim"):
            return first if self._keeps_rows(eqn, first) else None
        match name, first.kind:
            case "neg", "full" | "rows":
                return Value(kind=first.kind).plus(first, -1)
            case "stop_gradient", _:
                return first.stopped if first.stopped in (_RAW, _GUARDED) else None
            case "reduce_max", _:
                if first != _LOGITS or not self._is_of_rows(eqn):
                    return None
                return dataclasses.replace(_RAW, moving=1)
            case "is_finite", _:
                return Value(kind="finite") if first.stopped == _RAW else None
            case "exp", _:
                return self._exp(first)
            case "reduce_sum", "exp":
                return Value(kind="sum") if self._is_of_rows(eqn) else None
            case "reduce_sum", "picked":
                return self._sum_of_picked(eqn, first)
            case "abs", "sum":
                return first
            case "log", "sum" if self._shift is not None:
                return _LSE.plus(self._shift, -1)
        return None

    def _keeps_rows(self, eqn: Equation, value: Value) -> bool:
        """True if a reshape or broadcast leaves rows in order, and columns last."""
        if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
            return False
        x, y = eqn.invars[0].aval, eqn.outvars[0].aval
        if eqn.primitive.name == "broadcast_in_dim":
            places = [int(i) for i in eqn.params["broadcast_dimensions"]]
            if x.size != y.size:
                full = y.size == self._rows * self._columns
                return value.kind == "rows" and full and is_spread(eqn)
            if places != sorted(places):
                return False
        if value.kind in ("full", "exp", "picked"):
            return y.ndim > 0 and y.shape[-1] == self._columns
        return x.size == self._rows

    def _is_of_rows(self, eqn: Equation) -> bool:
        """Returns whether a reduction is one over the last dimension."""
        return [int(i) for i in eqn.params["axes"]] == [eqn.invars[0].aval.ndim - 1]

    def _exp(self, x: Value) -> Value | None:
        """The meaning of exp(logits - maximum), always of the same maximum."""
        shift = _LOGITS.plus(x, -1)
        if shift.stopped not in (_as_full(_RAW), _as_full(_GUARDED)) or self._shift:
            return None
        self._shift = dataclasses.replace(shift, kind="rows")
        return Value(kind="exp")

    def _sum_of_picked(self, eqn: Equation, x: Value) -> Value | None:
        rows = dataclasses.replace(x, kind="rows")
        axes = [int(i) for i in eqn.params["axes"]]
        if eqn.invars[0].aval.ndim - 1 not in axes:
            return None
        return rows if len(axes) == 1 or rows.difference else None

    def _sum(self, eqn: Equation, x: Any, y: Any, factor: int) -> Value | None:
        if x is None or y is None or {x.kind, y.kind} - {"full", "rows"}:
            return None
        value, result = x.plus(y, factor), eqn.outvars[0].aval
        columns = self._columns if value.kind == "full" else 1
        if result.size != self._rows * columns:
            return None
        for arg, atom in zip((x, y), eqn.invars, strict=True):
            # One entry a row stands for all columns only in a last dimension of 1.
            if value.kind != arg.kind and atom.aval.size == self._rows:
                if atom.aval.shape != (*result.shape[:-1], 1):
                    return None
        return value

    def _max(self, eqn: Equation, x: Any, y: Any) -> Value | None:
        """The meaning of the larger one of the logits' maximum and minus infinity."""
        value, other = (x, eqn.invars[1]) if y is None else (y, eqn.invars[0])
        lowest = self._view.scalar(other) == -math.inf
        is_maximum = value is not None and value.stopped == _RAW
        return value if is_maximum and lowest else None

    def _mul(self, eqn: Equation, x: Any, y: Any) -> Value | None:
        """The meaning of logits multiplied by a one-hot array."""
        value, other = (x, eqn.invars[1]) if y is None else (y, eqn.invars[0])
        return self._picked(eqn, value, other)

    def _select_n(self, eqn: Equation, which: Any, *cases: Any) -> Value | None:
        if len(cases) != 2:
            return None
        mask, on_false, _ = eqn.invars
        if self._view.scalar(on_false) != 0:
            return None
        if which is not None:
            x = cases[1]
            if which.kind != "finite" or x is None or x.stopped != _RAW:
                return None
            return dataclasses.replace(_GUARDED, moving=x.moving)
        return self._picked(eqn, cases[1], mask)

    def _picked(self, eqn: Equation, value: Any, mask: Any) -> Value | None:
        """Full values that are kept at the labels alone.

        Where a label is outside of the vocabulary they are zero, so that a maximum that
        was subtracted would not cancel.
        """
        shape = eqn.outvars[0].aval.shape
        if value is None or value.kind != "full" or value.raw or value.guarded:
            return None
        labels = one_hot(self._view, mask, shape)
        return self._labelled(dataclasses.replace(value, kind="picked"), labels)

    def _gather(self, eqn: Equation, x: Any, _: Any) -> Value | None:
        if x is None:
            return None
        if x.kind == "rows":  # of a dimension of one, its only entry
            same = eqn.params["slice_sizes"] == eqn.invars[0].aval.shape
            whole = same and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
            first = self._view.scalar(eqn.invars[1]) == 0
            return x if whole and first else None
        if x.kind != "full":
            return None
        labels = gathered(self._view, eqn)
        if labels is not None and labels.outside == "nan" and x.moving:
            return None  # NaN has no derivative that would cancel the maximum's
        return self._labelled(dataclasses.replace(x, kind="rows"), labels)

    def _labelled(self, value: Value, labels: Labels | None) -> Value | None:
        if labels is None or self._labels:  # one label a row
            return None
        self._labels.append(labels)
        return value
