"""Convolutions over images, and their gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

from tracea_jax.problem.base import Problem
from tracea_jax.problem.epilogue import (
    ITEMSIZE,
    Epilogue,
    tuples,
    without_default_sums,
)

ImageLayout = Literal["nhwc", "nchw"]
Direction = Literal["forward", "input_grad", "weight_grad"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conv2dProblem(Problem):
    """y = activation(conv(x, w) + bias + residual), or a gradient of the convolution.

    Sizes, strides and padding are those of the forward convolution in every direction.

    Attributes:
      direction: "forward": (x, w) -> y; "input_grad": (dy, w) -> dx; "weight_grad":
        (x, dy) -> dw.
      batch, height, width, in_channels: of x.
      kernel_height, kernel_width, out_channels: of w, whose input channels are
        in_channels / groups.
      strides, dilation: for height and width; the dilation is the kernel's.
      padding: rows (before, after) and columns (before, after) added to x.
      groups: feature groups; in_channels means depthwise.
      layout: "nhwc" with weights HWIO, or "nchw" with weights OIHW.
      lhs, rhs, out: dtype names of both operands and the result.
      precision: as in ``GemmProblem``.
      epilogue: see ``Epilogue``; the residual is added before the activation. Only a
        forward convolution has one.
    """

    direction: Direction = "forward"
    batch: int
    height: int
    width: int
    in_channels: int
    kernel_height: int
    kernel_width: int
    out_channels: int
    strides: tuple[int, int] = (1, 1)
    padding: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    layout: ImageLayout = "nhwc"
    lhs: str = "float32"
    rhs: str = "float32"
    out: str = "float32"
    precision: str = "default"
    epilogue: Epilogue = Epilogue()

    op = "conv2d"
    # Neither sizes nor channels: tiles fit some of them and are cut off at others.
    extents = ("batch",)
    only_between = True

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return self.lhs, self.rhs

    @property
    def out_size(self) -> tuple[int, int]:
        """Height and width of y: floor((size + padding - extent) / stride) + 1."""
        sizes = (self.height, self.width)
        kernel = (self.kernel_height, self.kernel_width)
        extents = [d * (k - 1) + 1 for d, k in zip(self.dilation, kernel, strict=True)]
        height, width = (
            max((size + sum(pad) - extent) // stride + 1, 0)
            for size, pad, extent, stride in zip(
                sizes, self.padding, extents, self.strides, strict=True
            )
        )
        return height, width

    @property
    def flops(self) -> int:
        """Multiply-adds counted twice, those with padding included."""
        taps = self.kernel_height * self.kernel_width * self.in_channels // self.groups
        return 2 * self.batch * math.prod(self.out_size) * self.out_channels * taps

    @property
    def elements(self) -> tuple[int, int, int]:
        """Number of elements of x, w and y."""
        taps = self.kernel_height * self.kernel_width * self.in_channels // self.groups
        return (
            self.batch * self.height * self.width * self.in_channels,
            taps * self.out_channels,
            self.batch * math.prod(self.out_size) * self.out_channels,
        )

    @property
    def bytes(self) -> int:
        """Fewest bytes moved through memory: each operand read, each result written."""
        x, w, y = self.elements
        lhs, rhs, out = {
            "forward": (x, w, y),
            "input_grad": (y, w, x),
            "weight_grad": (x, y, w),
        }[self.direction]
        outs = 1 + self.epilogue.residual + self.epilogue.save_preactivation
        return (
            lhs * ITEMSIZE.get(self.lhs, 4)
            + rhs * ITEMSIZE.get(self.rhs, 4)
            + outs * out * ITEMSIZE.get(self.out, 4)
        )

    @classmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        forward = cls(
            batch=32,
            height=56,
            width=56,
            in_channels=64,
            kernel_height=3,
            kernel_width=3,
            out_channels=64,
            padding=((1, 1), (1, 1)),  # the result has the image's size
            lhs=dtype,
            rhs=dtype,
            out=dtype,
        )
        names = get_args(Direction)
        return {name: dataclasses.replace(forward, direction=name) for name in names}

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **without_default_sums(dataclasses.asdict(self))}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Conv2dProblem:
        fields = {k: v for k, v in data.items() if k != "op"}
        for name in ("strides", "dilation", "padding"):  # JSON has lists
            if name in fields:
                fields[name] = tuples(fields[name])
        fields["epilogue"] = Epilogue(**fields.get("epilogue", {}))
        return cls(**fields)

    def __str__(self) -> str:
        image = f"{self.batch}x{self.height}x{self.width}x{self.in_channels}"
        kernel = f"{self.kernel_height}x{self.kernel_width}x{self.out_channels}"
        dtypes = self.lhs if self.lhs == self.rhs else f"{self.lhs},{self.rhs}"
        out = "" if self.out == self.lhs == self.rhs else f"->{self.out}"
        (top, bottom), (left, right) = self.padding
        parts = [
            f"conv2d {image} * {kernel} {dtypes}{out} {self.layout}",
            "" if self.direction == "forward" else self.direction,
            "" if self.strides == (1, 1) else "stride {}x{}".format(*self.strides),
            f"pad {top},{bottom}x{left},{right}"
            if any((top, bottom, left, right))
            else "",
            "" if self.dilation == (1, 1) else "dilation {}x{}".format(*self.dilation),
            "" if self.groups == 1 else f"groups {self.groups}",
            "" if self.epilogue.is_identity else str(self.epilogue),
            "" if self.precision == "default" else self.precision,
        ]
        return " ".join(p for p in parts if p)
