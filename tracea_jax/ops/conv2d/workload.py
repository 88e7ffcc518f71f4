"""Workload of convolutions for the tuner."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.device import Device
from tracea_jax.ops.common.bench import (
    Judge,
    Workload,
    check_dtype,
    forced,
    operand_roundoff,
    random_normal,
    unit_roundoff,
)
from tracea_jax.ops.common.exact import ACTIVATIONS_F64
from tracea_jax.ops.common.precision import precision_from_name
from tracea_jax.ops.conv2d.directions import ROLES, SPECS, grown
from tracea_jax.ops.conv2d.primitive import conv2d_p
from tracea_jax.ops.matmul.definition import split
from tracea_jax.policy import Choice
from tracea_jax.problem import Conv2dProblem


def check(problem: Conv2dProblem) -> None:
    """Raises ValueError on what JAX does not know or a convolution cannot have."""
    for dtype in (problem.lhs, problem.rhs, problem.out):
        check_dtype(dtype)
    precision_from_name(problem.precision)
    channels = (problem.in_channels, problem.out_channels)
    if problem.groups < 1 or any(c % problem.groups for c in channels):
        raise ValueError(
            f"groups must divide both numbers of channels; {problem.groups=}, "
            f"{problem.in_channels=}, {problem.out_channels=}"
        )
    epilogue = problem.epilogue
    if epilogue.bias == "batched_row" or epilogue.residual_op != "add":
        raise ValueError(f"a convolution adds a bias and a residual; {epilogue=}")
    if problem.direction != "forward" and not epilogue.is_identity:
        raise ValueError(f"only a forward convolution has an epilogue; {problem=}")


def execute(
    *inputs: jax.Array, problem: Conv2dProblem, choice: Choice
) -> list[jax.Array]:
    """The problem's primitive, forced to one choice."""
    precision = precision_from_name(problem.precision)
    return bound(*inputs, problem=problem, precision=precision, **forced(choice))


def bound(
    *inputs: jax.Array, problem: Conv2dProblem, precision: Any, **how: Any
) -> list[jax.Array]:
    """The problem's primitive; ``how`` is implementation and config."""
    size = {
        "forward": None,
        "input_grad": (problem.height, problem.width),
        "weight_grad": (problem.kernel_height, problem.kernel_width),
    }[problem.direction]
    return conv2d_p.bind(
        *inputs,
        direction=problem.direction,
        strides=problem.strides,
        padding=problem.padding,
        dilation=problem.dilation,
        groups=problem.groups,
        layout=problem.layout,
        size=size,
        out=jnp.dtype(problem.out),
        precision=precision,
        epilogue=problem.epilogue,
        **how,
    )


