"""The epilogue in jnp: what every kernel must compute, and what XLA runs instead.

z = acc + bias;  y = activation(z) + residual;  one rounding to the output dtype

The residual may be multiplied with instead; see ``problem.Epilogue``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tracea_jax.problem import Epilogue

ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda z: z,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


def accumulator_dtype(epilogue: Epilogue, *dtypes: jnp.dtype) -> jnp.dtype:
    """The dtype the epilogue is computed in: at least float32 for floating operands.

    Without an epilogue it is the output dtype (the last one given): then the product is
    exactly ``lax.dot_general``'s.
    """
    out = dtypes[-1]
    if epilogue.is_identity:
        return out
    widest = functools.reduce(jnp.promote_types, dtypes)
    return jnp.promote_types(widest, jnp.float32) if is_floating(out) else widest


def is_floating(dtype: jnp.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def apply(
    acc: jax.Array,
    epilogue: Epilogue,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out: jnp.dtype,
) -> list[jax.Array]:
    """The results of an epilogue: [y], or [y, z] if z is saved.

    Args:
      acc: products, (..., m, n).
      epilogue: the steps.
      bias: anything that broadcasts to acc's shape.
      residual: acc's shape.
      out: dtype of the results.
    """
    z = acc if bias is None else acc + bias.astype(acc.dtype)
    y = ACTIVATION_FUNCTIONS[epilogue.activation](z)
    if residual is not None:
        residual = residual.astype(acc.dtype)
        y = y + residual if epilogue.residual_op == "add" else y * residual
    results = [y, z] if epilogue.save_preactivation else [y]
    return [r.astype(out) for r in results]


def activation_jvp(activation: str, z: jax.Array, dz: jax.Array) -> jax.Array:
    """activation'(z) * dz in float32 or wider, rounded to dz's dtype."""
    wide = jnp.promote_types(z.dtype, jnp.float32)
    f = ACTIVATION_FUNCTIONS[activation]
    return jax.jvp(f, (z.astype(wide),), (dz.astype(wide),))[1].astype(dz.dtype)
