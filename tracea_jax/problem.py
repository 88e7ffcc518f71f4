"""What is asked of an op: frozen, hashable descriptions that name no implementation.

A problem carries everything that may influence which kernel runs and nothing else; it
is the key of the tuning cache, the argument of every ``why_not`` and what ``explain``
prints.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

Activation = Literal["none", "relu", "gelu", "gelu_exact", "silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)

BiasKind = Literal["none", "row", "batched_row"]
Layout = Literal["nn", "nt", "tn", "tt"]

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What happens to the accumulator before it is stored, in this order.

    z = acc + bias;  y = activation(z) + residual;  one rounding to the output dtype.

    Attributes:
      bias: "none"; "row", one vector of N entries; "batched_row", one for each batch.
      activation: one of ``ACTIVATIONS``; "gelu" is the tanh form.
      residual: whether an array of the output's shape is added last.
      save_preactivation: whether z is a second result, in the output dtype (training).
      bias_dtype, residual_dtype: set only where they differ from the output's dtype.
    """

    bias: BiasKind = "none"
    activation: Activation = "none"
    residual: bool = False
    save_preactivation: bool = False
    bias_dtype: str | None = None
    residual_dtype: str | None = None

    def __post_init__(self) -> None:
        check_activation(self.activation)

    @property
    def is_identity(self) -> bool:
        """True if the accumulator is only rounded and stored."""
        return self == Epilogue()

    def __str__(self) -> str:
        steps = [
            f"bias:{self.bias_dtype}" if self.bias_dtype else "bias",
            self.activation,
            f"residual:{self.residual_dtype}" if self.residual_dtype else "residual",
        ]
        taken = (self.bias != "none", self.activation != "none", self.residual)
        text = "+".join(s for s, t in zip(steps, taken, strict=True) if t)
        return text + (" &z" if self.save_preactivation else "") or "none"


def check_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation={name!r} is unknown; it must be one of "
            + ", ".join(ACTIVATIONS)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmProblem:
    """C[b] = epilogue(op(A[b]) @ op(B[b])), row-major operands.

    Attributes:
      batch: number of independent products (1 if not batched).
      m, n, k: op(A) is (m, k), op(B) is (k, n), C is (m, n).
      lhs, rhs, out: dtype names of A, B and C.
      layout: one letter for A, one for B; "n" stores A as (m, k) and B as (k, n), "t"
        stores them as (k, m) and (n, k).
      lhs_batched, rhs_batched: False if all batches share that operand.
      precision: "default", "high", "highest", or the name of a lax dot algorithm.
      epilogue: see ``Epilogue``.
    """

    batch: int = 1
    m: int
    n: int
    k: int
    lhs: str = "float32"
    rhs: str = "float32"
    out: str = "float32"
    layout: Layout = "nn"
    lhs_batched: bool = False
    rhs_batched: bool = False
    precision: str = "default"
    epilogue: Epilogue = Epilogue()

    op = "matmul"  # not a field: the same for every instance

    @property
    def flops(self) -> int:
        """Multiply-adds counted twice, epilogue not counted."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Fewest bytes moved through memory: each operand read, each result written."""
        batches = {True: self.batch, False: 1}
        lhs = batches[self.lhs_batched] * self.m * self.k * ITEMSIZE.get(self.lhs, 4)
        rhs = batches[self.rhs_batched] * self.k * self.n * ITEMSIZE.get(self.rhs, 4)
        outs = 1 + self.epilogue.residual + self.epilogue.save_preactivation
        return (
            lhs + rhs + outs * self.batch * self.m * self.n * ITEMSIZE.get(self.out, 4)
        )

    def to_json(self) -> dict[str, Any]:
        """The problem as plain data, ``op`` first; the inverse of ``from_json``."""
        return {"op": self.op, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GemmProblem:
        fields = {k: v for k, v in data.items() if k != "op"}
        return cls(**{**fields, "epilogue": Epilogue(**fields.get("epilogue", {}))})

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        dtypes = self.lhs if self.lhs == self.rhs else f"{self.lhs},{self.rhs}"
        out = "" if self.out == self.lhs == self.rhs else f"->{self.out}"
        extra = "" if self.epilogue.is_identity else f" {self.epilogue}"
        precision = "" if self.precision == "default" else f" {self.precision}"
        shape = f"{batch}{self.m}x{self.n}x{self.k}"
        return f"matmul {shape} {dtypes}{out} {self.layout}{extra}{precision}"


Problem = GemmProblem
