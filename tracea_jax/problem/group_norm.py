"""Group norms: each image's groups of channels with mean 0 and variance 1, and scaled.

    y[i, p, c] = activation((x[i, p, c] - mean) * scale[c] * inverse + bias[c])
    inverse = 1 / sqrt(variance + epsilon)

where mean and variance are those of image i and of the group of channel c, over all
pixels and the channels of the group.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tracea_jax.problem.base import Problem
from tracea_jax.problem.epilogue import ITEMSIZE, Activation, check_activation

Direction = Literal["forward", "gradients"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GroupNormProblem(Problem):
    """A group norm of x, (images, pixels, channels), or its gradients.

    Attributes:
      images, pixels, channels, groups: sizes; groups divide the channels.
      epsilon: what is added to variances.
      activation: one of ``ACTIVATIONS``.
      dtype: of x and y.
      parameters: dtype of scale and bias.
      direction: "gradients" are those of x, scale and bias, all three.
    """

    images: int
    pixels: int
    channels: int
    groups: int
    epsilon: float = 1e-6
    activation: Activation = "none"
    dtype: str = "float32"
    parameters: str = "float32"
    direction: Direction = "forward"

    op = "group_norm"
    extents = ("images", "pixels")

    def __post_init__(self) -> None:
        check_activation(self.activation)
        if self.groups < 1 or self.channels % self.groups:
            raise ValueError(
                f"groups={self.groups} must divide the {self.channels} channels"
            )

    @property
    def of_group(self) -> int:
        """Channels of a group."""
        return self.channels // self.groups

    @property
    def size(self) -> int:
        """Elements of x."""
        return self.images * self.pixels * self.channels

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return (self.dtype,)

    @property
    def flops(self) -> int:
        """Sums, squares, and the result; of gradients two sums and the result."""
        return self.size * (8 if self.direction == "forward" else 20)

    @property
    def bytes(self) -> int:
        arrays = 2 if self.direction == "forward" else 3
        return arrays * self.size * ITEMSIZE.get(self.dtype, 4)

    @classmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        def of(direction: Direction) -> GroupNormProblem:
            return cls(
                images=8,
                pixels=4096,
                channels=320,
                groups=32,
                activation="silu",
                dtype=dtype,
                direction=direction,
            )

        return {"forward": of("forward"), "gradients": of("gradients")}

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GroupNormProblem:
        return cls(**{k: v for k, v in data.items() if k != "op"})

    def __str__(self) -> str:
        name = {"forward": "", "gradients": " gradients"}[self.direction]
        words = (
            f"group_norm{name} {self.images}x{self.pixels}x{self.channels}",
            f"of {self.groups} groups",
            self.dtype,
            "" if self.parameters == self.dtype else f"parameters {self.parameters}",
            "" if self.activation == "none" else self.activation,
        )
        return " ".join(filter(None, words))
