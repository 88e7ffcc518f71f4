"""The primitive of two sums over all dimensions but the last, in float32.

    x                               -> [sum x, sum x^2]
    x, dy, center                   -> [sum dy, sum dy (x - center)]
    x, dy, center, factor, shift    -> the same of dz: dy where relu's argument,
                                       (x - center) factor + shift, is positive
    x, dy, y, center                -> the same of dz, and dz: dy where y > 0
    x, dy, more, y, center          -> the same of dy + more

x, dy, more and y have one shape and dtype, the others one float32 entry a channel.
``relu`` is the problem's. Programs do
not call it; ``rewrite`` and the derivatives of ``ops.channel_affine`` do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.ops.channel_sums.sharding import rule
from tracea_jax.ops.common import jax_rules, lowering
from tracea_jax.ops.common.promotion import of_rank
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Batched,
    Differentiated,
    Dims,
    Tangents,
    ad,
    finfo,
    jvp,
    vmap,
    zeros_like,
)
from tracea_jax.problem import ChannelSumsProblem


def reference(x: Any, *others: Any, relu: str = "none", **_: Any) -> list[jax.Array]:
    """The primitive in jnp."""
    axes = tuple(range(x.ndim - 1))
    wide = x.astype(jnp.float32)
    if not others:
        return [wide.sum(axes), (wide * wide).sum(axes)]
    dz, *others_left = others
    kept: list[Any] = []
    if relu == "result":
        *more, y, center = others_left
        dz = jnp.where(y > 0, sum(more, dz), zeros_like(y))
        kept, v = [dz], wide - of_rank(center, x.ndim)
    else:
        center, *of_relu = others_left
        v = wide - of_rank(center, x.ndim)
        if of_relu:
            factor, shift = (of_rank(c, x.ndim) for c in of_relu)
            argument = v * factor + shift
            dz = jnp.where(argument > least(x.dtype), dz, zeros_like(dz))
    term = dz.astype(jnp.float32)
    return [term.sum(axes), (term * v).sum(axes), *kept]


def least(dtype: Any) -> float:
    """The largest number of float32 that rounds to zero in a dtype."""
    smallest = float(finfo(dtype).smallest_subnormal)
    return 0.0 if dtype == jnp.float32 else smallest / 2


def problem_of(avals: Sequence[Aval], *, relu: str, **_: Any) -> ChannelSumsProblem:
    """The problem that static shapes describe."""
    x = avals[0]
    return ChannelSumsProblem(
        kind="moments" if len(avals) == 1 else "gradient",
        rows=math.prod(x.shape[:-1]),
        channels=x.shape[-1],
        dtype=x.dtype.name,
        relu=relu,
        cotangents=2 if relu == "result" and len(avals) == 5 else 1,
    )


channel_sums_p = lowering.primitive("tracea_channel_sums", reference)
PLANNED = lowering.register(
    "channel_sums", channel_sums_p, problem_of, reference, sharding=rule
)


def bind(
    *operands: Any, relu: str = "none", implementation: Any = None, config: Any = None
) -> Any:
    """Both sums, and dz."""
    how = {"relu": relu, "implementation": implementation, "config": config}
    return lowering.bound(channel_sums_p, reference, operands, how)


def _jvp(primals: Arrays, tangents: Tangents, **params: Any) -> Differentiated:
    """The primitive's own value, the derivative of its reference."""
    full = [ad.instantiate_zeros(t) for t in tangents]
    _, douts = jvp(functools.partial(reference, **params), [*primals], full)
    return bind(*primals, **params), douts


def _batch(operands: Arrays, dims: Dims, **params: Any) -> Batched:
    f = vmap(functools.partial(reference, **params), in_axes=tuple(dims))
    outs = list(f(*operands))
    return outs, [0] * len(outs)


jax_rules.register("channel_sums", channel_sums_p, reference, jvp=_jvp, batch=_batch)
