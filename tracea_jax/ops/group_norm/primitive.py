"""The primitives of group norms with an activation, and their rules.

    x, scale, bias -> y, mean, inverse

    y = activation((x - mean) * (scale * inverse) + bias)
    inverse = 1 / sqrt(variance + epsilon)

x is (images, pixels, channels), scale and bias are (channels,), and mean and inverse,
which the gradients take, are (images, groups) of float32. These two are no results for
others: their derivatives count as zero, as those of y contain what they depend on.

| primitive    | operands                              | results             |
|--------------|---------------------------------------|---------------------|
| group_norm_p | x, scale, bias                        | y, mean, inverse    |
| tangent_p    | these, mean, inverse, tangents of     | dy                  |
|              | those in ``of``                       |                     |
| gradients_p  | x, scale, bias, mean, inverse, dy     | dx, dscale, dbias   |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax._compat import linearize_hook
from tracea_jax.ops.common import by_reference, jax_rules, lowering
from tracea_jax.ops.common.epilogue import ACTIVATION_FUNCTIONS
from tracea_jax.ops.common.promotion import promoted
from tracea_jax.ops.common.shapes import move_mapped
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Batched,
    Cotangents,
    Differentiated,
    Dims,
    Operand,
    Params,
    Tangents,
    Zero,
    ad,
    asarray,
    jvp,
    lax,
    mlir,
    vjp,
    vmap,
)
from tracea_jax.problem import GroupNormProblem
from tracea_jax.problem.group_norm import Direction

_FORMULA = ("groups", "epsilon", "activation")  # parameters that say what is computed


def bind(
    x: Any, scale: Any, bias: Any, *, groups: int, epsilon: float, activation: str
) -> Any:
    """y, of x's shape and dtype.

    Args:
      x: (images, pixels, channels), floating.
      scale, bias: (channels,), of one dtype.
      groups: that the channels are divided into, neighbours in each.
      epsilon: what is added to variances.
      activation: one of ``problem.ACTIVATIONS``.
    """
    params: Params = {"groups": groups, "epsilon": epsilon, "activation": activation}
    params |= {"implementation": None, "config": None}
    operands = (x, scale, bias)
    if lowering.explicitly_sharded("group_norm", operands, None):
        return reference(*operands, **params)[0]
    return group_norm_p.bind(*lowering.align_varying_axes(operands), **params)[0]


# --- what they mean -------------------------------------------------------------------


def reference(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    groups: int,
    epsilon: float,
    activation: str,
    **_: Any,
) -> list[jax.Array]:
    """The norm in jnp, in float32 at least, rounded once."""
    wide: Any = promoted(x.dtype, jnp.float32)
    images, pixels, channels = x.shape
    grouped = x.astype(wide).reshape(images, pixels, groups, channels // groups)
    mean = grouped.mean((1, 3), keepdims=True)
    centred = grouped - mean
    variance = jnp.square(centred).mean((1, 3), keepdims=True)
    inverse = lax.rsqrt(variance + asarray(epsilon, wide))
    of_channels = (1, 1, groups, channels // groups)
    scaled = inverse * scale.astype(wide).reshape(of_channels)
    z = centred * scaled + bias.astype(wide).reshape(of_channels)
    y = ACTIVATION_FUNCTIONS[activation](z).reshape(x.shape).astype(x.dtype)
    return [y, *(v.reshape(images, groups) for v in (mean, inverse))]


def _y(*operands: Any, **params: Any) -> Any:
    return reference(*operands, **params)[0]


def reference_gradients(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mean: jax.Array,
    inverse: jax.Array,
    dy: jax.Array,
    **params: Any,
) -> list[jax.Array]:
    """The gradients, those of the norm in jnp; mean and inverse are computed again."""
    with linearize_hook(None):  # the reference is ours, not a user's function
        _, pull = vjp(functools.partial(_y, **_formula(params)), x, scale, bias)
    return list(pull(dy))


def _formula(params: Params) -> Params:
    return {name: params[name] for name in _FORMULA}


def problem_of(
    avals: Sequence[Aval],
    *,
    groups: int,
    epsilon: float,
    activation: Any,
    direction: Direction = "forward",
    **_: Any,
) -> GroupNormProblem:
    """The problem that a primitive's parameters and static shapes describe."""
    x, scale = avals[:2]
    images, pixels, channels = x.shape
    return GroupNormProblem(
        images=images,
        pixels=pixels,
        channels=channels,
        groups=groups,
        epsilon=epsilon,
        activation=activation,
        dtype=x.dtype.name,
        parameters=scale.dtype.name,
        direction=direction,
    )


