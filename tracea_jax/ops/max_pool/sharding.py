"""How max pools are split over devices: images, channels, rows and columns of images.

Windows reach into rows of the neighbours, which are exchanged; behind the ends are
minus infinities, in place of padding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax

from tracea_jax.ops.common.halo import exchanged
from tracea_jax.ops.common.sharding import Device, Dims, Rule
from tracea_jax.ops.common.typed import Aval, Params, Primitive

_SPATIAL = ("h", "v")  # factors of rows and columns of results


def rule(primitive: Primitive, avals: Sequence[Aval], **params: Any) -> Rule:
    """The rule of max pools (x) and of their gradients (x, dy)."""
    images, *size, channels = avals[0].shape
    sizes = {"b": images, "c": channels}
    whole: dict[str, str | None] = {}
    for i, name in enumerate(_SPATIAL):
        step, pads = params["strides"][i], params["padding"][i]
        results = (size[i] + sum(pads) - params["kernel"][i]) // step + 1
        if size[i] == results * step:
            sizes |= {name: results, f"s{name}": step}
            whole[f"s{name}"] = None
        else:
            sizes |= {f"x{name}": size[i], f"y{name}": results}
            reason = "rows and columns of images and results do not correspond"
            whole |= {f"x{name}": reason, f"y{name}": reason}
    x, y = (_dims(role, sizes, whole) for role in "xy")
    return Rule(
        operands=(x, y)[: len(avals)],
        results=(y,) if len(avals) == 1 else (x,),
        sizes=sizes,
        whole=whole,
        local=functools.partial(_local, primitive, params),
    )


def _dims(role: str, sizes: dict[str, int], whole: dict[str, str | None]) -> Dims:
    def spatial(name: str) -> tuple[str, ...]:
        if f"{role}{name}" in whole:
            return (f"{role}{name}",)
        return (name, f"s{name}") if role == "x" else (name,)

    named = ("b",), *map(spatial, _SPATIAL), ("c",)
    return tuple(tuple(f for f in names if sizes[f] > 1) for names in named)


def _local(
    primitive: Primitive, params: Params, operands: Sequence[jax.Array], device: Device
) -> list[jax.Array]:
    x, *dy = operands
    padding, own = list(params["padding"]), [slice(None)] * 4
    for axis, name in enumerate(_SPATIAL):
        axes = device.over.get(name, ())
        if not axes:
            continue
        count = math.prod(device.decision.mesh[a] for a in axes)
        rows, window = x.shape[1 + axis], params["kernel"][axis]
        step, (pad, _) = params["strides"][axis], params["padding"][axis]
        # A gradient needs the windows before and after that contain rows of x.
        first, last = ((window - 1 - pad) // step, -(-pad // step)) if dy else (0, 0)
        low, high = first * step + pad, (last - 1) * step - pad + window
        high = max(high, 0) if dy else high
        x = exchanged(x, 1 + axis, low, high, axes, count, -math.inf)
        dy = [exchanged(a, 1 + axis, first, last, axes, count) for a in dy]
        padding[axis], own[1 + axis] = (0, 0), slice(low, low + rows)
    results = primitive.bind(x, *dy, **{**params, "padding": tuple(padding)})
    return [y[tuple(own)] for y in results] if dy else list(results)
