"""A ``dot_general`` of any layout as a product of ``ops.matmul``.

Every dimension of an operand is a batch, a free or a contracted one. Where the
dimensions of each kind lie together, the operand stays as it is, and a layout flag says
which kind is first: transposes in the program become flags. Otherwise the operand is
transposed, as XLA would do. Dimensions of a kind are not merged, so that each can be
split over devices; those of size 1 are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from tracea_jax.ops.common.ranks import Ranks
from tracea_jax.rewrite.view import Atom, Equation, View, is_static

DTYPES = frozenset({"float32", "bfloat16", "float16"})
# What XLA computes for one entry at a time, in front of a product, or moves.
_POINTWISE = (
    "add",
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "div",
    "mul",
    "neg",
    "reshape",
    "squeeze",
    "sub",
    "transpose",
)
# What kernels compute anyway: 16-bit operands, sums in float32.
_ALGORITHMS = frozenset({"BF16_BF16_F32", "F16_F16_F32"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Layout of an operand: transposed, without dimensions of 1, and as ``letter``.

    Attributes:
      permutation: of its dimensions; None if they are in order.
      shape: then, (batch..., rows..., columns...).
      letter: "n" or "t", as in ``GemmProblem.layout``.
    """

    permutation: tuple[int, ...] | None
    shape: tuple[int, ...]
    letter: str

    def __call__(self, x: Any) -> Any:
        if self.permutation is not None:
            x = x.transpose(self.permutation)
        return x.reshape(self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """Sizes of a product's dimensions of each kind; at least one but of ``batch``."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    contraction: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def ranks(self) -> Ranks:
        fields = (f.name for f in dataclasses.fields(self))
        return Ranks(**{name: len(getattr(self, name)) for name in fields})

    @property
    def result(self) -> tuple[int, ...]:
        return (*self.batch, *self.rows, *self.columns)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product whose result has the program's shape, in row-major order.

    Attributes:
      operands: the program's values, lhs first.
      lhs, rhs: how they are read.
      extents: sizes of its dimensions of each kind.
      precision: as ``dot_general`` has it.
      stored: of lhs and rhs, the narrow integers that the program makes them from; see
        ``GemmProblem.rhs_stored``.
      root: index of the equation that has the result.
      equations: indices of the equations that it replaces.
    """

    operands: tuple[Atom, Atom]
    lhs: Operand
    rhs: Operand
    extents: Extents
    precision: Any
    stored: tuple[str | None, str | None]
    root: int
    equations: frozenset[int]

    @property
    def layout(self) -> str:
        return self.lhs.letter + self.rhs.letter

    @property
    def batch(self) -> int | None:
        """None if the product is not batched."""
        return math.prod(self.extents.batch) if self.extents.batch else None

    @property
    def n(self) -> int:
        return math.prod(self.extents.columns)


Labels = tuple[int, ...]  # names the dimensions of one value


@dataclasses.dataclass(frozen=True, slots=True)
class _Side:
    atom: Atom
    labels: Labels


def product_at(view: View, index: int) -> Product | str:
    """The product that a ``dot_general`` computes, or why it is left as it is.

    A transpose of the result, where nothing else uses it, becomes part of the product
    if one order of the operands gives the transposed result at once.
    """
    eqn = view.eqns[index]
    if reason := why_not(eqn, takes_highest=True):
        return reason
    left, right = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    labels = _labels(numbers, left.aval.ndim, right.aval.ndim)
    lhs, rhs = _peel(view, left, labels.lhs), _peel(view, right, labels.rhs)
    orders = [(lhs, rhs, labels.out, index)]
    if labels.rhs_is_vector:
        orders.insert(0, (rhs, lhs, labels.out, index))  # as a row it has a bias
    if (turned := _turned(view, index, labels.out)) is not None:
        orders = [(lhs, rhs, *turned), (rhs, lhs, *turned), *orders]
    for first, second, out, root in orders:
        arranged = _arrange(
            first.labels,
            second.labels,
            out,
            first.atom.aval.shape,
            second.atom.aval.shape,
        )
        if arranged is not None:
            return Product(
                operands=(first.atom, second.atom),
                precision=eqn.params["precision"],
                stored=(stored_as(view, first.atom), stored_as(view, second.atom)),
                root=root,
                equations=frozenset({index, root}),
                **arranged,
            )
    raise AssertionError("dot_general has its results in a canonical order")


def why_not(eqn: Equation, *, takes_highest: bool = False) -> str | None:
    """Why a ``dot_general`` or convolution must stay as it is; None if it need not.

    Args:
      eqn: the equation.
      takes_highest: whether the op is as accurate as XLA at the highest precision.
    """
    for atom in (*eqn.invars, *eqn.outvars):
        if reason := _why_not_array(atom.aval):
            return reason
    if eqn.outvars[0].aval.weak_type:
        return "its dtype is weak"
    return _why_not_precision(eqn.params["precision"], takes_highest)


@functools.lru_cache(maxsize=1024)
def _why_not_array(aval: Any) -> str | None:
    if aval.dtype.name not in DTYPES:
        return f"{aval.dtype.name} is left to XLA"
    if not is_static(aval):
        return "its shapes are symbolic"
    return None


def stored_as(view: View, atom: Atom) -> str | None:
    """The dtype of 8 bits or fewer of the integers that an operand is made from.

    What lies in between has one result for each of them, and XLA may compute it as the
    product reads them.
    """
    left, seen = [atom], {id(atom)}
    while left:
        eqn = view.producer(left.pop(), *_POINTWISE)
        if eqn is None:
            continue
        (result,) = eqn.outvars
        whole = [x for x in eqn.invars if x.aval.size == result.aval.size]
        for x in whole:
            if _is_narrow(x.aval.dtype):
                return x.aval.dtype.name
        left += [x for x in whole if id(x) not in seen]
        seen.update(map(id, whole))
    return None


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits <= 8


def only_rounds(eqn: Equation) -> bool:
    """True if this converts between floats of which kernels round as they like."""
    if eqn.primitive.name != "convert_element_type":
        return False
    dtypes = (eqn.invars[0].aval.dtype.name, eqn.outvars[0].aval.dtype.name)
    return all(name in DTYPES or name == "float64" for name in dtypes)


def _why_not_precision(precision: Any, takes_highest: bool) -> str | None:
    if precision is None or getattr(precision, "name", "") in _ALGORITHMS:
        return None
    levels = [lax.Precision.DEFAULT, lax.Precision.HIGHEST][: 1 + takes_highest]
    if any(precision in (level, (level, level)) for level in levels):
        return None
    others = " or the highest" if takes_highest else ""
    return f"it asks for a precision other than the default{others}"


# --- labels of dimensions -------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Labels:
    """Names of the dimensions of a ``dot_general``'s operands and result."""

    lhs: Labels
    rhs: Labels
    out: Labels

    @property
    def rhs_is_vector(self) -> bool:
        """Returns whether the result has no dimension of the rhs alone."""
        return not any(x in self.rhs and x not in self.lhs for x in self.out)


@functools.lru_cache(maxsize=1024)
def _labels(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> _Labels:
    """Dimensions that are contracted or batched share a label."""
    contract, batch = dimension_numbers
    lhs = tuple(range(lhs_ndim))
    rhs = list(range(lhs_ndim, lhs_ndim + rhs_ndim))
    for left, right in ((contract[0], contract[1]), (batch[0], batch[1])):
        for i, j in zip(left, right, strict=True):
            rhs[int(j)] = int(i)
    out = (
        *(int(i) for i in batch[0]),
        *(x for x in lhs if x not in rhs),
        *(x for x in rhs if x not in lhs),
    )
    return _Labels(lhs=lhs, rhs=tuple(rhs), out=out)


def _peel(view: View, atom: Atom, labels: Labels) -> _Side:
    """The value before all transposes that made this one and that stay."""
    side = _Side(atom, labels)
    while (eqn := view.producer(side.atom, "transpose")) is not None:
        if view.producer_index(side.atom) in view.taken:
            break
        before = [0] * len(side.labels)
        for label, source in zip(side.labels, eqn.params["permutation"], strict=True):
            before[int(source)] = label
        side = _Side(eqn.invars[0], tuple(before))
    return side


def _turned(view: View, index: int, out: Labels) -> tuple[Labels, int] | None:
    """Labels and equation of the transposed result, if it is all that is used."""
    consumer = view.sole_consumer(view.eqns[index].outvars[0])
    if consumer is None or view.eqns[consumer].primitive.name != "transpose":
        return None
    permutation = view.eqns[consumer].params["permutation"]
    return tuple(out[int(i)] for i in permutation), consumer


# --- canonical order ------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _arrange(
    lhs: Labels,
    rhs: Labels,
    out: Labels,
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
) -> dict[str, Any] | None:
    """Fields of the product in this order; None if it gives another result.

    Layers are many and their shapes few, so answers are kept.
    """
    sizes = dict(zip((*lhs, *rhs), (*lhs_shape, *rhs_shape), strict=True))
    batch = [x for x in out if x in lhs and x in rhs]
    rows = [x for x in out if x in lhs and x not in rhs]
    columns = [x for x in out if x in rhs and x not in lhs]
    if not _same_order(out, [*batch, *rows, *columns], sizes):
        return None
    contracted = [x for x in lhs if x not in out], [x for x in rhs if x not in out]
    first, second = min(
        (
            (
                _operand(lhs, batch, rows, contraction, sizes),
                _operand(rhs, batch, contraction, columns, sizes),
            )
            for contraction in contracted
        ),
        key=lambda pair: sum(side.permutation is not None for side in pair),
    )
    extents = Extents(
        batch=_long(batch, sizes) if batch else (),
        rows=_long(rows, sizes),
        contraction=_long(contracted[0], sizes),
        columns=_long(columns, sizes),
    )
    return {"lhs": first, "rhs": second, "extents": extents}


def _operand(
    labels: Labels,
    batch: Sequence[int],
    rows: Sequence[int],
    columns: Sequence[int],
    sizes: dict[int, int],
) -> Operand:
    shape = _long(batch, sizes) if batch else ()
    straight = (*shape, *_long(rows, sizes), *_long(columns, sizes))
    if _same_order(labels, [*batch, *rows, *columns], sizes):
        return Operand(permutation=None, shape=straight, letter="n")
    if _same_order(labels, [*batch, *columns, *rows], sizes):
        turned = (*shape, *_long(columns, sizes), *_long(rows, sizes))
        return Operand(permutation=None, shape=turned, letter="t")
    permutation = tuple(labels.index(x) for x in [*batch, *rows, *columns])
    return Operand(permutation=permutation, shape=straight, letter="n")


def _same_order(found: Sequence[int], wanted: Sequence[int], sizes: Any) -> bool:
    """True if the order in memory is the same; dimensions of size 1 are nothing."""
    kept, needed = ([x for x in y if sizes[x] != 1] for y in (found, wanted))
    return kept == needed


def _long(labels: Sequence[int], sizes: dict[int, int]) -> tuple[int, ...]:
    """Sizes other than 1; (1,) if there are none."""
    return tuple(sizes[x] for x in labels if sizes[x] != 1) or (1,)
