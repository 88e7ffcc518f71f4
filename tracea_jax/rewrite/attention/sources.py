"""The arrays that queries, keys and values are made of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tracea_jax.rewrite.attention.dims import MOVES, Dims, backward
from tracea_jax.rewrite.attention.steps import Refused
from tracea_jax.rewrite.product import DTYPES
from tracea_jax.rewrite.view import Atom, Equation, View


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """``scale`` times an array that is moved, and perhaps widened."""

    atom: Atom
    dims: Dims
    scale: float = 1.0

    @property
    def dtype(self) -> str:
        return self.atom.aval.dtype.name


def sources(view: View, atom: Atom, dims: Dims, scaled: bool) -> list[Source]:
    """Sources of a value, one for each dtype, since widening loses nothing.

    Args:
      view: the equations.
      atom, dims: the value.
      scaled: whether to look behind multiplications by numbers.
    """
    found: list[Source] = []
    source = Source(atom, dims)
    while True:
        before = _before(view, source, scaled)
        if before is None:
            return [*found, source]
        if before.dtype != source.dtype:
            found.append(source)
        source = before


def _before(view: View, source: Source, scaled: bool) -> Source | None:
    index = view.producer_index(source.atom)
    if index is None or index in view.taken:
        return None
    eqn = view.eqns[index]
    name = eqn.primitive.name
    if name in MOVES:
        if _turns_product(view, eqn):
            return None
        dims = backward(eqn, source.dims)
        return None if dims is None else Source(eqn.invars[0], dims, source.scale)
    if name == "copy" or widens(eqn):
        return Source(eqn.invars[0], source.dims, source.scale)
    return _unscaled(view, eqn, source) if scaled and name in ("mul", "div") else None


def _turns_product(view: View, eqn: Equation) -> bool:
    """Returns whether a transpose is that of a product with its operands exchanged.

    It costs nothing where it is: the product gives the transposed result at once.
    """
    dot = view.producer(eqn.invars[0], "dot_general")
    if dot is None or eqn.primitive.name != "transpose":
        return False
    (contract, _), (batch, _) = dot.params["dimension_numbers"]
    first = len(batch)
    second = dot.invars[0].aval.ndim - len(contract)
    order = [*range(first), *range(second, dot.outvars[0].aval.ndim)]
    order += range(first, second)
    return [int(i) for i in eqn.params["permutation"]] == order


def _unscaled(view: View, eqn: Equation, source: Source) -> Source | None:
    shape = eqn.outvars[0].aval.shape
    for x, other in (eqn.invars, eqn.invars[::-1]):
        factor = view.scalar(other)
        usable = factor is not None and math.isfinite(factor) and factor != 0
        if usable and factor is not None and x.aval.shape == shape:
            by = 1 / factor if eqn.primitive.name == "div" else factor
            return Source(x, source.dims, source.scale * by)
        if eqn.primitive.name == "div":
            return None
    return None


def widens(eqn: Equation) -> bool:
    """Returns whether an equation converts to a wider floating-point dtype."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return old.name in DTYPES and old.itemsize < new.itemsize


def of_one_dtype(candidates: Sequence[Sequence[Source]]) -> list[Source]:
    """The source of each operand that has a dtype which all operands have.

    Raises:
      Refused: if there is none.
    """
    for dtype in dict.fromkeys(s.dtype for each in candidates for s in each):
        chosen = [[s for s in each if s.dtype == dtype] for each in candidates]
        if dtype in DTYPES and all(chosen):
            return [each[0] for each in chosen]
    dtypes = ", ".join(each[0].dtype for each in candidates)
    raise Refused(f"queries, keys and values have different dtypes: {dtypes}")
