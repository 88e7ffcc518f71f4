"""Walk of a convolution along an axis of an image: positions, taps, tensor map corners.

Result i of a walk is the sum over its taps j of

    source[first + i * stride + first_offset + j * offset_step]
        * weight[first_tap + j * tap_step]

where the source is zero outside of itself. kernels/cuda/tile/conv_axis.cuh is the same
in device code. Callers: the emitters of convolutions for Hopper.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from tracea_jax.emit.kernel import Im2colMap, TensorMapSwizzle
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import ITEMSIZE, Conv2dProblem

# Limits of im2col tensor maps over images with two spatial dimensions.
CORNERS = (-128, 127)
MOST_OFFSET = 255
MOST_STRIDE = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvAxis:
    """One walk along an axis; the fields are those of the device's struct, in order.

    Attributes:
      extent: results.
      first, stride: position of the first one in the source, and to the next one.
      taps, first_tap, tap_step: of the weights.
      first_offset, offset_step: what a tap adds to a position, never negative.
      out_first, out_step: where results lie in the output.
    """

    extent: int
    first: int
    stride: int
    taps: int
    first_tap: int
    tap_step: int
    first_offset: int
    offset_step: int
    out_first: int
    out_step: int

    def upper(self, size: int) -> int:
        """The upper corner of the positions in a source of some size."""
        return self.first + (self.extent - 1) * self.stride + 1 - size

    @property
    def most_offset(self) -> int:
        last = self.first_offset + (self.taps - 1) * self.offset_step
        return max(self.first_offset, last) if self.taps else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """An axis of the forward convolution."""

    size: int
    taps: int
    stride: int
    before: int  # padding
    dilation: int
    out: int


def _axes(problem: Conv2dProblem) -> Iterator[_Axis]:
    p = problem
    for size, taps, stride, (before, _), dilation, out in zip(
        (p.height, p.width),
        (p.kernel_height, p.kernel_width),
        p.strides,
        p.padding,
        p.dilation,
        p.out_size,
        strict=True,
    ):
        yield _Axis(
            size=size,
            taps=taps,
            stride=stride,
            before=before,
            dilation=dilation,
            out=out,
        )


def walks(problem: Conv2dProblem) -> tuple[tuple[ConvAxis, ...], tuple[ConvAxis, ...]]:
    """The walks along rows and along columns: one, or one a phase of a gradient.

    Results of "weight_grad" are sums over pixels of x, which it walks as "forward".
    """
    of = _phases if problem.direction == "input_grad" else _forward
    rows, columns = (tuple(of(axis)) for axis in _axes(problem))
    return rows, columns


def source_size(problem: Conv2dProblem) -> tuple[int, int]:
    """Height and width of the images that are walked."""
    if problem.direction == "input_grad":
        return problem.out_size
    return problem.height, problem.width


def source_channels(problem: Conv2dProblem) -> int:
    is_gradient = problem.direction == "input_grad"
    return problem.out_channels if is_gradient else problem.in_channels


def _forward(axis: _Axis) -> Iterator[ConvAxis]:
    """y[i] = sum over r of x[i * stride - before + r * dilation] w[r]."""
    yield ConvAxis(
        extent=axis.out,
        first=-axis.before,
        stride=axis.stride,
        taps=axis.taps,
        first_tap=0,
        tap_step=1,
        first_offset=0,
        offset_step=axis.dilation,
        out_first=0,
        out_step=1,
    )


def _phases(axis: _Axis) -> Iterator[ConvAxis]:
    """dx[a + stride * i] = sum over r of dy[i + shift(r)] w[r], for each phase a.

    shift(r) = (a + before - r * dilation) / stride

    Only taps count for which the division is exact: every ``stride / g``-th, for the
    greatest common divisor g of stride and dilation. Phases with most taps come first.
    """
    g = math.gcd(axis.stride, axis.dilation)
    tap_step, step = axis.stride // g, axis.dilation // g
    phases: list[ConvAxis] = []
    for a in range(min(axis.stride, axis.size)):
        shift = a + axis.before
        exact = (
            r
            for r in range(min(axis.taps, tap_step))
            if (shift - r * axis.dilation) % axis.stride == 0
        )
        first_tap = next(exact, axis.taps)
        taps = len(range(first_tap, axis.taps, tap_step))
        highest = (shift - first_tap * axis.dilation) // axis.stride
        reach = max(taps - 1, 0) * step
        phases.append(
            ConvAxis(
                extent=-(-(axis.size - a) // axis.stride),
                first=highest - reach if taps else 0,
                stride=1,
                taps=taps,
                first_tap=first_tap,
                tap_step=tap_step,
                first_offset=reach,
                offset_step=-step,
                out_first=a,
                out_step=axis.stride,
            )
        )
    yield from sorted(phases, key=lambda phase: -phase.taps)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StripAxis:
    """Entries of the source along an axis, with zeros behind them.

    Attributes:
      size, before, behind: of the source, and its padding.
      taps, step: of the kernel, and from tap to tap.
      extent: results.
    """

    size: int
    before: int
    behind: int
    taps: int
    step: int
    extent: int

    @property
    def counted(self) -> int:
        """Entries with zeros behind them, which are those in front of the next ones."""
        return self.size + max(self.before, self.behind)

    @property
    def reach(self) -> int:
        return (self.taps - 1) * self.step


def strip_axes(problem: Conv2dProblem) -> tuple[StripAxis, StripAxis]:
    """Rows and columns where the stride is 1."""
    rows, columns = (
        StripAxis(
            size=size,
            before=-walk.first,
            behind=walk.extent
            - size
            + walk.first
            + (walk.taps - 1) * abs(walk.offset_step),
            taps=walk.taps,
            step=abs(walk.offset_step),
            extent=walk.extent,
        )
        for size, (walk,) in zip(source_size(problem), walks(problem), strict=True)
    )
    return rows, columns


def refused_walks(problem: Conv2dProblem) -> Iterator[str]:
    """Why tensor maps cannot walk the images: each sentence names the limit."""
    low, high = CORNERS
    names = ("rows", "columns")
    for name, size, axis in zip(
        names, source_size(problem), walks(problem), strict=True
    ):
        for walk in axis:
            if not walk.taps:
                continue
            for corner in (walk.first, walk.upper(size)):
                if not low <= corner <= high:
                    yield (
                        f"its {name} begin or end {abs(corner)} pixels from the "
                        f"image's edge; im2col tensor maps reach {-low}"
                    )
            if walk.most_offset > MOST_OFFSET:
                yield (
                    f"its kernel reaches over {walk.most_offset + 1} {name}; im2col "
                    f"tensor maps reach {MOST_OFFSET + 1}"
                )
            if walk.stride > MOST_STRIDE:
                yield (
                    f"its stride along {name} is {walk.stride}; im2col tensor maps "
                    f"have at most {MOST_STRIDE}"
                )


def im2col_map(
    problem: Conv2dProblem,
    rows: ConvAxis,
    columns: ConvAxis,
    *,
    operand: int,
    dtype: str,
    channels: int,
    pixels: int,
) -> Im2colMap:
    """The tensor map of the images, for copies of ``pixels`` positions of two walks.

    Args:
      problem: whose images the operand holds, see ``source_size``.
      rows, columns: walks of the problem that have taps.
      operand, dtype, channels, pixels: of the map.
    """
    height, width = source_size(problem)
    depth = source_channels(problem)
    pixel = depth * ITEMSIZE["float32" if dtype == "tfloat32" else dtype]
    return Im2colMap(
        operand=operand,
        dtype=dtype,
        dims=(depth, width, height, problem.batch),
        strides=(pixel, pixel * width, pixel * width * height),
        lower=(columns.first, rows.first),
        upper=(columns.upper(width), rows.upper(height)),
        channels=channels,
        pixels=pixels,
        element_strides=(1, columns.stride, rows.stride, 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )
