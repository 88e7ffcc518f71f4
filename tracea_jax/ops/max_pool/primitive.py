"""The primitives of max pooling with channels last, and its derivatives.

    x      -> [y],    y[n, i, j, c] = max of x[n, i s - p + a, j s - p + b, c] over a, b
    x, dy  -> [dx],   the gradient: each dy goes to its window's first maximum

The parameters ``kernel``, ``strides`` and ``padding`` are those of the problem. No
program calls them; ``rewrite`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax import _compat
from tracea_jax.ops.common import by_reference, jax_rules, lowering
from tracea_jax.ops.common.shapes import flat, move_mapped
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Batched,
    Cotangents,
    Differentiated,
    Dims,
    Operand,
    Tangents,
    Zero,
    ad,
    jvp,
    lax,
    mlir,
    vjp,
    vmap,
)
from tracea_jax.ops.max_pool.sharding import rule
from tracea_jax.problem import MaxPoolProblem
from tracea_jax.problem.max_pool import Pair


def reference(
    x: Any, *, kernel: Pair, strides: Pair, padding: tuple[Pair, Pair], **_: Any
) -> list[jax.Array]:
    """The maxima in lax."""
    sizes = (1, *kernel, 1), (1, *strides, 1)
    pads = ((0, 0), *padding, (0, 0))
    return [lax.reduce_window(x, -jnp.inf, lax.max, *sizes, pads)]


def _gradient(x: Any, dy: Any, **params: Any) -> list[jax.Array]:
    """The gradient in lax, also where ``transform`` finds pools in what is traced."""
    with _compat.linearize_hook(None):
        _, pull = vjp(functools.partial(reference, **params), x)
    return list(pull([dy]))


def problem_of(avals: Sequence[Aval], **params: Any) -> MaxPoolProblem:
    """The problem that parameters and static shapes describe."""
    x = avals[0]
    batch, height, width, channels = x.shape
    return MaxPoolProblem(
        direction="forward" if len(avals) == 1 else "gradient",
        batch=batch,
        height=height,
        width=width,
        channels=channels,
        dtype=x.dtype.name,
        **{name: params[name] for name in ("kernel", "strides", "padding")},
    )


max_pool_p = lowering.primitive("tracea_max_pool", reference)
gradient_p = lowering.primitive("tracea_max_pool_gradient", _gradient)
PLANNED = lowering.register(
    "max_pool",
    max_pool_p,
    problem_of,
    reference,
    sharding=functools.partial(rule, max_pool_p),
)
PLANNED_GRADIENT = lowering.register(
    "max_pool",
    gradient_p,
    problem_of,
    _gradient,
    sharding=functools.partial(rule, gradient_p),
)


def bind(x: Any, *, implementation: Any = None, config: Any = None, **params: Any):
    """The maxima."""
    how = {**params, "implementation": implementation, "config": config}
    return lowering.bound(max_pool_p, reference, (x,), how)[0]


# --- derivatives ----------------------------------------------------------------------


def _tangent(x: Any, t: Any, **params: Any) -> list[jax.Array]:
    return list(jvp(functools.partial(reference, **params), [x], [t])[1])


tangent_p = lowering.primitive("tracea_max_pool_tangent", _tangent)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=True))
by_reference.register(tangent_p, _tangent)


def _jvp(primals: Arrays, tangents: Tangents, **params: Any) -> Differentiated:
    outs = max_pool_p.bind(*primals, **params)
    (tangent,) = tangents
    if isinstance(tangent, Zero):
        return outs, [ad.Zero.from_primal_value(y) for y in outs]
    operands = lowering.align_varying_axes((*primals, tangent))
    return outs, tangent_p.bind(*operands, **params)


def _tangent_transpose(
    cts: Tangents, x: Operand, t: Operand, **params: Any
) -> Cotangents:
    (ct,) = cts
    if isinstance(ct, Zero):
        return [None, Zero(t.aval)]
    operands = lowering.align_varying_axes((x, ct))
    return [None, *gradient_p.bind(*operands, **params)]


# --- vmap -----------------------------------------------------------------------------


def _batch(p: Any, operands: Arrays, dims: Dims, **params: Any) -> Batched:
    """The mapped axis becomes one with that of images."""
    moved, mapped, size = move_mapped(operands, dims)
    spread = [
        x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_mapped in zip(moved, mapped, strict=True)
    ]
    outs = p.bind(*(flat(x, 3) for x in spread), **params)
    lead = spread[0].shape[:2]
    return [y.reshape(*lead, *y.shape[1:]) for y in outs], [0] * len(outs)


def _batch_tangent(operands: Arrays, dims: Dims, **params: Any) -> Batched:
    f = vmap(functools.partial(_tangent, **params), in_axes=tuple(dims))
    return list(f(*operands)), [0]


jax_rules.register(
    "max_pool",
    max_pool_p,
    reference,
    jvp=_jvp,
    batch=functools.partial(_batch, max_pool_p),
)
jax_rules.register(
    "max_pool",
    gradient_p,
    _gradient,
    jvp=jax_rules.own_value(gradient_p, _gradient),
    batch=functools.partial(_batch, gradient_p),
)
jax_rules.register(
    "max_pool",
    tangent_p,
    _tangent,
    jvp=jax_rules.own_value(tangent_p, _tangent),
    transpose=_tangent_transpose,
    batch=_batch_tangent,
)
