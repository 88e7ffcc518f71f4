"""The primitives of group norms with an activation, and their rules.

    x, scale, bias -> y, mean, inverse

    y = activation((x - mean) * (scale * inverse) + bias)
    inverse = 1 / sqrt(variance + epsilon)

x is (images, pixels, channels), scale and bias are (channels,), and mean and inverse,
which the gradients take, are (images, groups) of float32. Images and pixels may have
any number of dimensions, so that each can be split over devices; ``ranks`` then says
how many are those of images. The two are no results for
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
import math
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
    Primitive,
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
from tracea_jax.ops.group_norm.sharding import rule
from tracea_jax.problem import GroupNormProblem
from tracea_jax.problem.group_norm import Direction

# Parameters that say what is computed.
_FORMULA = ("groups", "epsilon", "activation", "ranks")


def bind(
    x: Any,
    scale: Any,
    bias: Any,
    *,
    groups: int,
    epsilon: float,
    activation: str,
    ranks: int = 1,
) -> Any:
    """y, of x's shape and dtype.

    Args:
      x: (images..., pixels..., channels), floating.
      scale, bias: (channels,), of one dtype.
      groups: that the channels are divided into, neighbours in each.
      epsilon: what is added to variances.
      activation: one of ``problem.ACTIVATIONS``.
      ranks: how many dimensions are those of images.
    """
    params: Params = {"groups": groups, "epsilon": epsilon, "activation": activation}
    params |= {"implementation": None, "config": None, **_as_ranks(x.ndim, ranks)}
    operands = (x, scale, bias)
    return lowering.bound(group_norm_p, reference, operands, params)[0]


def _as_ranks(ndim: int, ranks: int) -> Params:
    """The primitives' parameter; nothing for (images, pixels, channels)."""
    return {} if (ndim, ranks) == (3, 1) else {"ranks": ranks}


# --- what they mean -------------------------------------------------------------------


def reference(
    x: jax.Array, scale: jax.Array, bias: jax.Array, **params: Any
) -> list[jax.Array]:
    """The norm in jnp, in float32 at least, rounded once."""
    return summed(x, scale, bias, of_group=lambda whole: whole, parts=1, **params)


