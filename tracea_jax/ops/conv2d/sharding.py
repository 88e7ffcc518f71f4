"""How convolutions are split over devices: images, channels, groups, rows and columns.

Where the channels that are summed over are split, partial sums are completed before the
epilogue; gradients of weights are sums over images. Where rows (or columns) of images
are split, each device gets the rows next to its own from its neighbours (a halo), and
zeros at both ends, in place of padding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracea_jax.ops.common.halo import exchanged
from tracea_jax.ops.common.partial_sums import completed
from tracea_jax.ops.common.sharding import Device, Dims, Rule
from tracea_jax.ops.common.typed import Aval, Params, Primitive
from tracea_jax.ops.conv2d import directions
from tracea_jax.ops.conv2d.directions import ROLES, SPECS, Form
from tracea_jax.ops.matmul.definition import split
from tracea_jax.problem import Epilogue

_SPATIAL = ("h", "v")  # factors of rows and columns of results

# (sums, bias or None, residual or None) -> results
Finish = Callable[[Any, Any, Any], list[jax.Array]]


def rule(
    primitive: Primitive,
    finish: Callable[..., list[jax.Array]],
    avals: Sequence[Aval],
    *,
    epilogue: Epilogue,
    **params: Any,
) -> Rule:
    """The rule of the primitive of conv2d.

    Args:
      primitive: itself.
      finish: (sums, epilogue, bias, residual, out, layout) -> results.
      avals: its operands.
      epilogue, **params: its parameters.
    """
    lhs, rhs, bias, residual = split(avals, epilogue)
    form = Form.of(params)
    roles = ROLES[form.direction]
    sizes, whole = _sizes(form, lhs, rhs)
    first, second, result = (_dims(role, form.layout, sizes, whole) for role in roles)
    operands = [first, second]
    if bias is not None:
        channel = SPECS[form.layout][roles[2]][1]
        operands.append((result[channel],))
    if residual is not None:
        operands.append(result)
    how: Params = {**params, "epilogue": epilogue}
    return Rule(
        operands=tuple(operands),
        results=(result,) * (1 + epilogue.save_preactivation),
        sizes=sizes,
        whole=whole,
        late=tuple(range(2, len(operands))),
        is_joint=True,
        local=functools.partial(_local, primitive, finish, how),
    )


def _sizes(
    form: Form, lhs: Aval, rhs: Aval
) -> tuple[dict[str, int], dict[str, str | None]]:
    """Sizes of factors, and why some are not split."""
    x, w = form.forward_shapes(lhs.shape, rhs.shape)
    sizes = {"b": x[0], "g": form.groups, "c": w[1], "o": w[0] // form.groups}
    whole: dict[str, str | None] = {}
    if form.groups > 1:
        reason = "the channels of a group are one kernel's"
        whole |= {"c": reason, "o": reason}
    y = _result_size(form, lhs, rhs, x, w)
    for i, name in enumerate(_SPATIAL):
        if _corresponds(form, i, x[2 + i], y[i]):
            sizes |= {name: y[i], f"s{name}": form.strides[i]}
            whole[f"s{name}"] = None
        else:
            sizes |= {f"x{name}": x[2 + i], f"y{name}": y[i]}
            reason = "rows and columns of images and results do not correspond"
            whole |= {f"x{name}": reason, f"y{name}": reason}
    return sizes, whole


def _result_size(
    form: Form, lhs: Aval, rhs: Aval, x: Sequence[int], w: Sequence[int]
) -> tuple[int, int]:
    """Height and width of y."""
    roles = ROLES[form.direction]
    for role, shape in zip(roles, (lhs.shape, rhs.shape), strict=False):
        if role == "y":
            return directions.spatial(shape, "y", form.layout)
    pairs = zip(x[2:], w[2:], form.strides, form.padding, form.dilation, strict=True)
    height, width = (
        max((n + sum(pads) - directions.grown(k, d)) // s + 1, 0)
        for n, k, s, pads, d in pairs
    )
    return height, width


def _corresponds(form: Form, axis: int, size: int, results: int) -> bool:
    """Whether a stride of rows stands for one row of the result."""
    static = not isinstance(form.padding, str)
    padded = static and min(form.padding[axis]) >= 0
    return padded and size == results * form.strides[axis]


def _dims(
    role: str, layout: str, sizes: dict[str, int], whole: dict[str, str | None]
) -> Dims:
    def spatial(name: str) -> tuple[str, ...]:
        if f"{role}{name}" in whole:
            return (f"{role}{name}",)
        return (name, f"s{name}") if role == "x" else (name,)

    factors: dict[str, tuple[tuple[str, ...], ...]] = {
        "x": (("b",), ("g", "c")),
        "w": (("g", "o"), ("c",), (), ()),
        "y": (("b",), ("g", "o")),
    }
    named = factors[role]
    if role != "w":
        named = (*named, *map(spatial, _SPATIAL))
    found: list[tuple[str, ...]] = [()] * 4
    for names, place in zip(named, SPECS[layout][role], strict=True):
        found[place] = tuple(f for f in names if sizes[f] > 1)
    return tuple(found)


# --- on one device --------------------------------------------------------------------


def _local(
    primitive: Primitive,
    finish: Callable[..., list[jax.Array]],
    params: Params,
    operands: Sequence[jax.Array],
    device: Device,
) -> list[jax.Array]:
    epilogue: Epilogue = params["epilogue"]
    lhs, rhs, bias, residual = split(operands, epilogue)
    own = dict(params)
    if count := math.prod(device.decision.mesh[a] for a in device.over["g"]):
        own["groups"] = params["groups"] // count
    lhs, rhs, own = _with_halos(lhs, rhs, own, device)
    if not device.decision.summed(device.rule, 0):
        return primitive.bind(lhs, rhs, *operands[2:], **own)
    acc = completed(primitive, lhs, rhs, own, epilogue, device)
    return finish(acc, epilogue, bias, residual, own["out"], own["layout"])


def _with_halos(
    lhs: jax.Array, rhs: jax.Array, params: Params, device: Device
) -> tuple[jax.Array, jax.Array, Params]:
    """Operands with rows and columns of the neighbours, and the local problem."""
    form = Form.of(params)
    roles = ROLES[form.direction]
    kernel = _kernel(form, rhs)
    padding, size = list(form.padding), form.size and list(form.size)
    for axis, name in enumerate(_SPATIAL):
        axes = device.over.get(name, ())
        count = math.prod(device.decision.mesh[a] for a in axes)
        if not axes:
            continue
        place = SPECS[form.layout][roles[0]][2 + axis]
        rows, step = lhs.shape[place], form.strides[axis]
        reach = (kernel[axis] - 1) * form.dilation[axis]
        before = form.padding[axis][0]
        if form.direction == "input_grad":
            low, high = (reach - before) // step, -(-before // step)
            last = (high - 1) * step - before + reach + 1
            padding[axis] = (before + low * step, max(last, 0))
            size[axis] = rows * step
        else:
            low, high = before, reach - before - step + 1
            padding[axis] = (0, 0)
        lhs = exchanged(lhs, place, low, high, axes, count)
    new: Params = {"padding": tuple(padding), "size": size and tuple(size)}
    return lhs, rhs, {**params, **new}


def _kernel(form: Form, rhs: jax.Array) -> tuple[int, int]:
    if form.direction == "weight_grad":
        return form.size
    return directions.spatial(rhs.shape, "w", form.layout)