group_norm_p = lowering.primitive("tracea_group_norm", reference)
gradients_p = lowering.primitive("tracea_group_norm_gradients", reference_gradients)
PLANNED = (
    lowering.register("group_norm", group_norm_p, problem_of, reference),
    lowering.register(
        "group_norm",
        gradients_p,
        functools.partial(problem_of, direction="gradients"),
        reference_gradients,
    ),
)


# --- derivatives ----------------------------------------------------------------------

_PRIMALS = 5  # of tangent_p: x, scale, bias, mean, inverse


def _tangent(*operands: Any, of: tuple[int, ...], **params: Any) -> list[Any]:
    primals, tangents = operands[:3], operands[_PRIMALS:]
    given = dict(zip(of, tangents, strict=True))

    def f(*some: Any) -> Any:
        rest = iter(some)
        all_ = [next(rest) if i in given else x for i, x in enumerate(primals)]
        return _y(*all_, **_formula(params))

    with linearize_hook(None):  # as above
        return [jvp(f, [primals[i] for i in of], list(tangents))[1]]


tangent_p = lowering.primitive("tracea_group_norm_tangent", _tangent)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=True))
by_reference.register(tangent_p, _tangent)


def _jvp(primals: Arrays, tangents: Tangents, **params: Any) -> Differentiated:
    given = {i: t for i, t in enumerate(tangents) if not isinstance(t, Zero)}
    outs = group_norm_p.bind(*primals, **params)
    _, mean, inverse = outs
    operands = (*primals, mean, inverse, *given.values())
    aligned = lowering.align_varying_axes(operands)
    (dy,) = tangent_p.bind(*aligned, of=tuple(given), **params)
    zeros = [Zero(jax.typeof(v).to_tangent_aval()) for v in (mean, inverse)]
    return outs, [dy, *zeros]


def _tangent_transpose(
    cts: Tangents, *operands: Operand, of: tuple[int, ...], **params: Any
) -> Cotangents:
    primals, tangents = operands[:_PRIMALS], operands[_PRIMALS:]
    known = [None] * _PRIMALS
    (ct,) = cts
    if isinstance(ct, Zero):
        is_linear = ad.is_undefined_primal
        return [*known, *(Zero(t.aval) if is_linear(t) else None for t in tangents)]
    aligned = lowering.align_varying_axes((*primals, ct))
    grads = gradients_p.bind(*aligned, **params)
    pairs = zip(of, tangents, strict=True)
    return [
        *known,
        *(grads[i] if ad.is_undefined_primal(t) else None for i, t in pairs),
    ]


# --- vmap -----------------------------------------------------------------------------


def _batch(operands: Arrays, dims: Dims, **params: Any) -> Batched:
    """Mapped images are more images, unless scale or bias are mapped too."""
    x, *parameters = dims
    if x is None or any(d is not None for d in parameters):
        return _batch_in_jnp(reference, operands, dims, params)
    moved, _, size = move_mapped(operands, dims)
    images = moved[0].shape[1]  # -1 fails on size 0
    merged = moved[0].reshape(size * images, *moved[0].shape[2:])
    outs = group_norm_p.bind(merged, *moved[1:], **params)
    return [y.reshape(size, images, *y.shape[1:]) for y in outs], [0] * len(outs)


def _batch_in_jnp(
    f: Callable[..., Any], operands: Arrays, dims: Dims, params: Params
) -> Batched:
    mapped = vmap(functools.partial(f, **params), in_axes=tuple(dims))
    outs = list(mapped(*operands))
    return outs, [0] * len(outs)


def _batch_others(f: Callable[..., Any]) -> Callable[..., Batched]:
    def rule(operands: Arrays, dims: Dims, **params: Any) -> Batched:
        return _batch_in_jnp(f, operands, dims, params)

    return rule


jax_rules.register("group_norm", group_norm_p, reference, jvp=_jvp, batch=_batch)
jax_rules.register(
    "group_norm",
    tangent_p,
    _tangent,
    jvp=jax_rules.own_value(tangent_p, _tangent),
    transpose=_tangent_transpose,
    batch=_batch_others(_tangent),
)
jax_rules.register(
    "group_norm",
    gradients_p,
    reference_gradients,
    jvp=jax_rules.own_value(gradients_p, reference_gradients),
    batch=_batch_others(reference_gradients),
)
