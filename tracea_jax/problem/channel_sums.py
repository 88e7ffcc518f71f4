"""Two sums over the rows of a matrix for each channel: what batch norms are made of."""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.mistakes import shown
from tracea_jax.problem.base import Problem
from tracea_jax.problem.epilogue import ITEMSIZE

KINDS = ("moments", "gradient")
RELUS = ("none", "argument", "result")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChannelSumsProblem(Problem):
    """Sums over all rows, for each channel, of x: (rows, channels).

    moments: sum x and sum x^2. gradient: sum dz and sum dz (x - center), where dz is
    dy, or, through a relu, dy where relu's argument is positive.

    Attributes:
      kind: "moments" or "gradient".
      rows, channels: of x.
      dtype: of x and dy. All else is float32, and so are the sums.
      relu: "none"; "argument" if that is (x - center) factor + shift; "result" if y,
        which is positive where the argument is, is an operand, and dz a result.
      cotangents: arrays that dy is the sum of: 1, or 2 with relu's result.
    """

    kind: str
    rows: int
    channels: int
    dtype: str = "bfloat16"
    relu: str = "none"
    cotangents: int = 1

    op = "channel_sums"
    extents = ("rows", "channels")

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", KINDS),
            ("relu", RELUS),
            ("cotangents", (1, 2) if self.keeps else (1,)),
        ):
            if (value := getattr(self, name)) not in allowed:
                words = ", ".join(map(str, allowed))
                raise ValueError(f"{name}={shown(value)} must be one of {words}")
        if self.relu != "none" and not self.is_gradient:
            raise ValueError("moments are of x itself; relu must be none")

    @property
    def is_gradient(self) -> bool:
        return self.kind == "gradient"

    @property
    def keeps(self) -> bool:
        """Returns whether dz is a result."""
        return self.relu == "result"

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the primitive's operands: arrays, then one entry a channel."""
        arrays = ("x", "dy", "more")[: 1 + self.is_gradient * self.cotangents]
        result = ("y",) * self.keeps
        center = ("center",) * self.is_gradient
        return (*arrays, *result, *center, *("factor", "shift") * self._is_computed)

    @property
    def _is_computed(self) -> bool:
        return self.relu == "argument"

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return (self.dtype,)

    @property
    def flops(self) -> int:
        relu = 2 * self._is_computed + self.cotangents - 1
        each = 4 + relu if self.is_gradient else 3
        return each * self.rows * self.channels

    @property
    def bytes(self) -> int:
        arrays = 1 + self.is_gradient * self.cotangents + 2 * self.keeps
        vectors = 2 + self.is_gradient + 2 * self._is_computed
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
        relu = "" if self.relu == "none" else f" relu's {self.relu}"
        more = " of two" * (self.cotangents == 2)
        size = f"{self.rows}x{self.channels}"
        return f"channel_sums {self.kind}{more} {size} {self.dtype}{relu}"
