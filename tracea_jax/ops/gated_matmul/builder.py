"""Problems of gated_matmul from plain values, for the graph and the command line.

What a call of the op asks, the primitive's ``problem_of`` says; both give the same.
"""

from __future__ import annotations

from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from tracea_jax.ops.common import arguments
from tracea_jax.ops.common.building import product_fields
from tracea_jax.problem import GatedMatmulProblem
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
    activation: Activation = "silu",
) -> GatedMatmulProblem:
    """activation(a @ w_gate) * (a @ w_up), a: (batch, m, k), weights (batch, k, n).

    Args:
      m, n, k: sizes.
      dtype: of the operands.
      out: dtype of the result, if another.
      batch: number of independent pairs.
      layout: one letter for a, one for the weights: "n" as above, "t" transposed.
      precision: as in ``ops.gated_matmul``.
      activation: one of ``problem.ACTIVATIONS``.
    """
    fields = product_fields(m, n, k, dtype, out, batch, layout, precision)
    return GatedMatmulProblem(**fields, activation=activation)


ARGUMENTS = (*arguments.PRODUCT, arguments.activation("silu"))
