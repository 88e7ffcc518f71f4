"""Maxima of windows of images, and their gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.mistakes import shown
from tracea_jax.problem.base import Problem
from tracea_jax.problem.epilogue import ITEMSIZE

DIRECTIONS = ("forward", "gradient")
Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MaxPoolProblem(Problem):
    """y = maxima of windows of x, (batch, height, width, channels), or dx of x and dy.

    Attributes:
      direction: "forward" or "gradient".
      batch, height, width, channels: of x.
      kernel, strides: of windows, down and across.
      padding: before and after the image, down and across.
      dtype: of all arrays.
    """

    direction: str
    batch: int
    height: int
    width: int
    channels: int
    kernel: Pair
    strides: Pair
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))
    dtype: str = "bfloat16"

    op = "max_pool"
    extents = ("batch", "height", "width", "channels")

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            words = ", ".join(DIRECTIONS)
            raise ValueError(
                f"direction={shown(self.direction)} must be one of {words}"
            )

    @property
    def out_size(self) -> Pair:
        """Windows down and across."""
        axes = zip(
            (self.height, self.width),
            self.kernel,
            self.strides,
            self.padding,
            strict=True,
        )
        down, across = (max(0, (n + sum(pad) - k) // s + 1) for n, k, s, pad in axes)
        return down, across

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return (self.dtype,)

    @property
    def flops(self) -> int:
        down, across = self.out_size
        each = self.kernel[0] * self.kernel[1]
        return self.batch * down * across * self.channels * each

    @property
    def bytes(self) -> int:
        down, across = self.out_size
        image = self.height * self.width * (1 + (self.direction == "gradient"))
        entries = self.batch * self.channels * (image + down * across)
        return entries * ITEMSIZE.get(self.dtype, 4)

    @classmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        return {
            direction: cls(
                direction=direction,
                batch=64,
                height=112,
                width=112,
                channels=64,
                kernel=(3, 3),
                strides=(2, 2),
                padding=((0, 1), (0, 1)),
                dtype=dtype,
            )
            for direction in DIRECTIONS
        }

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MaxPoolProblem:
        fields = {k: v for k, v in data.items() if k != "op"}
        for name in ("kernel", "strides"):
            fields[name] = tuple(fields[name])
        pads: Any = fields["padding"]
        fields["padding"] = tuple((low, high) for low, high in pads)
        return cls(**fields)

    def __str__(self) -> str:
        size = f"{self.batch}x{self.height}x{self.width}x{self.channels}"
        kernel, strides = ("x".join(map(str, n)) for n in (self.kernel, self.strides))
        return f"max_pool {self.direction} {size} {self.dtype} {kernel}/{strides}"
