"""How group norms are split over devices: images and groups, and what is summed.

Where pixels or the channels of a group are split, sums over them are added up, and the
device computes in jnp: no kernel takes sums of others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracea_jax.ops.common.sharding import Device, Dims, Rule
from tracea_jax.ops.common.typed import Aval, Params, Primitive, lax

# (*operands, of_group, of_channel, parts, **params) -> results: see ``primitive``.
Formula = Callable[..., list[jax.Array]]


def rule(
    primitive: Primitive,
    formula: Formula,
    avals: Sequence[Aval],
    *,
    groups: int,
    ranks: int = 1,
    **params: Any,
) -> Rule:
    """The rule of the primitives of the norm and of its gradients.

    Args:
      primitive: one of these.
      formula: that it computes.
      avals: its operands, three of the norm and six of the gradients.
      groups, ranks, **params: its parameters.
    """
    *outer, channels = avals[0].shape
    images = [f"i{n}" for n in range(ranks)]
    pixels = [f"p{n}" for n in range(len(outer) - ranks)]
    sizes = dict(zip((*images, *pixels), outer, strict=True))
    sizes |= {"g": groups, "c": channels // groups}

    def dims(*names: tuple[str, ...]) -> Dims:
        return tuple(tuple(f for f in dim if sizes[f] > 1) for dim in names)

    of_channels = dims(("g", "c"))
    x = (*dims(*((f,) for f in (*images, *pixels))), *of_channels)
    of_images = dims(*((f,) for f in images), ("g",))
    statistics = (of_images, of_images)
    operands = x, of_channels, of_channels
    is_forward = len(avals) == len(operands)
    how = {"groups": groups, "ranks": ranks, **params}
    return Rule(
        operands=operands if is_forward else (*operands, *statistics, x),
        results=(x, *statistics) if is_forward else operands,
        sizes=sizes,
        is_joint=True,
        local=functools.partial(_local, primitive, formula, images, pixels, how),
    )


def _local(
    primitive: Primitive,
    formula: Formula,
    images: Sequence[str],
    pixels: Sequence[str],
    params: Params,
    operands: Sequence[jax.Array],
    device: Device,
) -> list[jax.Array]:
    own = {**params, "groups": params["groups"] // _count(device, ["g"])}
    in_group, outer = [*pixels, "c"], [*images, *pixels]
    if device.splits(in_group):
        own["of_group"] = functools.partial(_added, device, in_group)
        own["of_channel"] = functools.partial(_added, device, outer)
        return formula(*operands, parts=_count(device, in_group), **own)
    if own["ranks"] == 1 and len(pixels) == 1:
        del own["ranks"]
    results = primitive.bind(*operands, **own)
    if len(operands) == len(results):  # the norm: nothing is a partial sum
        return results
    return [results[0], *(_added(device, outer, y) for y in results[1:])]


def _added(device: Device, factors: Sequence[str], partial: jax.Array) -> jax.Array:
    axes = tuple(a for f in factors for a in device.over[f])
    return lax.psum(partial, axes) if axes else partial


def _count(device: Device, factors: Sequence[str]) -> int:
    """Of devices that split any of the factors."""
    mesh = device.decision.mesh
    return math.prod(mesh[a] for f in factors for a in device.over[f])
