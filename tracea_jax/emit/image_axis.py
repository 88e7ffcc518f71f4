"""Correspondence of rows and columns of two images in a convolution or its gradient.

The formulas say how strides, padding and dilation become those of
``kernels/cuda/tile/row_walk.cuh``: classes of results that share no entries of the
image, each a convolution without dilation. Callers: the emitters of kernels that walk
down images.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from tracea_jax.problem import Conv2dProblem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Rows or columns: what is read and what is written, and how they meet.

    Attributes:
      read, result: extents of the image that is read, and of the result.
      taps: of the kernel.
      step: from one entry of the image to the next that a class of results reads.
      classes: of results that share no entries, and the step within one.
      class_stride: from the first entry of a class to that of the next.
      stride: of a class, in units of ``step``.
      between: 1, or the stride whose gradient this is: result + tap = entry * between.
      first_read, first_result: of the first block; the result may be below zero.
    """

    read: int
    result: int
    taps: int
    step: int
    classes: int
    class_stride: int
    stride: int
    between: int
    first_read: int
    first_result: int

    @property
    def slots(self) -> int:
        """Results that are open at a time, see ``kernels/cuda/tile/axis_taps.cuh``."""
        if self.between > 1:
            return -(-self.taps // self.between) * self.between
        return (self.taps - 1) // self.stride + 1

    def entries(self, results: int) -> int:
        """Entries of a class that so many of its results are made of."""
        return ((results - 1) * self.stride + self.taps - 1) // self.between + 1

    def span(self, results: int) -> int:
        """Entries from the first to the last that neighbouring results are made of."""
        steps = (results - 1) * self.class_stride + (self.taps - 1) * self.step
        return steps // self.between + 1

    def blocks(self, results: int) -> int:
        """Blocks of so many results of a class."""
        of_class = -(-(self.result - self.first_result) // self.classes)
        return self.classes * -(-of_class // results)


@functools.lru_cache(maxsize=256)  # each config of a space asks
def axes(problem: Conv2dProblem) -> tuple[Axis, Axis]:
    """Rows and columns of a forward convolution, or of the gradient of x."""
    p = problem
    rows, columns = (
        _axis(p.direction, *sizes)
        for sizes in zip(
            (p.height, p.width),
            p.out_size,
            (p.kernel_height, p.kernel_width),
            p.strides,
            p.dilation,
            (before for before, _ in p.padding),
            strict=True,
        )
    )
    return rows, columns


def _axis(
    direction: str,
    image: int,
    out: int,
    taps: int,
    stride: int,
    dilation: int,
    before: int,
) -> Axis:
    if direction == "input_grad":
        # The taps in reverse: result + dilation * tap = entry * stride + first.
        first = before - (taps - 1) * dilation
        begin = first // stride
        return Axis(
            read=out,
            result=image,
            taps=taps,
            step=dilation,
            classes=dilation,
            class_stride=1,
            stride=1,
            between=stride,
            first_read=begin,
            first_result=begin * stride - first,
        )
    common = math.gcd(stride, dilation)
    return Axis(
        read=image,
        result=out,
        taps=taps,
        step=dilation,
        classes=dilation // common,
        class_stride=stride,
        stride=stride // common,
        between=1,
        first_read=-before,
        first_result=0,
    )
