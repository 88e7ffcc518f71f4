"""Moments of a batch norm: sums of entries and of their squares, for each channel.

    sum x, sum x^2    over all dimensions but the last

Both are in one call, which each of the two sites makes; XLA keeps one of equal calls.
A sum that has no sibling is left, as are variances of entries that were centred before:
their sums begin when the mean is known.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.ops.channel_sums.primitive import bind, channel_sums_p
from tracea_jax.ops.common import lowering
from tracea_jax.rewrite.match import Match, Rule
from tracea_jax.rewrite.product import DTYPES
from tracea_jax.rewrite.view import Atom, Equation, View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MomentSite:
    """One of the two sums; power is 1 or 2."""

    power: int

    def __call__(self, x: Any, source: Any) -> Any:
        return _moment(self.power, x, source)


def _moment(power: int, x: Any, source: Any) -> Any:
    """The sum of x ** power, where x is ``source`` in float32.

    Its derivative is that of x, so that no gradient is rounded on the way to x.
    """

    @jax.custom_jvp
    def moment(x: Any, source: Any) -> Any:
        return bind(source)[power - 1]

    @moment.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x, source), (dx, _) = primals, tangents
        term = dx if power == 1 else 2 * x * dx
        return moment(x, source), term.sum(tuple(range(x.ndim - 1)))

    return moment(x, source)


def match_moment(view: View, index: int) -> Match | None:
    """The sum at an equation, if there is one of the other power beside it."""
    eqn = view.eqns[index]
    (summed,) = eqn.invars
    if not _is_over_rows(eqn) or summed.aval.dtype != jnp.float32:
        return None
    square = view.producer_index(summed)
    x = None if square is None else _squared(view.eqns[square])
    equations, power = {index}, 1
    if x is not None and view.sole_consumer(summed) == index:
        equations, power = {index, square}, 2
    else:
        x = summed
    source = narrow(view, x)
    if source.aval.dtype.name not in DTYPES:
        return None
    if not lowering.has_kernel(channel_sums_p, [source.aval], relu="none"):
        return None
    if powers(view, source, x) != {1, 2}:
        return None
    return Match(
        root=index,
        equations=frozenset(equations),
        operands=(x, source),
        site=MomentSite(power=power),
    )


MOMENTS = Rule(
    op="channel_sums",
    anchors=frozenset({"reduce_sum"}),
    match=match_moment,
    is_expected=False,  # most sums are of no norm
)


def narrow(view: View, x: Atom) -> Atom:
    """The narrower value that a float32 value was converted from, or the value."""
    eqn = view.producer(x, "convert_element_type")
    if eqn is None or eqn.invars[0].aval.dtype.name not in ("bfloat16", "float16"):
        return x
    return eqn.invars[0]


def _is_over_rows(eqn: Equation) -> bool:
    """Returns whether all dimensions but the last are summed, and there are some."""
    ndim = eqn.invars[0].aval.ndim
    return ndim > 1 and tuple(eqn.params["axes"]) == tuple(range(ndim - 1))


def _squared(eqn: Equation) -> Atom | None:
    """x, of an equation that is x^2."""
    name, first = eqn.primitive.name, eqn.invars[0]
    if name == "mul":
        return first if eqn.invars[1] is first else None
    is_square = name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)
    return first if is_square else None


def powers(view: View, source: Atom, x: Atom) -> set[int]:
    """Powers whose sums over rows the program takes of an array in float32."""
    found: set[int] = set()
    values = [x, source] if source is not x else [x]
    for index in view.consumers(source) if source is not x else ():
        if index >= 0 and view.eqns[index].primitive.name == "convert_element_type":
            values.append(view.eqns[index].outvars[0])
    for value in dict.fromkeys(values):
        for index in view.consumers(value):
            if index < 0:
                continue
            eqn = view.eqns[index]
            if eqn.primitive.name == "reduce_sum" and _is_over_rows(eqn):
                found.add(1)
            elif _squared(eqn) is value:
                found |= {
                    2
                    for i in view.consumers(eqn.outvars[0])
                    if i >= 0
                    and view.eqns[i].primitive.name == "reduce_sum"
                    and _is_over_rows(view.eqns[i])
                }
    return found
