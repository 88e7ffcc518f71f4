"""Products whose contraction is split over devices: partial sums, completed.

Callers: the sharding rules of matmul, gated_matmul and conv2d.
"""

from __future__ import annotations

import jax

from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common.sharding import Device
from tracea_jax.ops.common.typed import Params, Primitive
from tracea_jax.problem import Epilogue


def completed(
    primitive: Primitive,
    lhs: jax.Array,
    rhs: jax.Array,
    params: Params,
    epilogue: Epilogue,
    device: Device,
) -> jax.Array:
    """The device's part of a complete product, in the dtype its epilogue computes in.

    Partial sums are sent in the dtype of the result, as those of plain JAX are.

    Args:
      primitive: of products with an epilogue.
      lhs, rhs: parts of its operands.
      params: its parameters, the epilogue aside.
      epilogue: what follows.
      device: where this runs.
    """
    how = {**params, "epilogue": Epilogue(), "config": None}
    acc = device.complete(primitive.bind(lhs, rhs, **how)[0])
    dtypes = lhs.dtype, rhs.dtype, params["out"]
    return acc.astype(epilogues.accumulator_dtype(epilogue, *dtypes))
