"""Functions of each element of arrays, and the table that their kernels are made of.

    out[i] = function(x[i], y[i])   or   function(x[i])

The formulas are C++ of the elements ``x`` and ``y``: numbers of a type ``T``, or
complex ones with the members ``re`` and ``im``. Each operation in them rounds once.
``emit`` makes kernels for GPUs of them, and the header that those for CPUs include.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.mistakes import shown, similar
from tracea_jax.problem.base import Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A row of the table.

    Attributes:
      operands: one or two.
      real, complex: the result of a pair of real, or of complex, elements.
      flops: operations of ``real`` and of ``complex``.
      keeps_complex: whether the result of complex elements is complex.
    """

    operands: int
    real: str
    complex: str
    flops: tuple[int, int]
    keeps_complex: bool = True


FUNCTIONS = {
    "add": Function(
        operands=2,
        real="x + y",
        complex="{x.re + y.re, x.im + y.im}",
        flops=(1, 2),
    ),
    "subtract": Function(
        operands=2,
        real="x - y",
        complex="{x.re - y.re, x.im - y.im}",
        flops=(1, 2),
    ),
    "multiply": Function(
        operands=2,
        real="x * y",
        complex="{x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re}",
        flops=(1, 6),
    ),
    "divide": Function(
        operands=2, real="x / y", complex="quotient(x, y)", flops=(1, 9)
    ),
    "negative": Function(operands=1, real="-x", complex="{-x.re, -x.im}", flops=(1, 2)),
    "abs": Function(
        operands=1,
        real="magnitude(x)",
        complex="length(x.re, x.im)",
        flops=(1, 4),
        keeps_complex=False,
    ),
}

# Of elements: their bytes, and the dtype of the parts that they are made of.
ELEMENTS = {
    "float32": (4, "float32"),
    "float64": (8, "float64"),
    "complex64": (8, "float32"),
    "complex128": (16, "float64"),
}
_SIDES = ("none", "left", "right")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ElementwiseProblem(Problem):
    """out[i] = function(x[i], y[i]), or of x[i] alone, for arrays of one size.

    Attributes:
      function: one of ``FUNCTIONS``.
      size: elements of the result.
      dtype: name of the operands' dtype.
      scalar: the operand that is one number for all elements: "none", "left", "right".
    """

    function: str
    size: int
    dtype: str = "float32"
    scalar: str = "none"

    op = "elementwise"
    extents = ("size",)

    def __post_init__(self) -> None:
        check_function(self.function)
        if self.scalar not in _SIDES:
            raise ValueError(
                f"scalar={shown(self.scalar)} must be one of {', '.join(_SIDES)}"
            )
        if self.scalar != "none" and self.row.operands == 1:
            raise ValueError(f"{self.function} has one operand; scalar must be none")

    @property
    def row(self) -> Function:
        """The function's row of the table."""
        return FUNCTIONS[self.function]

    @property
    def is_complex(self) -> bool:
        return self.dtype.startswith("complex")

    @property
    def out(self) -> str:
        """The dtype of the result."""
        is_part = self.is_complex and not self.row.keeps_complex
        return ELEMENTS[self.dtype][1] if is_part else self.dtype

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return (self.dtype,)

    @property
    def flops(self) -> int:
        return self.size * self.row.flops[self.is_complex]

    @property
    def bytes(self) -> int:
        itemsize, _ = ELEMENTS.get(self.dtype, (4, ""))
        out, _ = ELEMENTS.get(self.out, (4, ""))
        arrays = self.row.operands - (self.scalar != "none")
        return self.size * (arrays * itemsize + out)

    @classmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        return {"": cls(function="add", size=1 << 24, dtype=dtype)}

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ElementwiseProblem:
        return cls(**{k: v for k, v in data.items() if k != "op"})

    def __str__(self) -> str:
        scalar = "" if self.scalar == "none" else f" {self.scalar} scalar"
        return f"elementwise {self.function} {self.size} {self.dtype}{scalar}"


def check_function(name: Any) -> None:
    """Raises ValueError unless it is the name of a function of the table."""
    if not isinstance(name, str) or name not in FUNCTIONS:
        raise ValueError(
            f"function={shown(name)} must be one of {', '.join(FUNCTIONS)}"
            + similar(name, FUNCTIONS)
        )
