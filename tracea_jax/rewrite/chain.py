"""Products that are layers in a row, which have a better derivative rule together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tracea_jax.ops.common.ranks import Ranks
from tracea_jax.ops.matmul.chain import Layer, chain
from tracea_jax.ops.matmul.primitive import matmul_p
from tracea_jax.rewrite.match import Match
from tracea_jax.rewrite.view import Equation, View

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChainSite:
    """A call of ``chain``."""

    layers: tuple[Layer, ...]

    def __call__(self, *operands: Any) -> Any:
        return chain(self.layers, *operands)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChainMatch(Match):
    """Products that one call replaces.

    Attributes:
      products: their indices.
    """

    products: tuple[int, ...]


def chains(
    view: View, members: Callable[[Sequence[int]], T | None]
) -> Iterator[tuple[ChainMatch, T]]:
    """Takes the longest chains of products of ours that can be replaced.

    Args:
      view: the products, in order.
      members: what one call replaces for these equations; None if it cannot. Then the
        beginning of the chain is tried.
    """
    for index in range(len(view.eqns)):
        if index in view.taken or not _is_layer(view.eqns[index]):
            continue
        products, equations, found = [index], [index], None
        while (longer := _next(view, products[-1])) is not None:
            equations += longer
            products.append(longer[-1])
        while len(products) > 1 and (found := members(equations)) is None:
            products.pop()
            del equations[equations.index(products[-1]) + 1 :]
        if found is not None:
            view.taken.update(equations)
            yield _match(view, products, frozenset(equations)), found


def may_begin(eqn: Equation) -> bool:
    """True if a chain could begin with this equation; of most programs none could."""
    return _is_layer(eqn) and _is_activated(eqn)


def with_sources(call: Equation, products: Sequence[Equation]) -> Equation:
    """The call of a chain with scopes and lines of the user's own products inside."""
    body = call.params["body"]
    inside = [e for e in body.eqns if e.primitive is matmul_p]
    assert len(inside) == len(products) == len(body.eqns)
    pairs = zip(inside, products, strict=True)
    eqns = [e.replace(source_info=product.source_info) for e, product in pairs]
    info = call.source_info
    return call.replace(
        params={**call.params, "body": body.replace(eqns=eqns)},
        source_info=info.replace(name_stack=type(info.name_stack)()),
    )


def _match(view: View, indices: list[int], equations: frozenset[int]) -> ChainMatch:
    eqns = [view.eqns[i] for i in indices]
    own = [x for eqn in eqns for x in eqn.invars[1:]]
    return ChainMatch(
        products=tuple(indices),
        root=indices[-1],
        equations=equations,
        operands=(eqns[0].invars[0], *own),
        site=ChainSite(layers=tuple(map(_layer, eqns))),
    )


def _layer(eqn: Equation) -> Layer:
    names = ("layout", "out", "precision", "epilogue")
    scope, rows = str(eqn.source_info.name_stack), eqn.invars[0].aval.ndim - 1
    return Layer(**{name: eqn.params[name] for name in names}, rows=rows, scope=scope)


def _next(view: View, index: int) -> tuple[int, ...] | None:
    """The layer whose lhs is all that this one is for, after the reshapes between."""
    eqn = view.eqns[index]
    if not _is_activated(eqn):
        return None
    result = value = eqn.outvars[0]
    passed: list[int] = []
    while (consumer := view.sole_consumer(value)) is not None:
        passed.append(consumer)
        after = view.eqns[consumer]
        if _is_layer(after) and after.invars[0] is value:
            same = value.aval.shape == result.aval.shape
            return tuple(passed) if same else None
        if after.primitive.name != "reshape" or after.params["dimensions"] is not None:
            return None
        value = after.outvars[0]
    return None


def _is_activated(eqn: Equation) -> bool:
    epilogue = eqn.params["epilogue"]
    return epilogue.activation != "none" and not epilogue.residual


def _is_layer(eqn: Equation) -> bool:
    """True if this is a product of matrices whose implementation is left to us."""
    if eqn.primitive is not matmul_p:
        return False
    params, (lhs, rhs) = eqn.params, (x.aval for x in eqn.invars[:2])
    return (
        Ranks.of(lhs, rhs, params) == Ranks(rows=lhs.ndim - 1)
        and params["layout"][0] == "n"
        and params["implementation"] is None
        and params["config"] is None
        and params["epilogue"].bias != "batched_row"
        and not params["epilogue"].is_derivative
        and not params["epilogue"].save_preactivation
    )
