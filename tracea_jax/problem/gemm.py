"""Matrix products, one or a gated pair."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tracea_jax.problem.base import Problem
from tracea_jax.problem.epilogue import (
    ITEMSIZE,
    Activation,
    Epilogue,
    check_activation,
    without_default_sums,
)

Layout = Literal["nn", "nt", "tn", "tt"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GemmProblem(Problem):
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
      lhs_stored, rhs_stored: dtype names of integers of 8 bits or fewer that the
        program converts A or B from, before the product; None if it does not.
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
    lhs_stored: str | None = None
    rhs_stored: str | None = None

    op = "matmul"  # not a field: the same for every instance
    extents = ("batch", "m", "n", "k")

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return self.lhs, self.rhs

    @property
    def fused_operands(self) -> str | None:
        return _fused_operands(self)

    @property
    def flops(self) -> int:
        """Multiply-adds counted twice, epilogue not counted."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Fewest bytes moved through memory: each operand read, each result written."""
        lhs, rhs, out = _array_bytes(self)
        outs = 1 + self.epilogue.residual + self.epilogue.save_preactivation
        return lhs + rhs + outs * out

    @classmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        dtypes: dict[str, Any] = {"lhs": dtype, "rhs": dtype, "out": dtype}
        aligned = cls(m=4096, n=4096, k=4096, **dtypes)
        return {
            "aligned": aligned,
            "unaligned": cls(m=4095, n=4097, k=4099, **dtypes),
            "highest precision": dataclasses.replace(aligned, precision="highest"),
        }

    def to_json(self) -> dict[str, Any]:
        data = _without_default_stored(dataclasses.asdict(self))
        return {"op": self.op, **without_default_sums(data)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GemmProblem:
        fields = {k: v for k, v in data.items() if k != "op"}
        fields["epilogue"] = Epilogue(**fields.get("epilogue", {}))
        return cls(**fields)

    def __str__(self) -> str:
        extra = "" if self.epilogue.is_identity else f" {self.epilogue}"
        return f"{_head(self)}{extra}{_precision(self)}{_stored(self)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GatedMatmulProblem(Problem):
    """C[b] = activation(op(A[b]) @ op(G[b])) * (op(A[b]) @ op(U[b])).

    Attributes:
      batch, m, n, k: as in ``GemmProblem``; G and U have the same shape.
      lhs, rhs, out: dtype names of A, of G and U, and of C.
      layout: one letter for A, one for G and U, as in ``GemmProblem``.
      lhs_batched, rhs_batched: False if all batches share that operand.
      precision: as in ``GemmProblem``.
      activation: one of ``ACTIVATIONS``, applied to the product with G.
      save_products: whether both products are further results, in the output dtype
        (training).
      lhs_stored, rhs_stored: as in ``GemmProblem``; G and U have the same.
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
    activation: Activation = "silu"
    save_products: bool = False
    lhs_stored: str | None = None
    rhs_stored: str | None = None

    op = "gated_matmul"
    extents = ("batch", "m", "n", "k")

    def __post_init__(self) -> None:
        check_activation(self.activation)

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return self.lhs, self.rhs

    @property
    def fused_operands(self) -> str | None:
        return _fused_operands(self)

    @property
    def flops(self) -> int:
        """Operations of both products, without those of the activation."""
        return 4 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Fewest bytes moved through memory: each operand read, each result written."""
        lhs, rhs, out = _array_bytes(self)
        return lhs + 2 * rhs + (3 if self.save_products else 1) * out

    @classmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        return {"": cls(m=4096, n=8192, k=4096, lhs=dtype, rhs=dtype, out=dtype)}

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **_without_default_stored(dataclasses.asdict(self))}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GatedMatmulProblem:
        return cls(**{k: v for k, v in data.items() if k != "op"})

    def __str__(self) -> str:
        saved = " &products" if self.save_products else ""
        extra = f" {self.activation}{saved}"
        return f"{_head(self)}{extra}{_precision(self)}{_stored(self)}"


_Products = GemmProblem | GatedMatmulProblem


def _array_bytes(problem: _Products) -> tuple[int, int, int]:
    """Bytes of a left operand, a right operand and a result, with their batches."""
    p = problem
    batches = {True: p.batch, False: 1}
    lhs, rhs = (
        1 if stored else ITEMSIZE.get(dtype, 4)
        for stored, dtype in ((p.lhs_stored, p.lhs), (p.rhs_stored, p.rhs))
    )
    return (
        batches[p.lhs_batched] * p.m * p.k * lhs,
        batches[p.rhs_batched] * p.k * p.n * rhs,
        p.batch * p.m * p.n * ITEMSIZE.get(p.out, 4),
    )


def _head(problem: _Products) -> str:
    """Op, shape, dtypes and layout."""
    p = problem
    batch = f"{p.batch}x" if p.batch > 1 else ""
    dtypes = p.lhs if p.lhs == p.rhs else f"{p.lhs},{p.rhs}"
    out = "" if p.out == p.lhs == p.rhs else f"->{p.out}"
    return f"{p.op} {batch}{p.m}x{p.n}x{p.k} {dtypes}{out} {p.layout}"


def _without_default_stored(data: dict[str, Any]) -> dict[str, Any]:
    """A problem as plain data; answers are kept under names from before the fields."""
    names = [n for n in ("lhs_stored", "rhs_stored") if data[n] is None]
    return {name: value for name, value in data.items() if name not in names}


def _fused_operands(problem: _Products) -> str | None:
    """See ``Problem.fused_operands``."""
    found = [s for s in (problem.lhs_stored, problem.rhs_stored) if s is not None]
    return f"converts {' and '.join(found)} operands" if found else None


def _stored(problem: _Products) -> str:
    p = problem
    pairs = (("lhs", p.lhs_stored), ("rhs", p.rhs_stored))
    return "".join(f" {name} from {stored}" for name, stored in pairs if stored)


def _precision(problem: _Products) -> str:
    return "" if problem.precision == "default" else f" {problem.precision}"