def summed(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    of_group: Callable[[jax.Array], jax.Array],
    parts: int,
    groups: int,
    epsilon: float,
    activation: str,
    ranks: int = 1,
    **_: Any,
) -> list[jax.Array]:
    """The norm of a part of x.

    Args:
      x, scale, bias: operands of the primitive.
      of_group: a sum over a part of a group's entries -> that over all parts.
      parts: how many there are.
      groups, epsilon, activation, ranks: parameters.
    """
    centred, axes = _grouped(x, groups), _of_group(x, ranks)
    wide: Any = centred.dtype
    count = parts * math.prod(centred.shape[a] for a in axes)
    mean = of_group(centred.sum(axes, keepdims=True)) / count
    centred = centred - mean
    variance = of_group(jnp.square(centred).sum(axes, keepdims=True)) / count
    inverse = lax.rsqrt(variance + asarray(epsilon, wide))
    scaled = inverse * scale.astype(wide).reshape(centred.shape[-2:])
    z = centred * scaled + bias.astype(wide).reshape(centred.shape[-2:])
    y = ACTIVATION_FUNCTIONS[activation](z).reshape(x.shape).astype(x.dtype)
    return [y, *(v.reshape(*x.shape[:ranks], groups) for v in (mean, inverse))]


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """x in float32 at least, (images..., pixels..., groups, channels of a group)."""
    wide: Any = promoted(x.dtype, jnp.float32)
    channels = x.shape[-1]
    return x.astype(wide).reshape(*x.shape[:-1], groups, channels // groups)


def _of_group(x: jax.Array, ranks: int) -> tuple[int, ...]:
    """The dimensions of ``_grouped`` that a group's statistics are sums over."""
    return (*range(ranks, x.ndim - 1), x.ndim)


def summed_gradients(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mean: jax.Array,
    inverse: jax.Array,
    dy: jax.Array,
    *,
    of_group: Callable[[jax.Array], jax.Array],
    of_channel: Callable[[jax.Array], jax.Array],
    parts: int,
    groups: int,
    activation: str,
    ranks: int = 1,
    **_: Any,
) -> list[jax.Array]:
    """The gradients of a part of x; arguments are as of ``summed``.

    Args:
      x, scale, bias, mean, inverse, dy: operands of the primitive.
      of_group: a sum over a part of a group's entries -> that over all parts.
      of_channel: the same of images and pixels.
      parts: how many there are of a group.
      groups, activation, ranks: parameters.
    """
    wide_x, axes = _grouped(x, groups), _of_group(x, ranks)
    of_image = (*x.shape[:ranks], *(1,) * (x.ndim - 1 - ranks), groups, 1)
    mean, inverse = (v.reshape(of_image) for v in (mean, inverse))
    factor, shift = (
        c.astype(wide_x.dtype).reshape(wide_x.shape[-2:]) for c in (scale, bias)
    )
    normed = (wide_x - mean) * inverse
    _, pull = vjp(ACTIVATION_FUNCTIONS[activation], normed * factor + shift)
    (dz,) = pull(_grouped(dy, groups))
    outer = tuple(range(x.ndim - 1))
    dscale, dbias = (of_channel(v.sum(outer)) for v in (dz * normed, dz))
    dnormed = dz * factor
    count = parts * math.prod(wide_x.shape[a] for a in axes)
    first, second = (
        of_group(v.sum(axes, keepdims=True)) / count
        for v in (dnormed, dnormed * normed)
    )
    dx = inverse * (dnormed - first - normed * second)
    return [
        dx.reshape(x.shape).astype(x.dtype),
        dscale.reshape(scale.shape).astype(scale.dtype),
        dbias.reshape(bias.shape).astype(bias.dtype),
    ]


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
    return {name: params[name] for name in _FORMULA if name in params}


def problem_of(
    avals: Sequence[Aval],
    *,
    groups: int,
    epsilon: float,
    activation: Any,
    direction: Direction = "forward",
    ranks: int = 1,
    **_: Any,
) -> GroupNormProblem:
    """The problem that a primitive's parameters and static shapes describe."""
    x, scale = avals[:2]
    return GroupNormProblem(
        images=math.prod(x.shape[:ranks]),
        pixels=math.prod(x.shape[ranks:-1]),
        channels=x.shape[-1],
        groups=groups,
        epsilon=epsilon,
        activation=activation,
        dtype=x.dtype.name,
        parameters=scale.dtype.name,
        direction=direction,
    )


group_norm_p = lowering.primitive("tracea_group_norm", reference)
gradients_p = lowering.primitive("tracea_group_norm_gradients", reference_gradients)


def _flattened(
    primitive: Primitive, *operands: jax.Array, ranks: int, **params: Any
) -> list[jax.Array]:
    """A primitive by the same of (images, pixels, channels)."""
    x = operands[0]
    images, pixels = math.prod(x.shape[:ranks]), math.prod(x.shape[ranks:-1])

    def merged(a: jax.Array) -> jax.Array:
        if a.ndim == 1:
            return a
        outer = (images, pixels) if a.ndim == x.ndim else (images,)
        return a.reshape(*outer, a.shape[-1])

    results = primitive.bind(*map(merged, operands), **params)
    shapes = {3: x.shape[:-1], 2: x.shape[:ranks], 1: ()}
    return [y.reshape(*shapes[y.ndim], y.shape[-1]) for y in results]


PLANNED = (
    lowering.register(
        "group_norm",
        group_norm_p,
        problem_of,
        reference,
        sharding=functools.partial(rule, group_norm_p, summed),
        flattened=functools.partial(_flattened, group_norm_p),
    ),
    lowering.register(
        "group_norm",
        gradients_p,
        functools.partial(problem_of, direction="gradients"),
        reference_gradients,
        sharding=functools.partial(rule, gradients_p, summed_gradients),
        flattened=functools.partial(_flattened, gradients_p),
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
    """Mapped images have one more dimension, unless scale or bias are mapped too."""
    x, *parameters = dims
    if x is None or any(d is not None for d in parameters):
        return _batch_in_jnp(reference, operands, dims, params)
    moved, _, _ = move_mapped(operands, dims)
    ranks = params.pop("ranks", 1) + 1
    how = {**params, **_as_ranks(moved[0].ndim, ranks)}
    outs = group_norm_p.bind(*moved, **how)
    return outs, [0] * len(outs)


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
