"""matmul: jnp.matmul with a fused epilogue, on the best implementation there is.

Everything that ``jnp.matmul`` accepts is folded here into the canonical form that the
primitive (``ops.matmul.primitive``) works on. Programs call it ``tracea.ops.matmul``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from tracea_jax import variants
from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.precision import canonical_precision
from tracea_jax.ops.common.promotion import (
    check_kinds,
    preferred_dtype,
    product_dtype,
)
from tracea_jax.ops.common.ranks import as_ranks
from tracea_jax.ops.common.shapes import check_arrays, fold
from tracea_jax.ops.common.typed import broadcast_shapes, jit
from tracea_jax.ops.matmul.primitive import bind
from tracea_jax.problem import Epilogue, check_activation
from tracea_jax.typing import Activation, Implementation


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    activation: Activation = "none",
    residual: ArrayLike | None = None,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """activation(a @ b + bias) + residual, rounded once.

    Kernels compute the epilogue in float32 from the unrounded product. Where XLA serves
    the problem, it is the same expression in jnp, whose every step rounds. Without
    bias, activation and residual this is ``jnp.matmul``.

    Args:
      a: (..., m, k), or (k,). Batch dimensions broadcast as in ``jnp.matmul``.
      b: (..., k, n), or (k,).
      bias: (n,), added to every row; n is 1 if b is a vector.
      activation: "none", "relu", "gelu" (tanh form), "gelu_exact" (erf form), "silu".
      residual: anything that broadcasts to the result's shape, added last.
      precision: as in ``jax.lax.dot_general``.
      preferred_element_type: dtype of the result; by default the common one of a and
        b, as in jnp. Operands are not rounded to it before they are multiplied.
      out_sharding: the result's sharding over explicit axes of a mesh, as in
        ``jnp.matmul``: a ``NamedSharding`` or ``PartitionSpec``, None for what lax
        derives.
      implementation: None for the best known, "xla", "tracea" (a kernel of ours or an
        error with every reason), or a variant's name; for derivatives likewise.
      config: explicit config, the variant's own type or a dict of its fields.

    Returns:
      The product, (..., m, n) without the dimensions that a vector operand lacks.

    Raises:
      ValueError: on shapes that do not fit, an unknown activation or implementation, a
        config that is not legal, or an implementation that cannot run the problem.
      TypeError: on operands that are no arrays, such as lists, a preferred dtype that
        ``jnp.matmul`` refuses, or a bias or residual that the result's dtype would cut:
        floats added to integers.

    Kernels take float32, bfloat16 and float16 (see ``tracea doctor``); other dtypes and
    symbolic shapes are left to XLA.
    """
    check_activation(activation)
    variants.check_implementation("matmul", implementation)
    call = functools.partial(
        _matmul,
        activation=activation,
        precision=canonical_precision(precision),
        out=preferred_dtype(preferred_element_type),
        implementation=implementation,
        config=lowering.hashable_config(config),
    )
    return lowering.with_out_sharding(call, out_sharding, a, b)(a, b, bias, residual)


@functools.partial(
    jit,
    static_argnames=("activation", "precision", "out", "implementation", "config"),
    inline=True,
)
def _matmul(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation,
    out: Any,
    **how: Any,
) -> jax.Array:
    optional = {"bias": bias, "residual": residual}
    given = {name: x for name, x in optional.items() if x is not None}
    check_arrays("matmul", a=a, b=b, **given)
    _check_shapes(a, b, bias)
    out = product_dtype(a, b, out)
    check_kinds(out, bias=bias, residual=residual)
    epilogues.check_result(activation, out)
    lhs = a[None, :] if a.ndim == 1 else a
    rhs = b[:, None] if b.ndim == 1 else b
    m, n = lhs.shape[-2], rhs.shape[-1]
    batch = broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    keep = (*batch, *((m,) if a.ndim > 1 else ()), *((n,) if b.ndim > 1 else ()))
    (lhs, rhs), ranks = fold(lhs, rhs, batch=batch)
    if residual is not None:
        whole = ranks.result(lhs, rhs, "nn")
        residual = _broadcast(residual, keep).reshape(whole)
    step = Epilogue(
        bias="none" if bias is None else "row",
        activation=activation,
        residual=residual is not None,
    )
    operands = [x for x in (lhs, rhs, bias, residual) if x is not None]
    how |= {"layout": "nn", "out": out, "epilogue": step, **as_ranks(ranks)}
    (y,) = bind(*operands, **how)
    return y.reshape(keep)


def _broadcast(residual: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    try:
        return jnp.broadcast_to(residual, shape)
    except ValueError as e:
        raise ValueError(
            f"residual, {residual.shape}, must broadcast to the result, {shape}"
        ) from e


def _check_shapes(a: jax.Array, b: jax.Array, bias: jax.Array | None) -> None:
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError(
            f"matmul takes a and b of at least one dimension; their shapes are "
            f"{a.shape} and {b.shape} (multiply scalars with *)"
        )
    k, n = b.shape[max(b.ndim - 2, 0)], b.shape[-1] if b.ndim > 1 else 1
    if a.shape[-1] != k:
        raise ValueError(
            f"matmul contracts the last dimension of a, {a.shape}, with the second to "
            f"last of b, {b.shape}: {a.shape[-1]} != {k}"
        )
    if bias is not None and bias.shape != (n,):
        raise ValueError(
            f"bias must have shape ({n},), one entry a column; {bias.shape=}"
        )
