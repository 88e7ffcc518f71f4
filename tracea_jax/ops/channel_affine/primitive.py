"""The primitive of scales and shifts in a row, as of a batch norm, and its rules.

    x, c1, c2, ... -> ((x - c1) * c2) + ...

The scales come one after the other, with shifts before and after them. Each c has a
dimension of size 1 where it is one number for all entries of x, as for the pixels of an
image. The program's own operations compute the result. The gradient of
each c is a sum over those pixels, of dz or of dz times the entry that c scales; written
one by one they take a pass over both arrays each. But all of them follow from two sums,

    sum of dz,    sum of dz * v

where v is the entry that the first scale is multiplied with: centred, in a norm.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tracea_jax.catalogue import Composite
from tracea_jax.ops.common import by_reference, lowering
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
    batching,
    broadcast_shapes,
    full,
    jvp,
    mlir,
    vmap,
)
from tracea_jax.ops.matmul.primitive import jvp_of_some

STEPS = ("add", "sub", "rsub", "mul", "div")
SCALES = ("mul", "div")


def bind(x: Any, *operands: Any, steps: tuple[str, ...]) -> Any:
    """The result of steps of ``STEPS`` in a row; "rsub" is c - y.

    Args:
      x: floating.
      operands: one for each step, of x's dtype and rank; where a size is not x's, it
        is 1.
      steps: their names; no shift is between two scales.
    """
    if lowering.explicitly_sharded("channel_affine", (x, *operands), None):
        return reference(x, *operands, steps=steps)[0]
    aligned = lowering.align_varying_axes((x, *operands))
    return channel_affine_p.bind(*aligned, steps=steps)[0]


def reference(x: Any, *operands: Any, steps: tuple[str, ...]) -> list[Any]:
    """The primitive in jnp, each operation as a program has it."""
    for name, c in zip(steps, operands, strict=True):
        x = _step(name, x, c)
    return [x]


def _step(name: str, y: Any, c: Any) -> Any:
    match name:
        case "add":
            return y + c
        case "sub":
            return y - c
        case "rsub":
            return c - y
        case "mul":
            return y * c
        case _:
            return y / c


channel_affine_p = lowering.primitive("tracea_channel_affine", reference)
mlir.register_lowering(
    channel_affine_p, mlir.lower_fun(reference, multiple_results=True)
)
by_reference.register(channel_affine_p, reference)


def _reason(avals: Sequence[Aval], *, steps: tuple[str, ...]) -> str:
    return f"the gradients of its {len(steps)} operands come of two sums"


CHANNEL_AFFINE = Composite(
    name="channel_affine",
    primitive=channel_affine_p,
    how="two sums",
    reason=_reason,
)


# --- derivatives ----------------------------------------------------------------------
#
# Operands of the tangent: those of the primitive, then tangents of those of them whose
# places are in ``of``.


def _tangent(*operands: Any, steps: tuple[str, ...], of: tuple[int, ...]) -> list[Any]:
    primals, tangents = operands[: len(steps) + 1], operands[len(steps) + 1 :]
    given = dict(zip(of, tangents, strict=True))

    def f(*some: Any) -> Any:
        rest = iter(some)
        all_ = [next(rest) if i in given else x for i, x in enumerate(primals)]
        return reference(*all_, steps=steps)

    some = [primals[i] for i in of]
    return list(jvp(f, some, list(tangents))[1])


tangent_p = lowering.primitive("tracea_channel_affine_tangent", _tangent)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=True))
by_reference.register(tangent_p, _tangent)


def _jvp(
    primals: Arrays, tangents: Tangents, *, steps: tuple[str, ...]
) -> Differentiated:
    given = {i: t for i, t in enumerate(tangents) if not isinstance(t, Zero)}
    outs = channel_affine_p.bind(*primals, steps=steps)
    operands = lowering.align_varying_axes((*primals, *given.values()))
    return outs, tangent_p.bind(*operands, steps=steps, of=tuple(given))


def _tangent_jvp(primals: Arrays, tangents: Tangents, **params: Any) -> Differentiated:
    """Second order: the tangent's own value, and its derivative in jnp."""
    outs = tangent_p.bind(*primals, **params)
    _, douts = jvp_of_some(functools.partial(_tangent, **params), primals, tangents)
    return outs, douts


def _tangent_transpose(
    cts: Tangents, *operands: Operand, steps: tuple[str, ...], of: tuple[int, ...]
) -> Cotangents:
    count = len(steps) + 1
    primals, tangents = operands[:count], operands[count:]
    linear = {
        i: t.aval
        for i, t in zip(of, tangents, strict=True)
        if ad.is_undefined_primal(t)
    }
    known = [None] * count
    (ct,) = cts
    if isinstance(ct, Zero):
        return [*known, *(Zero(linear[i]) if i in linear else None for i in of)]
    grads = gradients(ct, *primals, steps=steps, wanted=tuple(linear))
    return [*known, *(grads.get(i) for i in of)]


