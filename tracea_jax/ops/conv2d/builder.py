"""Problems of conv2d from plain values: ``Graph.add_conv2d``, ``tracea tune conv2d``.

The call of the op that they stand for says what is asked (``building.asked``).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, get_args

from jax.typing import DTypeLike

from tracea_jax.catalogue import Argument
from tracea_jax.ops.common import arguments
from tracea_jax.ops.common.building import asked, check_direction, epilogue, sizes
from tracea_jax.ops.conv2d.public import conv2d
from tracea_jax.problem import Conv2dProblem
from tracea_jax.problem.conv2d import Direction
from tracea_jax.typing import Activation

Pair = tuple[int, int]
DIRECTIONS = get_args(Direction)


def build(
    batch: int,
    height: int,
    width: int,
    in_channels: int,
    kernel_height: int,
    kernel_width: int,
    out_channels: int,
    *,
    dtype: DTypeLike = "float32",
    strides: int | Sequence[int] = (1, 1),
    padding: str | int | Sequence[Sequence[int]] = "SAME",
    dilation: int | Sequence[int] = (1, 1),
    groups: int = 1,
    layout: str = "NHWC",
    bias: bool = False,
    activation: Activation = "none",
    residual: bool = False,
    direction: str = "forward",
) -> Conv2dProblem:
    """activation(conv(x, w) + bias + residual), or a gradient of the convolution.

    Args:
      batch, height, width, in_channels: of x.
      kernel_height, kernel_width, out_channels: of w, whose input channels are
        in_channels / groups.
      dtype: of the operands and the result.
      strides, padding, dilation, groups, layout: as in ``ops.conv2d``.
      bias, activation, residual: as in ``Graph.add_matmul``.
      direction: "forward", "input_grad" or "weight_grad".
    """
    check_direction(direction, *DIRECTIONS)
    image = sizes(batch=batch, height=height, width=width, in_channels=in_channels)
    kernel = sizes(kernel_height=kernel_height, kernel_width=kernel_width)
    (channels,) = sizes(out_channels=out_channels)
    x, w = image, (*kernel, in_channels // groups, channels)
    if layout == "NCHW":
        x, w = (x[0], x[3], x[1], x[2]), (w[3], w[2], w[0], w[1])
    convolve = functools.partial(
        conv2d,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        layout=layout,
    )
    after = epilogue(bias, activation, residual)
    if direction != "forward" and not after.is_identity:
        raise ValueError("a gradient takes no bias, activation or residual")
    problem = asked(convolve, dtype, x, w)
    return dataclasses.replace(problem, direction=direction, epilogue=after)


def _pair(text: str) -> Pair:
    """ "2" or "2x1", for height and width."""
    first, *rest = map(arguments.positive, text.split("x"))
    if len(rest) > 1:
        raise argparse.ArgumentTypeError(f"{text} must be a number or two, such as 2x1")
    return first, rest[0] if rest else first


def _padding(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


_PAIR: dict[str, Any] = {"type": _pair, "default": (1, 1), "metavar": "N[xN]"}
_SIZES = {
    "batch": ("number of images", "BATCH"),
    "height": ("height of an image", "H"),
    "width": ("width of an image", "W"),
    "in_channels": ("channels of an image", "C"),
    "kernel_height": ("height of the kernel", "R"),
    "kernel_width": ("width of the kernel", "S"),
    "out_channels": ("channels of the result", "K"),
}

ARGUMENTS = (
    *(arguments.size(name, *how) for name, how in _SIZES.items()),
    Argument(
        "--stride",
        {"dest": "strides", **_PAIR, "help": "of the kernel, for height and width"},
    ),
    Argument("--dilation", {**_PAIR, "help": "of the kernel, for height and width"}),
    Argument(
        "--padding",
        {"type": _padding, "default": "SAME", "help": "SAME, VALID or a number"},
    ),
    Argument(
        "--groups",
        {"type": arguments.positive, "default": 1, "help": "of channels, each alone"},
    ),
    Argument(
        "--layout",
        {"choices": ("NHWC", "NCHW"), "default": "NHWC", "help": "of the images"},
    ),
    arguments.flag("--bias", help="adds an entry to each channel"),
    arguments.activation("none"),
    arguments.flag("--residual", help="adds an array of the result's shape"),
    arguments.direction(*DIRECTIONS),
)
