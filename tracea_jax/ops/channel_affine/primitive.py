"""The primitive of scales and shifts in a row, as of a batch norm, and its rules.

    x, c1, c2, ... -> relu(((x - c1) * c2) + ... + residual)

The scales come one after the other, with shifts before and after them. Each c has a
dimension of size 1 where it is one number for all entries of x, as for the pixels of an
image. The program's own operations compute the result, which may be rounded to another
dtype, and go through a relu after a residual was added. The derivatives are in
``gradients``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tracea_jax.catalogue import Composite
from tracea_jax.ops.channel_affine.gradients import gradients
from tracea_jax.ops.channel_affine.steps import Result, reference
from tracea_jax.ops.channel_sums.primitive import channel_sums_p
from tracea_jax.ops.common import by_reference, jax_rules, lowering
from tracea_jax.ops.common.jax_rules import jvp_of_some
from tracea_jax.ops.common.shapes import move_mapped
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
    full,
    jvp,
    lax,
    mlir,
    vmap,
)


def bind(x: Any, source: Any, *others: Any, result: Result) -> Any:
    """The result of steps in a row, or its copies.

    Args:
      x: floating.
      source: what x was converted from, which has the same values, or x.
      others: an operand for each step, of x's dtype and rank; where a size is not x's,
        it is 1. Then the residual, if there is one.
      result: the steps, and what is done to their result.
    """
    if lowering.are_sharded((x, source, *others)):
        return reference(x, source, *others, result=result)
    aligned = lowering.align_varying_axes((x, source, *others))
    return channel_affine_p.bind(*aligned, result=result)


channel_affine_p = lowering.primitive("tracea_channel_affine", reference)
mlir.register_lowering(
    channel_affine_p, mlir.lower_fun(reference, multiple_results=True)
)
by_reference.register(channel_affine_p, reference)


def _reason(avals: Sequence[Aval], *, result: Result) -> str:
    return f"the gradients of its {len(result.steps)} operands come of two sums"


CHANNEL_AFFINE = Composite(
    name="channel_affine",
    primitive=channel_affine_p,
    how="two sums",
    reason=_reason,
)


# --- derivatives ----------------------------------------------------------------------
#
# Operands of the tangent: those of the primitive; its result, if it has a residual;
# tangents of those operands whose places are in ``of``. The source has none: x has the
# derivatives of both.

_SOURCE = 1


def _tangent(*operands: Any, result: Result, of: tuple[int, ...]) -> list[Any]:
    primals, tangents = operands[: result.operands], operands[-len(of) :]
    given = dict(zip(of, tangents, strict=True))

    def f(*some: Any) -> Any:
        rest = iter(some)
        all_ = [next(rest) if i in given else x for i, x in enumerate(primals)]
        return reference(*all_, result=result)

    some = [primals[i] for i in of]
    return list(jvp(f, some, list(tangents))[1])


tangent_p = lowering.primitive("tracea_channel_affine_tangent", _tangent)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=True))
by_reference.register(tangent_p, _tangent)


def _jvp(primals: Arrays, tangents: Tangents, *, result: Result) -> Differentiated:
    given = {
        i: t for i, t in enumerate(tangents) if i != _SOURCE and not isinstance(t, Zero)
    }
    outs = channel_affine_p.bind(*primals, result=result)
    if result.residual:
        outs = _written_once(outs, primals[_SOURCE])
    if not given:
        return outs, [ad.Zero.from_primal_value(y) for y in outs]
    kept = outs[: result.residual]
    operands = lowering.align_varying_axes((*primals, *kept, *given.values()))
    return outs, tangent_p.bind(*operands, result=result, of=tuple(given))


def _written_once(outs: Sequence[Any], source: Any) -> Sequence[Any]:
    """The results, where a kernel of their gradients will read them.

    XLA would have users of a relu recompute it of its argument, which it then writes
    to memory beside the result.
    """
    center = full(source.shape[-1:], 0, jnp.float32)
    operands: list[Any] = [source, outs[0], outs[0], center]
    how = {"relu": "result", "implementation": None, "config": None}
    if not lowering.has_kernel(channel_sums_p, operands, **how):
        return outs
    if lowering.left_to_xla(channel_sums_p, operands, **how):
        return outs
    return [lax.optimization_barrier(outs[0])] * len(outs)


def _tangent_jvp(primals: Arrays, tangents: Tangents, **params: Any) -> Differentiated:
    """Second order: the tangent's own value, and its derivative in jnp."""
    outs = tangent_p.bind(*primals, **params)
    _, douts = jvp_of_some(functools.partial(_tangent, **params), primals, tangents)
    return outs, douts


def _tangent_transpose(
    cts: Tangents, *operands: Operand, result: Result, of: tuple[int, ...]
) -> Cotangents:
    count = len(operands) - len(of)
    primals, tangents = operands[:count], operands[count:]
    linear = {
        i: t.aval
        for i, t in zip(of, tangents, strict=True)
        if ad.is_undefined_primal(t)
    }
    known = [None] * count
    given = [ct for ct in cts if not isinstance(ct, Zero)]
    if not given:
        return [*known, *(Zero(linear[i]) if i in linear else None for i in of)]
    grads = gradients(given, *primals, result=result, wanted=tuple(linear))
    return [*known, *(grads.get(i) for i in of)]


# --- vmap -----------------------------------------------------------------------------


def _batch(operands: Arrays, dims: Dims, *, result: Result) -> Batched:
    """The mapped axis comes first; operands that are not mapped have it of size 1."""
    moved, mapped, size = move_mapped(operands, dims)
    arrays = [x if m else x[None] for x, m in zip(moved, mapped, strict=True)]
    for i in (0, _SOURCE, *(-1,) * result.residual):
        if not mapped[i]:
            arrays[i] = jnp.broadcast_to(arrays[i], (size, *arrays[i].shape[1:]))
    return channel_affine_p.bind(*arrays, result=result), [0] * result.copies


def _batch_tangent(operands: Arrays, dims: Dims, **params: Any) -> Batched:
    f = vmap(functools.partial(_tangent, **params), in_axes=tuple(dims))
    outs = list(f(*operands))
    return outs, [0] * len(outs)


jax_rules.register(
    "channel_affine", channel_affine_p, reference, jvp=_jvp, batch=_batch
)
jax_rules.register(
    "channel_affine",
    tangent_p,
    _tangent,
    jvp=_tangent_jvp,
    transpose=_tangent_transpose,
    batch=_batch_tangent,
)
