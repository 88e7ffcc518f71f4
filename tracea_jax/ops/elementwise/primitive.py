"""The primitive of elementwise functions, and what JAX's transformations make of it.

    x, y -> [function(x, y)]   or   x -> [function(x)]

Operands have one dtype, and one shape or that of a number. Derivatives are those of the
function in jnp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.ops.common import jax_rules, lowering
from tracea_jax.ops.common.shapes import move_mapped
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Batched,
    Differentiated,
    Dims,
    Tangents,
    ad,
    jvp,
)
from tracea_jax.ops.elementwise.sharding import rule
from tracea_jax.problem import ElementwiseProblem

_IN_JNP: dict[str, Callable[..., jax.Array]] = {
    "add": jnp.add,
    "subtract": jnp.subtract,
    "multiply": jnp.multiply,
    "divide": jnp.divide,
    "negative": jnp.negative,
    "abs": jnp.abs,
}


def reference(*operands: jax.Array, function: str, **_: Any) -> list[jax.Array]:
    return [_IN_JNP[function](*operands)]


def problem_of(avals: Sequence[Aval], *, function: str, **_: Any) -> ElementwiseProblem:
    """The problem that the primitive's parameters and static shapes describe."""
    shapes = [aval.shape for aval in avals]
    scalar = "none"
    if len(set(shapes)) > 1:
        scalar = "right" if shapes[1] == () else "left"
    return ElementwiseProblem(
        function=function,
        size=math.prod(max(shapes, key=len)),
        dtype=avals[0].dtype.name,
        scalar=scalar,
    )


elementwise_p = lowering.primitive("tracea_elementwise", reference)
PLANNED = lowering.register(
    "elementwise", elementwise_p, problem_of, reference, sharding=rule
)


def bind(*operands: Any, **params: Any) -> jax.Array:
    """The primitive's result."""
    return lowering.bound(elementwise_p, reference, operands, params)[0]


def _jvp(primals: Arrays, tangents: Tangents, **params: Any) -> Differentiated:
    """The primitive's own value, the derivative of its reference."""
    full = [ad.instantiate_zeros(t) for t in tangents]
    _, douts = jvp(functools.partial(reference, **params), [*primals], full)
    return [bind(*primals, **params)], douts


def _batch(operands: Arrays, dims: Dims, **params: Any) -> Batched:
    """vmap: the same function of larger arrays; a mapped number is spread over them."""
    moved, mapped, size = move_mapped(operands, dims)
    inner = max((x.shape[m:] for x, m in zip(moved, mapped, strict=True)), key=len)

    def full(x: jax.Array, is_mapped: bool) -> jax.Array:
        if not is_mapped and x.ndim == 0:
            return x
        missing = (1,) * (len(inner) - (x.ndim - is_mapped))
        leading = x.shape[:1] if is_mapped else (1,)
        x = x.reshape(*leading, *missing, *x.shape[is_mapped:])
        return jnp.broadcast_to(x, (size, *inner))

    return [bind(*map(full, moved, mapped), **params)], [0]


jax_rules.register("elementwise", elementwise_p, reference, jvp=_jvp, batch=_batch)
