"""The product whose result is the logits, with what only moves or biases them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tracea_jax.rewrite.matmul import bias_of
from tracea_jax.rewrite.product import Product, only_rounds, product_at
from tracea_jax.rewrite.view import Atom, View


@dataclasses.dataclass(frozen=True, slots=True)
class Reshaped:
    """Rows in other dimensions."""

    lead: tuple[int, ...]

    def __call__(self, x: Any) -> Any:
        return x.reshape(*self.lead, x.shape[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class Sliced:
    """Some of the rows: start, end and step in each dimension."""

    slices: tuple[tuple[int, int, int], ...]

    def __call__(self, x: Any) -> Any:
        return x[tuple(slice(*s) for s in self.slices)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Logits, of shape (..., vocabulary).

    Attributes:
      product: that they are.
      moves: which rows of the product's lhs they belong to.
      bias: that is added to them, or None.
      dtype: that they are computed in.
      result: the value that has them.
      equations: indices of all from the product to the result.
    """

    product: Product
    moves: tuple[Reshaped | Sliced, ...]
    bias: Atom | None
    dtype: str
    result: Any
    equations: frozenset[int]

    @property
    def rows(self) -> int:
        return math.prod(self.result.aval.shape[:-1])


def head_at(view: View, index: int) -> Head | None:
    """The logits at a ``dot_general``; None if it is no product of rows and columns."""
    product = product_at(view, index)
    if isinstance(product, str) or product.batch is not None:
        return None
    result = view.eqns[product.root].outvars[0]
    shape = result.aval.shape
    if not shape or shape[-1] != product.n:
        return None
    head = Head(
        product=product,
        moves=(Reshaped(shape[:-1]),),
        bias=None,
        dtype=result.aval.dtype.name,
        result=result,
        equations=product.equations,
    )
    while (longer := _extended(view, head)) is not None:
        head = longer
    return head


def _extended(view: View, head: Head) -> Head | None:
    """The head with the next step, if the logits are used for nothing else."""
    consumer = view.sole_consumer(head.result)
    if consumer is None:
        return None
    eqn = view.eqns[consumer]
    changes = _step(view, head, eqn)
    if changes is None:
        return None
    (result,) = eqn.outvars
    equations = head.equations | {consumer}
    return dataclasses.replace(head, result=result, equations=equations, **changes)


def _step(view: View, head: Head, eqn: Any) -> dict[str, Any] | None:
    shape = eqn.outvars[0].aval.shape
    match eqn.primitive.name:
        case "copy":
            return {}
        case "convert_element_type" if only_rounds(eqn):
            return {}
        case "reshape" | "squeeze":
            if not shape or shape[-1] != head.product.n:
                return None
            if eqn.primitive.name == "reshape" and eqn.params["dimensions"]:
                return None
            return {"moves": (*head.moves, Reshaped(shape[:-1]))}
        case "slice" if shape[-1] == head.product.n:
            limits = eqn.params["start_indices"], eqn.params["limit_indices"]
            strides = eqn.params["strides"] or (1,) * len(shape)
            slices = tuple(zip(*limits, strides, strict=True))[:-1]
            return {"moves": (*head.moves, Sliced(slices))}
        case "add" if head.bias is None:
            return _biased(view, head, eqn)
    return None


def _biased(view: View, head: Head, eqn: Any) -> dict[str, Any] | None:
    first, second = eqn.invars
    other = second if first is head.result else first
    shape = head.result.aval.shape
    if eqn.outvars[0].aval.shape != shape:
        return None
    found = bias_of(view, other, shape, head.product)
    if found is None or found[0] != "row":
        return None
    return {"bias": found[1], "dtype": eqn.outvars[0].aval.dtype.name}
