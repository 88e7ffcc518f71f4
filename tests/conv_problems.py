"""Problems of convolutions for the tests of kernels for Hopper, without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from compiled import assert_clean

from tracea_jax.device import NAMED
from tracea_jax.emit.kernel import Kernel
from tracea_jax.problem import Conv2dProblem, Epilogue

H200 = NAMED["H200"]
FULL = Epilogue(bias="row", activation="silu", residual=True, save_preactivation=True)
FLOAT32: dict[str, Any] = dict.fromkeys(("lhs", "rhs", "out"), "float32")


def problem(direction: Any = "forward", **changes: Any) -> Conv2dProblem:
    """3x3 over 128 channels unless changed."""
    fields: dict[str, Any] = {
        **{"batch": 64, "height": 28, "width": 28},
        **{"in_channels": 128, "out_channels": 128},
        **{"kernel_height": 3, "kernel_width": 3, "padding": ((1, 1), (1, 1))},
        **{"lhs": "bfloat16", "rhs": "bfloat16", "out": "bfloat16"},
    }
    return Conv2dProblem(direction=direction, **{**fields, **changes})


# Size, taps, stride, padding and dilation of an axis.
Case = tuple[int, int, int, tuple[int, int], int]


def rows_only(direction: Any, case: Case) -> Conv2dProblem:
    """The problem whose rows are these."""
    size, taps, stride, pads, dilation = case
    return problem(
        direction,
        batch=1,
        height=size,
        kernel_height=taps,
        strides=(stride, 1),
        padding=(pads, (1, 1)),
        dilation=(dilation, 1),
    )


def cases(strides: tuple[int, ...] = (1, 2, 3)) -> Iterator[Case]:
    """Small axes, with paddings beyond the kernel and crops."""
    sizes, taps, dilations = (1, 5, 8), (1, 2, 3, 7), (1, 2)
    pads = ((0, 0), (1, 1), (0, 1), (3, 2), (9, 8), (-1, 1))
    for case in itertools.product(sizes, taps, strides, pads, dilations):
        if min(rows_only("forward", case).out_size) > 0:
            yield case


def joined(case: Case) -> np.ndarray:
    """[out, source]: which tap + 1 of the forward convolution joins them, else 0."""
    size, taps, stride, (before, _), dilation = case
    extent = rows_only("forward", case).out_size[0]
    found = np.zeros((extent, size), int)
    for out, tap in itertools.product(range(extent), range(taps)):
        if 0 <= (i := out * stride + tap * dilation - before) < size:
            found[out, i] = tap + 1
    return found


def assert_compiles(kernel: Kernel) -> None:
    """Without spills, and without a warning of the compiler."""
    assert_clean(kernel)
