"""The arguments of conv2d in canonical form, and what is wrong with them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax

from tracea_jax.mistakes import shown
from tracea_jax.ops.conv2d import directions

PADDINGS = ("SAME", "VALID", "SAME_LOWER")
WEIGHTS = {"NHWC": "HWIO", "NCHW": "OIHW"}

Padding = str | tuple[tuple[int, int], tuple[int, int]]


def check_layout(layout: Any) -> None:
    """Raises ValueError on an unknown layout."""
    if not isinstance(layout, str) or layout not in WEIGHTS:
        raise ValueError(
            f"layout={shown(layout)} is unknown; it must be one of NHWC, NCHW"
        )


def positive(name: str, value: Any) -> int:
    """A positive integer, or a ValueError that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer")
    return number


def pair(name: str, value: Any) -> tuple[int, int]:
    """Positive integers for height and width, of a pair or of one for both."""
    values = list(value) if hasattr(value, "__iter__") else [value, value]
    if len(values) != 2:
        raise ValueError(
            f"{name}={value!r} must be one positive integer or a pair, for height and "
            "width"
        )
    return positive(name, values[0]), positive(name, values[1])


def known_padding(padding: Any) -> Padding:
    """A padding that can be hashed: its name, or both pairs.

    Raises:
      ValueError: naming what is allowed.
    """
    if isinstance(padding, str) and padding.upper() in PADDINGS:
        return padding.upper()
    try:
        alike = (padding, padding)
        pairs: Any = padding if hasattr(padding, "__iter__") else (alike, alike)
        (top, bottom), (left, right) = (map(operator.index, pads) for pads in pairs)
        return (top, bottom), (left, right)
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"{padding=} must be one of {', '.join(PADDINGS)}, an integer, or "
            "((top, bottom), (left, right))"
        ) from e


def explicit_padding(
    padding: Padding,
    image: Sequence[Any],
    kernel: Sequence[Any],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> Padding:
    """The padding in numbers; as it came where a symbolic size decides about it."""
    pads = directions.explicit_padding(padding, image, kernel, strides, dilation)
    try:
        rows, columns = ((operator.index(a), operator.index(b)) for a, b in pads)
    except TypeError:
        return padding
    return rows, columns


def check_shapes(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, groups: int, layout: str
) -> None:
    """Raises ValueError on ranks, channels, groups or a bias that do not fit."""
    for name, array, dims in (("x", x, layout), ("w", w, WEIGHTS[layout])):
        if array.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions, {dims}; its shape is {array.shape}"
            )
    specs = directions.SPECS[layout.lower()]
    channels = x.shape[specs["x"][1]]
    outputs, inputs, *taps = (w.shape[i] for i in specs["w"])
    if 0 in taps:
        raise ValueError(f"the kernel must have at least one tap; {w.shape=}")
    if channels % groups or outputs % groups:
        raise ValueError(
            f"{groups=} must divide the channels of x and of the result, {channels} "
            f"and {outputs}"
        )
    if inputs != channels // groups:
        raise ValueError(
            f"w, {WEIGHTS[layout]} {w.shape}, must take {channels // groups} channels "
            f"(those of x, {layout} {x.shape}, by {groups=}); it takes {inputs}"
        )
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(
            f"bias must have shape ({outputs},), one entry an output channel; "
            f"{bias.shape=}"
        )
