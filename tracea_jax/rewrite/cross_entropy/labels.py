"""Recognition of the entry of each row that its label names."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jax.lax import GatherScatterMode

from tracea_jax.rewrite.evaluate import evaluate
from tracea_jax.rewrite.view import Atom, Equation, View

_MOST = 1 << 24  # indices that are looked at one by one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels, one a row, in the order of the rows.

    Attributes:
      atom: the integers; its shape is that of the rows but for dimensions of 1.
      outside: as in ``CrossEntropySite``.
    """

    atom: Atom
    outside: str


def gathered(view: View, eqn: Equation) -> Labels | None:
    """The labels, if a gather takes one entry of each row, in order."""
    shape = eqn.invars[0].aval.shape
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    lead, last = shape[:-1], len(shape) - 1
    rows = math.prod(lead)
    outside = _outside(eqn)
    if outside is None or eqn.outvars[0].aval.size != rows or math.prod(sizes) != 1:
        return None
    indices = eqn.invars[1]
    into = [int(i) for i in numbers.start_index_map]
    batched = [int(i) for i in numbers.operand_batching_dims]
    if last not in into or indices.aval.size != rows * len(into):
        return None
    own = [int(i) for i in numbers.start_indices_batching_dims]
    if own != sorted(own) or batched != sorted(batched):
        return None  # rows in another order
    parts = _parts(view, indices, len(into))
    if parts is None:
        return None
    places = dict(zip(into, parts, strict=True))
    for axis, size in enumerate(lead):
        if axis in batched or (size == 1 and axis not in places):
            continue
        if axis not in places or not _are_positions(view, places[axis], lead, axis):
            return None
    return Labels(atom=places[last], outside=outside)


def _outside(eqn: Equation) -> str | None:
    mode, fill = eqn.params["mode"], eqn.params["fill_value"]
    if mode == GatherScatterMode.FILL_OR_DROP:
        return "nan" if fill is None or np.isnan(fill) else None
    return "clip"  # what is promised to be inside is not looked at, but clipped


def _parts(view: View, indices: Atom, count: int) -> list[Atom] | None:
    """The indices of each dimension."""
    if count == 1:
        return [indices]
    eqn = view.producer(indices, "concatenate")
    last = indices.aval.ndim - 1
    if eqn is None or eqn.params["dimension"] != last or len(eqn.invars) != count:
        return None
    return list(eqn.invars)


def _are_positions(view: View, atom: Atom, lead: tuple[int, ...], axis: int) -> bool:
    """Tests whether each row has its own place along an axis, and rows are in order."""
    if math.prod(lead) > _MOST:
        return False
    found = integers(view, atom)
    if found is None or atom.aval.size != math.prod(lead):
        return False
    found = np.broadcast_to(found, atom.aval.shape).reshape(lead)
    wanted = np.arange(lead[axis]).reshape([-1] + [1] * (len(lead) - axis - 1))
    return bool((found == wanted).all())


def integers(view: View, atom: Atom) -> np.ndarray | None:
    """An array of integers that is known while tracing: positions, and what is made so.

    Dimensions along which it is the same may have size 1.
    """
    value = view.constant(atom)
    if value is not None:
        return value
    eqn = view.producer(atom)
    if eqn is None or atom.aval.size > _MOST:
        return None
    shape = eqn.outvars[0].aval.shape
    if eqn.primitive.name == "iota":
        along = eqn.params["dimension"]
        sizes = [n if i == along else 1 for i, n in enumerate(shape)]
        return np.arange(shape[along], dtype=atom.aval.dtype).reshape(sizes)
    operands = [integers(view, x) for x in eqn.invars]
    if not operands or any(x is None for x in operands):
        return None
    match eqn.primitive.name, operands:
        case "broadcast_in_dim", [np.ndarray() as x]:
            sizes = [1] * len(shape)
            for i, n in zip(eqn.params["broadcast_dimensions"], x.shape, strict=True):
                sizes[int(i)] = n
            return x.reshape(sizes)
        case (("reshape" | "squeeze"), [np.ndarray() as x]):
            return np.broadcast_to(x, eqn.invars[0].aval.shape).reshape(shape)
    return evaluate(eqn, *operands)  # pyright: ignore[reportArgumentType]


def one_hot(view: View, atom: Atom, shape: tuple[int, ...]) -> Labels | None:
    """The labels, if a value of this shape, or a boolean, is 1 at them and 0 elsewhere.

    Labels outside of the columns are nowhere.
    """
    eqn = view.producer(atom, "convert_element_type")
    if eqn is not None and eqn.invars[0].aval.dtype == bool:
        atom = eqn.invars[0]
    eqn = view.producer(atom, "eq")
    if eqn is None or eqn.outvars[0].aval.shape != shape:
        return None
    for labels, columns in (eqn.invars, eqn.invars[::-1]):
        found = integers(view, columns)
        wanted = np.arange(shape[-1])
        if found is None or found.shape[-1:] != wanted.shape:
            continue
        source = unspread(view, labels, shape)
        is_integer = np.issubdtype(labels.aval.dtype, np.integer)
        if source is not None and is_integer and (found == wanted).all():
            return Labels(atom=source, outside="zero")
    return None


def unspread(view: View, atom: Atom, shape: tuple[int, ...]) -> Atom | None:
    """A value with one entry a row, of one that repeats it over the columns."""
    if atom.aval.shape == (*shape[:-1], 1):
        return atom
    eqn = view.producer(atom, "broadcast_in_dim")
    if eqn is None or not is_spread(eqn) or eqn.outvars[0].aval.shape != shape:
        return None
    return eqn.invars[0]


def is_spread(eqn: Equation) -> bool:
    """Tests whether a ``broadcast_in_dim`` repeats one entry a row over the columns."""
    x, shape = eqn.invars[0], eqn.outvars[0].aval.shape
    places = [int(i) for i in eqn.params["broadcast_dimensions"]]
    sizes = [1] * len(shape)
    for place, size in zip(places, x.aval.shape, strict=True):
        sizes[place] = size
    return places == sorted(places) and tuple(sizes) == (*shape[:-1], 1)
