"""The primitive of two sums over all dimensions but the last, in float32.

    x                               -> [sum x, sum x^2]
    x, dy, center                   -> [sum dy, sum dy (x - center)]
    x, dy, center, factor, shift    -> the same of dz, which is dy of a relu's argument:
                                       dy where (x - center) factor + shift > 0

x and dy have one shape and dtype, the others one float32 entry a channel. Programs do
not call it; ``rewrite`` and the derivatives of ``ops.channel_affine`` do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Batched,
    Differentiated,
    Dims,
    Tangents,
    ad,
    batching,
    finfo,
    jvp,
    vmap,
)
from tracea_jax.problem import ChannelSumsProblem


def reference(x: Any, *others: Any, **_: Any) -> list[jax.Array]:
    """The primitive in jnp."""
    axes = tuple(range(x.ndim - 1))
    wide = x.astype(jnp.float32)
    if not others:
        return [wide.sum(axes), (wide * wide).sum(axes)]
    dy, center, *of_relu = others
    v = wide - center
    if of_relu:
        factor, shift = of_relu
        dy = jnp.where(v * factor + shift > least(x.dtype), dy, jnp.zeros_like(dy))
    dz = dy.astype(jnp.float32)
    return [dz.sum(axes), (dz * v).sum(axes)]


def least(dtype: Any) -> float:
    """The largest number of float32 that rounds to zero in a dtype."""
    smallest = float(finfo(dtype).smallest_subnormal)
    return 0.0 if dtype == jnp.float32 else smallest / 2


def problem_of(avals: Sequence[Aval], **_: Any) -> ChannelSumsProblem:
    """The problem that static shapes describe."""
    x = avals[0]
    return ChannelSumsProblem(
        kind="moments" if len(avals) == 1 else "gradient",
        rows=math.prod(x.shape[:-1]),
        channels=x.shape[-1],
        dtype=x.dtype.name,
        activation="relu" if len(avals) == 5 else "none",
    )


channel_sums_p = lowering.primitive("tracea_channel_sums", reference)
PLANNED = lowering.register("channel_sums", channel_sums_p, problem_of, reference)


def bind(*operands: Any, implementation: Any = None, config: Any = None) -> Any:
    """Both sums; by the reference where arrays say how they are split."""
    if lowering.explicitly_sharded("channel_sums", operands, implementation):
        return reference(*operands)
    aligned = lowering.align_varying_axes(operands)
    return channel_sums_p.bind(*aligned, implementation=implementation, config=config)


def _jvp(primals: Arrays, tangents: Tangents, **params: Any) -> Differentiated:
    """The primitive's own value, the derivative of its reference."""
    full = [ad.instantiate_zeros(t) for t in tangents]
    _, douts = jvp(functools.partial(reference, **params), [*primals], full)
    return bind(*primals, **params), douts


def _batch(operands: Arrays, dims: Dims, **params: Any) -> Batched:
    f = vmap(functools.partial(reference, **params), in_axes=tuple(dims))
    return list(f(*operands)), [0, 0]


ad.primitive_jvps[channel_sums_p] = _jvp
batching.primitive_batchers[channel_sums_p] = _batch
