"""Problems of matmul from plain values: ``Graph.add_matmul``, ``tracea tune matmul``.

What a call of the op asks, the primitive's ``problem_of`` says; both give the same.
"""

from __future__ import annotations

from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from tracea_jax.ops.common import arguments
from tracea_jax.ops.common.building import epilogue, product_fields
from tracea_jax.problem import GemmProblem
from tracea_jax.typing import Activation


def build(
    m: int,
    n: int,
    k: int,
    *,
    dtype: DTypeLike = "float32",
    out: DTypeLike | None = None,
    batch: int = 1,
    layout: str = "nn",
    precision: PrecisionLike = None,
    bias: bool = False,
    activation: Activation = "none",
    residual: bool = False,
) -> GemmProblem:
    """activation(a @ b + bias) + residual, a: (batch, m, k), b: (batch, k, n).

    Args:
      m, n, k: sizes.
      dtype: of the operands.
      out: dtype of the result, if another.
      batch: number of independent products.
      layout: one letter for a, one for b: "n" as above, "t" stored transposed.
      precision: as in ``ops.matmul``.
      bias, residual: whether there is one, of (n,) and of the result's shape.
      activation: one of ``problem.ACTIVATIONS``.
    """
    fields = product_fields(m, n, k, dtype, out, batch, layout, precision)
    return GemmProblem(**fields, epilogue=epilogue(bias, activation, residual))


ARGUMENTS = (
    *arguments.PRODUCT,
    arguments.activation("none"),
    arguments.flag("--bias", help="adds a vector of N entries"),
    arguments.flag("--residual", help="adds an array of the result's shape, last"),
)
