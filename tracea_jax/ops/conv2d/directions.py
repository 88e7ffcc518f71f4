"""A convolution and both of its gradients: one trilinear form read in three directions.

    sum over n, p, k, g, c, o of  x[n, i, (g, c)] * w[k, c, (g, o)] * y[n, p, (g, o)]
    with i = p * stride + k * dilation - padding, for rows and for columns

is linear in x, w and y. Each direction takes two of them and gives the derivative by
the third, so the transpose of a direction is another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from tracea_jax.ops.common.promotion import promoted
from tracea_jax.problem.conv2d import Direction, ImageLayout

# The roles of both operands and of the result.
ROLES = {"forward": "xwy", "input_grad": "ywx", "weight_grad": "xyw"}
DIRECTION_TO = {roles[2]: direction for direction, roles in ROLES.items()}

# Positions of (N, C, height, width) in x and y, and of (O, I, height, width) in w.
SPECS = {
    "nhwc": {"x": (0, 3, 1, 2), "w": (3, 2, 0, 1), "y": (0, 3, 1, 2)},
    "nchw": {"x": (0, 1, 2, 3), "w": (0, 1, 2, 3), "y": (0, 1, 2, 3)},
}

Pads = tuple[tuple[Any, Any], ...]  # before and after, of height and of width


def spatial(shape: Sequence[Any], role: str, layout: str) -> tuple[Any, Any]:
    """Height and width of the array in that role."""
    _, _, rows, columns = SPECS[layout][role]
    return shape[rows], shape[columns]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One direction of a convolution; sizes are those of the forward one.

    Attributes:
      direction, strides, padding, dilation, groups, layout: as in ``Conv2dProblem``; a
        padding that depends on symbolic sizes is its name.
      size: height and width of a gradient, which its operands leave open.
    """

    direction: Direction
    strides: tuple[int, int]
    padding: Any
    dilation: tuple[int, int]
    groups: int
    layout: ImageLayout
    size: Any

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Form:
        """The form that the primitive's parameters describe."""
        return cls(**{f.name: params[f.name] for f in dataclasses.fields(cls)})

    def forward_shapes(
        self, lhs: Sequence[Any], rhs: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(N, C, height, width) of x and (O, I, height, width) of w."""
        specs = SPECS[self.layout]
        first, second, _ = ROLES[self.direction]
        a = tuple(lhs[dim] for dim in specs[first])
        b = tuple(rhs[dim] for dim in specs[second])
        if self.direction == "input_grad":
            return (a[0], b[1] * self.groups, *self.size), b
        if self.direction == "weight_grad":
            return a, (b[1], a[1] // self.groups, *self.size)
        return a, b

    def result_shape(self, lhs: Sequence[Any], rhs: Sequence[Any]) -> tuple[Any, ...]:
        """The result's shape for operands of static shapes; the padding is explicit."""
        x, w = self.forward_shapes(lhs, rhs)
        out_size = [
            max((n + sum(pads) - grown(k, d)) // s + 1, 0)
            for n, k, s, pads, d in zip(
                x[2:], w[2:], self.strides, self.padding, self.dilation, strict=True
            )
        ]
        role = ROLES[self.direction][2]
        extents = {"x": x, "w": w, "y": (x[0], w[0], *out_size)}[role]
        spec = SPECS[self.layout][role]
        return tuple(extents[spec.index(dim)] for dim in range(4))

    def lax_arguments(self, lhs: Sequence[Any], rhs: Sequence[Any]) -> dict[str, Any]:
        """Arguments of ``lax.conv_general_dilated`` for operands of these shapes."""
        one, specs = (1, 1), SPECS[self.layout]
        x, w, y = specs["x"], specs["w"], specs["y"]
        if self.direction == "forward":
            steps, between, taps = self.strides, one, self.dilation
            numbers, padding = (x, w, y), self.padding
        elif self.direction == "input_grad":
            steps, between, taps = one, self.strides, self.dilation
            numbers, padding = (y, _swapped(w), x), self._input_padding(lhs, rhs)
        else:
            steps, between, taps = self.dilation, one, self.strides
            numbers = (_swapped(x), _swapped(y), _swapped(w))
            padding = self._weight_padding(lhs, rhs)
        by_batch = self.direction == "weight_grad"
        return dict(
            window_strides=steps,
            padding=padding,
            lhs_dilation=between,
            rhs_dilation=taps,
            dimension_numbers=jax.lax.ConvDimensionNumbers(*numbers),
            feature_group_count=1 if by_batch else self.groups,
            batch_group_count=self.groups if by_batch else 1,
        )

    def _input_padding(self, dy: Sequence[Any], w: Sequence[Any]) -> Pads:
        """dx[i] sums dy[p] w[k] with p * stride = i + padding - k * dilation."""
        pairs: list[tuple[Any, Any]] = []
        for n, k, p, s, low, d in self._axes(dy, w, dy):
            before = grown(k, d) - 1 - low
            after = n + grown(k, d) - 1 - grown(p, s) - before
            pairs.append((before, after))
        return tuple(pairs)

    def _weight_padding(self, x: Sequence[Any], dy: Sequence[Any]) -> Pads:
        """dw[k] sums x[i] dy[p] with i = p * stride + k * dilation - padding."""
        return tuple(
            (low, grown(k, d) - 1 + grown(p, s) - n - low)
            for n, k, p, s, low, d in self._axes(x, dy, dy)
        )

    def _axes(
        self, lhs: Sequence[Any], rhs: Sequence[Any], dy: Sequence[Any]
    ) -> Iterator[tuple[Any, ...]]:
        """Sizes of x, w and y, stride, lower padding and dilation for both axes."""
        (_, _, *image), (_, _, *kernel) = self.forward_shapes(lhs, rhs)
        padding = explicit_padding(
            self.padding, image, kernel, self.strides, self.dilation
        )
        low = [pads[0] for pads in padding]
        gradient = spatial(dy, "y", self.layout)
        steps = (self.strides, low, self.dilation)
        return zip(image, kernel, gradient, *steps, strict=True)


def grown(size: Any, factor: int) -> Any:
    """Extent of ``size`` entries that lie ``factor`` apart."""
    return 0 if size == 0 else (size - 1) * factor + 1


def explicit_padding(
    padding: Any,
    image: Sequence[Any],
    kernel: Sequence[Any],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> Any:
    """((top, bottom), (left, right)) of a padding that may be a name."""
    if not isinstance(padding, str):
        return padding
    extents = [grown(k, d) for k, d in zip(kernel, dilation, strict=True)]
    return jax.lax.padtype_to_pads(image, extents, strides, padding)


def _swapped(spec: tuple[int, ...]) -> tuple[int, ...]:
    return (spec[1], spec[0], *spec[2:])


def convolve(
    lhs: jax.Array, rhs: jax.Array, form: Form, *, out: Any, precision: Any
) -> jax.Array:
    """The direction's result, by the one lax convolution that JAX's own AD gives.

    Args:
      lhs, rhs: in the direction's roles; promoted to their common dtype.
      form: the direction.
      out: dtype of the result.
      precision: as in ``lax.conv_general_dilated``.
    """
    common = promoted(lhs.dtype, rhs.dtype)
    lhs, rhs = lhs.astype(common), rhs.astype(common)
    if form.direction == "weight_grad" and 0 in rhs.shape:
        # XLA has no window of size 0. A sum of nothing varies over dy's mesh axes.
        shape = form.result_shape(lhs.shape, rhs.shape)
        return jnp.broadcast_to(rhs.sum().astype(out), shape)
    arguments = form.lax_arguments(lhs.shape, rhs.shape)
    lhs, arguments["padding"] = _cropped(lhs, **arguments)
    if form.direction == "input_grad":
        rhs = _turned(rhs, form.groups, form.layout)
    result = jax.lax.conv_general_dilated(
        lhs,
        rhs,
        **arguments,
        precision=precision,
        preferred_element_type=promoted(common, out),
    )
    return result.astype(out)


def _cropped(
    lhs: jax.Array,
    *,
    padding: str | Pads,
    lhs_dilation: Sequence[int],
    dimension_numbers: jax.lax.ConvDimensionNumbers,
    **_: Any,
) -> tuple[jax.Array, str | Pads]:
    """lhs and its padding with that cropped which lies before a negative padding.

    With rows before it cropped and others added after it, XLA's convolution on CPUs
    reads outside of the array (seen with jax 0.10).
    """
    if isinstance(padding, str):
        return lhs, padding
    pairs: list[tuple[Any, Any]] = []
    for dim, (low, high), step in zip(
        dimension_numbers.lhs_spec[2:], padding, lhs_dilation, strict=True
    ):
        size = cast("Any", lhs.shape[dim])  # it may be symbolic
        if isinstance(low, int) and isinstance(size, int) and low < 0:
            drop = -(low // step)
            extent = grown(size, step) + low + high
            lhs = jax.lax.slice_in_dim(lhs, min(drop, size), size, axis=dim)
            low = low + drop * step if drop < size else extent
            high = high if drop < size else 0
        pairs.append((low, high))
    return lhs, tuple(pairs)


def _turned(w: jax.Array, groups: int, layout: str) -> jax.Array:
    """w with its taps reversed, and its groups moved from O to I."""
    o, i, *taps = SPECS[layout]["w"]
    w = jax.lax.rev(w, taps)
    return w if groups == 1 else fold(unfold(w, o, 1, groups), i, 1)


# --- a mapped axis --------------------------------------------------------------------
#
# Which index of the trilinear form a mapped axis can join, in front of it: that which
# a single mapped operand shares with the result, or, as groups, that which all share.

_SHARED = {frozenset("xy"): "n", frozenset("xw"): "c", frozenset("wy"): "o"}


def index_to_join(direction: str, lhs_mapped: bool, rhs_mapped: bool) -> str:
    """The index, "n", "c", "o" or "g", that grows with the mapped axis."""
    if lhs_mapped and rhs_mapped:
        return "g"
    lhs, rhs, result = ROLES[direction]
    return _SHARED[frozenset((lhs if lhs_mapped else rhs, result))]


def place(role: str, index: str, groups: int, layout: str) -> tuple[int, int]:
    """(dimension, entries of that dimension before the index) of an index in a role."""
    first, second, *_ = SPECS[layout][role]
    if role == "w":
        return (second, 1) if index == "c" else (first, groups if index == "o" else 1)
    return (first, 1) if index == "n" else (second, 1 if index == "g" else groups)


def fold(x: jax.Array, dim: int, outer: int) -> jax.Array:
    """x, (mapped, *shape), with the mapped axis in ``dim``, within ``outer`` blocks."""
    mapped, *shape = x.shape
    before, size, after = shape[:dim], shape[dim], shape[dim + 1 :]
    x = x.reshape(mapped, *before, outer, size // outer, *after)
    return jnp.moveaxis(x, 0, dim + 1).reshape(*before, mapped * size, *after)


def unfold(x: jax.Array, dim: int, outer: int, mapped: Any) -> jax.Array:
    """The inverse of ``fold``."""
    before, size, after = x.shape[:dim], x.shape[dim] // mapped, x.shape[dim + 1 :]
    x = x.reshape(*before, outer, mapped, size // outer, *after)
    return jnp.moveaxis(x, dim + 1, 0).reshape(mapped, *before, size, *after)