def _shape(problem: Conv2dProblem, role: str) -> tuple[int, ...]:
    """Shape of x, w or y in the problem's layout."""
    p = problem
    extents = {
        "x": (p.batch, p.in_channels, p.height, p.width),
        "w": (
            *(p.out_channels, p.in_channels // p.groups),
            *(p.kernel_height, p.kernel_width),
        ),
        "y": (p.batch, p.out_channels, *p.out_size),
    }[role]
    spec = SPECS[p.layout][role]
    return tuple(extents[spec.index(dim)] for dim in range(4))


def operands(problem: Conv2dProblem, seed: int) -> list[jax.Array]:
    """Random normal operands of a problem, in the primitive's order."""
    lhs, rhs, _ = ROLES[problem.direction]
    shapes: list[tuple[tuple[int, ...], str]] = [
        (_shape(problem, lhs), problem.lhs),
        (_shape(problem, rhs), problem.rhs),
    ]
    epilogue = problem.epilogue
    if epilogue.bias != "none":
        shapes.append(((problem.out_channels,), epilogue.bias_dtype or problem.out))
    if epilogue.residual:
        dtype = epilogue.residual_dtype or problem.out
        shapes.append((_shape(problem, "y"), dtype))
    return random_normal(shapes, seed)


def ragged(problem: Conv2dProblem) -> Conv2dProblem:
    """A small problem of the same kind that divides no tile but keeps the alignment.

    Its result is 13 x 11 pixels, with a border of x unused if the stride is not 1.
    """
    p = problem
    height, width = (
        max(1, grown(k, d) - sum(pads) + grown(out, s) - 1 + (s > 1))
        for out, k, s, pads, d in zip(
            *((13, 11), (p.kernel_height, p.kernel_width)),
            *(p.strides, p.padding, p.dilation),
            strict=True,
        )
    )
    inputs, outputs = p.in_channels // p.groups, p.out_channels // p.groups
    if p.groups == 1:
        groups, inputs, outputs = 1, _tail(inputs, 40), _tail(outputs, 72)
    else:
        groups = _tail(p.groups, 16)
        inputs, outputs = min(inputs, 16), min(outputs, 16)
    return dataclasses.replace(
        problem,
        batch=min(p.batch, 3),
        height=height,
        width=width,
        groups=groups,
        in_channels=groups * inputs,
        out_channels=groups * outputs,
    )


def _tail(size: int, base: int) -> int:
    return base + next(s for s in (8, 4, 2, 1) if size % s == 0)


# --- errors ---------------------------------------------------------------------------
#
# Arrays are seen as x (g, n, h, w, c), w (g, kh, kw, c, o) and y (g, n, h, w, o). All
# channels of some pixels of x or y are compared, or some channels of some taps of w.

_PIXELS, _TAPS, _CHANNELS = 96, 4, 8


def _seen(array: jax.Array, role: str, problem: Conv2dProblem) -> np.ndarray:
    first, second, rows, columns = SPECS[problem.layout][role]
    order = (rows, columns, second, first)
    order = order if role == "w" else (first, rows, columns, second)
    host = np.asarray(array).transpose(order)
    groups = problem.groups
    host = host.reshape(*host.shape[:3], groups, host.shape[3] // groups)
    return np.moveaxis(host, 3, 0)


def _pairs(problem: Conv2dProblem, axis: int, at: int) -> dict[str, list[int]]:
    """Indices of x, w and y, in pairs, for the result's entry ``at`` of an axis.

    Entries i of x, k of w, p of y meet where i = p * stride + k * dilation - padding.
    """
    p = problem
    low, size = p.padding[axis][0], (p.height, p.width)[axis]
    taps = (p.kernel_height, p.kernel_width)[axis]
    met = [
        {"x": i, "w": tap, "y": out}
        for out, tap in itertools.product(range(p.out_size[axis]), range(taps))
        if 0 <= (i := out * p.strides[axis] + tap * p.dilation[axis] - low) < size
    ]
    result = ROLES[p.direction][2]
    return {role: [m[role] for m in met if m[result] == at] for role in "xwy"}


def _samples(problem: Conv2dProblem, sizes: tuple[int, ...], seed: int) -> np.ndarray:
    """Some (n, row, column) of an image, or (row, column) of a kernel."""
    total = int(np.prod(sizes))
    if total == 0:
        return np.empty((0, len(sizes)), int)
    count = _TAPS if problem.direction == "weight_grad" else _PIXELS
    spread = np.arange(count) + np.random.default_rng(seed).random(count)
    some = (spread * total / count).astype(int)
    flat = np.unique(np.concatenate([some, [0, total - 1]]))
    return np.stack(np.unravel_index(flat, sizes), 1)


def _exact(
    problem: Conv2dProblem, lhs: np.ndarray, rhs: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """(float64 results, sums of magnitudes, number of terms) at a pixel or tap."""
    *image, row, column = at
    rows, columns = _pairs(problem, 0, row), _pairs(problem, 1, column)

    def window(array: np.ndarray, role: str) -> np.ndarray:
        if role == "w":
            part = array[:, rows[role]][:, :, columns[role]]
        else:
            images = array[:, image] if image else array
            part = images[:, :, rows[role]][:, :, :, columns[role]]
        return part.astype(np.float64)

    lhs_role, rhs_role, _ = ROLES[problem.direction]
    a, b, groups = window(lhs, lhs_role), window(rhs, rhs_role), problem.groups
    if problem.direction == "weight_grad":
        a = a.reshape(groups, -1, a.shape[-1]).swapaxes(1, 2)
    else:
        a = a.reshape(groups, 1, -1)
    if problem.direction == "input_grad":
        b = b.swapaxes(-1, -2)
    b = b.reshape(groups, -1, b.shape[-1])
    return a @ b, np.abs(a) @ np.abs(b), b.shape[1]


def relative_error(
    problem: Conv2dProblem,
    device: Device,
    inputs: list[jax.Array],
    result: jax.Array,
    which: str,
    seed: int,
) -> float:
    """The largest error against float64, in units of the bound that rounding allows.

    With e the unit roundoff of the operands' products, E the output's and k the number
    of terms of a sum:

        |error| <= E |exact| + 4 sqrt(k) e (conv(|lhs|, |rhs|) + |bias| + |residual|)

    Not-a-number anywhere in the result counts as infinite.
    """
    if not bool(jnp.isfinite(result).all()):
        return float("inf")
    roles = ROLES[problem.direction]
    *factors, bias, residual = split(inputs, problem.epilogue)
    lhs, rhs = (_seen(x, r, problem) for x, r in zip(factors, roles, strict=False))
    found = _seen(result, roles[2], problem)
    if problem.direction == "weight_grad":  # long sums, so few of them
        some = np.random.default_rng(seed).permutation(rhs.shape[-1])[:_CHANNELS]
        rhs, found = rhs[..., some], found[..., some]
    added = (
        [np.asarray(bias).reshape(problem.groups, 1, -1)] if bias is not None else []
    )
    images = [] if residual is None else [_seen(residual, "y", problem)]
    unit = operand_roundoff((problem.lhs, problem.rhs), problem.precision, device)
    sizes = found.shape[1:3] if roles[2] == "w" else found.shape[1:4]
    worst = 0.0
    for at in _samples(problem, sizes, seed):
        exact, scale, terms = _exact(problem, lhs, rhs, at)
        for term in (*added, *(image[:, *at, None] for image in images)):
            exact, scale = exact + term, scale + np.abs(term.astype(np.float64))
        if which == "y":
            exact = ACTIVATIONS_F64[problem.epilogue.activation](exact)
        bound = unit_roundoff(problem.out) * np.abs(exact)
        bound += 4 * np.sqrt(terms + 1) * unit * scale
        difference = np.abs(found[:, *at].reshape(exact.shape) - exact)
        worst = max(
            worst, float((difference / np.maximum(bound, 1e-30)).max(initial=0))
        )
    return worst


def error(
    problem: Conv2dProblem,
    device: Device,
    inputs: list[jax.Array],
    results: list[jax.Array],
    seed: int,
) -> float:
    """The worst ``relative_error`` of the results, y and z."""
    return max(
        relative_error(problem, device, inputs, result, which, seed)
        for result, which in zip(results, "yz", strict=False)
    )


def judge(
    problem: Conv2dProblem, device: Device, inputs: list[jax.Array], seed: int
) -> Judge:
    """See ``Workload``."""
    return lambda results: error(problem, device, inputs, results, seed)


CONV2D = Workload(
    check=check, operands=operands, execute=execute, ragged=ragged, judge=judge
)