ad.primitive_jvps[channel_affine_p] = _jvp
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose


def gradients(
    dz: Any, x: Any, *operands: Any, steps: tuple[str, ...], wanted: tuple[int, ...]
) -> dict[int, Any]:
    """The cotangents of x, the operand 0, and of those of the steps, from 1 on."""
    wide: Any = jnp.promote_types(x.dtype, jnp.float32)
    constants = [c.astype(wide) for c in operands]
    after = _factors(steps, constants)
    found: dict[int, Any] = {}
    if 0 in wanted:
        factor = jnp.broadcast_to(after[0], broadcast_shapes(*_shapes(operands)))
        found[0] = dz * factor.astype(x.dtype)
    of_steps = [i for i in wanted if i > 0]
    if of_steps:
        sums = _sums(dz, x, operands, steps, wide)
        each = _of_operands(sums, steps, constants, after)
        for i in of_steps:
            c = operands[i - 1]
            whole = jnp.broadcast_to(each[i - 1], _kept(x.shape, operands))
            axes = [d for d in range(x.ndim) if c.shape[d] != whole.shape[d]]
            found[i] = whole.sum(axes, keepdims=True).astype(c.dtype)
    return found


def _shapes(operands: Sequence[Any]) -> list[tuple[int, ...]]:
    return [c.shape for c in operands]


def _kept(shape: Sequence[int], operands: Sequence[Any]) -> tuple[int, ...]:
    """The shape of sums over all entries that share each operand."""
    return tuple(
        n if any(c.shape[d] != 1 for c in operands) else 1 for d, n in enumerate(shape)
    )


def _factors(steps: Sequence[str], constants: Sequence[Any]) -> list[Any]:
    """What y is multiplied with from each step on, by the number of steps before."""
    factors: list[Any] = [full((), 1, constants[0].dtype)]
    for name, c in zip(reversed(steps), reversed(constants), strict=True):
        last = factors[-1]
        scaled = {"mul": last * c, "div": last / c, "rsub": -last}
        factors.append(scaled.get(name, last))
    return factors[::-1]


def _first_scale(steps: Sequence[str]) -> int:
    return next((i for i, name in enumerate(steps) if name in SCALES), len(steps))


def _sums(
    dz: Any, x: Any, operands: Sequence[Any], steps: Sequence[str], wide: Any
) -> tuple[Any, Any]:
    """(sum of dz, sum of dz * v); v is what the first scale is multiplied with."""
    axes = [d for d, n in enumerate(_kept(x.shape, operands)) if n == 1]
    first = _first_scale(steps)
    (v,) = reference(x, *operands[:first], steps=tuple(steps[:first]))
    dz = dz.astype(wide)
    return (
        dz.sum(axes, keepdims=True),
        (dz * v.astype(wide)).sum(axes, keepdims=True),
    )


def _of_operands(
    sums: tuple[Any, Any],
    steps: Sequence[str],
    constants: Sequence[Any],
    after: Sequence[Any],
) -> list[Any]:
    """The gradient of each operand, one for each channel of each of them."""
    total, scaled = sums  # the second with the entry before the step
    found: list[Any] = []
    for i, (name, c) in enumerate(zip(steps, constants, strict=True)):
        factor = after[i + 1]
        match name:
            case "add" | "rsub":
                found.append(factor * total)
            case "sub":
                found.append(-factor * total)
            case "mul":
                found.append(factor * scaled)
                scaled = scaled * c
            case _:
                scaled = scaled / c
                found.append(-factor * scaled / c)
    return found


# --- vmap -----------------------------------------------------------------------------


def _batch(operands: Arrays, dims: Dims, *, steps: tuple[str, ...]) -> Batched:
    """The mapped axis comes first; operands that are not mapped have it of size 1."""
    moved, mapped, size = move_mapped(operands, dims)
    x, *rest = (x if m else x[None] for x, m in zip(moved, mapped, strict=True))
    if not mapped[0]:
        x = jnp.broadcast_to(x, (size, *x.shape[1:]))
    return channel_affine_p.bind(x, *rest, steps=steps), [0]


def _batch_tangent(operands: Arrays, dims: Dims, **params: Any) -> Batched:
    f = vmap(functools.partial(_tangent, **params), in_axes=tuple(dims))
    return list(f(*operands)), [0]


batching.primitive_batchers[channel_affine_p] = _batch
batching.primitive_batchers[tangent_p] = _batch_tangent
