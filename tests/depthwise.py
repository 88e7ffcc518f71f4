"""Convolutions of few channels a group: awkward shapes, and what they are exactly."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.ops.conv2d.directions import ROLES
from tracea_jax.problem import Conv2dProblem, Epilogue

FULL = Epilogue(
    bias="row",
    bias_dtype="float32",
    activation="gelu",
    residual=True,
    save_preactivation=True,
)


def depthwise(
    batch: int,
    height: int,
    width: int,
    channels: int,
    kernel: int | tuple[int, int],
    *,
    group: int = 1,
    stride: int = 1,
    dilation: int = 1,
    padding: Any = None,
    dtype: str = "bfloat16",
    **fields: Any,
) -> Conv2dProblem:
    """Groups of ``group`` channels; the default padding keeps the image's size."""
    taps = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    pads = [((k - 1) * dilation // 2, k // 2 * dilation) for k in taps]
    return Conv2dProblem(
        batch=batch,
        height=height,
        width=width,
        in_channels=channels,
        out_channels=channels,
        groups=channels // group,
        kernel_height=taps[0],
        kernel_width=taps[1],
        strides=(stride, stride),
        dilation=(dilation, dilation),
        padding=padding or (pads[0], pads[1]),
        lhs=dtype,
        rhs=dtype,
        out=dtype,
        **fields,
    )


AWKWARD = {
    "one pixel": depthwise(1, 1, 1, 2, 1),
    "one tap, steps": depthwise(2, 7, 5, 6, 1, stride=2),
    "prime": depthwise(3, 13, 11, 34, 3),
    "wide kernel": depthwise(2, 17, 19, 72, (3, 11)),
    "largest kernel": depthwise(1, 12, 9, 16, 11),
    "even kernel": depthwise(2, 8, 9, 24, (2, 4)),
    "padding beyond the kernel": depthwise(1, 5, 4, 16, 3, padding=((5, 6), (4, 7))),
    "cropped": depthwise(1, 9, 8, 16, 3, padding=((-1, -2), (-2, 1))),
    "steps": depthwise(2, 13, 14, 16, 3, stride=2, padding=((0, 1), (1, 1))),
    "long steps": depthwise(2, 13, 14, 16, 3, stride=4),
    "steps beyond the kernel": depthwise(1, 9, 10, 8, 2, stride=3),
    "dilated": depthwise(2, 13, 12, 40, 3, dilation=2),
    "widely dilated": depthwise(1, 30, 31, 8, 3, dilation=12),
    "dilated with steps": depthwise(1, 15, 14, 16, 3, stride=2, dilation=3),
    "common factor": depthwise(1, 15, 14, 16, 3, stride=2, dilation=4),
    "many channels": depthwise(2, 7, 7, 770, 5),
}


def exactly(problem: Conv2dProblem) -> tuple[list[jax.Array], list[np.ndarray]]:
    """Operands of small whole numbers and the result, which has no rounding error.

    The result is rounded to its dtype in the end. Without an epilogue.
    """
    p = problem
    group = p.in_channels // p.groups
    shapes = {
        "x": (p.batch, p.height, p.width, p.in_channels),
        "w": (p.kernel_height, p.kernel_width, group, p.in_channels),
        "y": (p.batch, *p.out_size, p.in_channels),
    }
    random = np.random.default_rng(0)
    first, second, result = ROLES[p.direction]
    numbers = {r: random.integers(-3, 4, shapes[r]).astype(float) for r in "xwy"}
    numbers[result] = np.zeros(shapes[result])
    _add(numbers, result, problem)
    dtype = jnp.dtype(p.lhs)
    inputs = [jnp.asarray(numbers[role], dtype) for role in (first, second)]
    wanted = numbers[result].astype(jnp.dtype(p.out)).astype(float)
    return inputs, [wanted]


def _add(numbers: dict[str, np.ndarray], result: str, problem: Conv2dProblem) -> None:
    """Adds to the result what each pair of a tap and a row of y contributes."""
    p = problem
    x, w, y = (numbers[role] for role in "xwy")
    split = (p.groups, p.in_channels // p.groups)
    x, w, y = (a.reshape(*a.shape[:3], *split) for a in (x, w, y))
    out = np.arange(p.out_size[1])
    taps = itertools.product(range(p.kernel_height), range(p.kernel_width))
    for (r, s), row in itertools.product(taps, range(p.out_size[0])):
        i = row * p.strides[0] + r * p.dilation[0] - p.padding[0][0]
        j = out * p.strides[1] + s * p.dilation[1] - p.padding[1][0]
        inside = (j >= 0) & (j < p.width)
        if not 0 <= i < p.height:
            continue
        q, j = out[inside], j[inside]
        if result == "y":
            y[:, row, q] += np.einsum("nqgc,cgk->nqgk", x[:, i, j], w[r, s])
        elif result == "x":
            x[:, i, j] += np.einsum("nqgk,cgk->nqgc", y[:, row, q], w[r, s])
        else:
            w[r, s] += np.einsum("nqgc,nqgk->cgk", x[:, i, j], y[:, row, q])
