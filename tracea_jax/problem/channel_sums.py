"""Two sums over the rows of a matrix for each channel: what batch norms are made of."""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.mistakes import shown
from tracea_jax.problem.base import Problem
from tracea_jax.problem.epilogue import ITEMSIZE

KINDS = ("moments", "gradient")
ACTIVATIONS_OF_SUMS = ("none", "relu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChannelSumsProblem(Problem):
    """Sums over all rows, for each channel, of x: (rows, channels).

    moments: sum x and sum x^2. gradient: sum dz and sum dz (x - center), where dz is
    dy, or, with a relu, dy where (x - center) factor + shift is positive.

    Attributes:
      kind: "moments" or "gradient".
      rows, channels: of x.
      dtype: of x and dy. All else is float32, and so are the sums.
      activation: "none", or "relu" of a gradient.
    """

    kind: str
    rows: int
    channels: int
    dtype: str = "bfloat16"
    activation: str = "none"

    op = "channel_sums"
    extents = ("rows", "channels")

    def __post_init__(self) -> None:
        for name, allowed in (("kind", KINDS), ("activation", ACTIVATIONS_OF_SUMS)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(
                    f"{name}={shown(value)} must be one of {', '.join(allowed)}"
                )
        if self.activation != "none" and not self.is_gradient:
            raise ValueError("moments are of x itself; activation must be none")

    @property
    def is_gradient(self) -> bool:
        return self.kind == "gradient"

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return (self.dtype,)

    @property
    def flops(self) -> int:
        each = 3 if not self.is_gradient else 4 + 2 * (self.activation == "relu")
        return each * self.rows * self.channels

    @property
    def bytes(self) -> int:
        arrays = 2 if self.is_gradient else 1
        vectors = 2 + (self.is_gradient) + 2 * (self.activation == "relu")
        entries = arrays * self.rows * ITEMSIZE.get(self.dtype, 4)
        return self.channels * (entries + vectors * ITEMSIZE["float32"])

    @classmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        return {
            kind: cls(kind=kind, rows=200_704, channels=256, dtype=dtype)
            for kind in KINDS
        }

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ChannelSumsProblem:
        return cls(**{k: v for k, v in data.items() if k != "op"})

    def __str__(self) -> str:
        relu = "" if self.activation == "none" else f" {self.activation}"
        size = f"{self.rows}x{self.channels}"
        return f"channel_sums {self.kind} {size} {self.dtype}{relu}"
