"""The epilogue in jnp: the reference for every kernel, and the code that XLA runs.

    z = acc + bias;  y = activation(z) + residual;  one rounding to the output dtype

The residual may be a factor instead of a term, or the argument of a derivative; see
``problem.Epilogue``, the description without JAX. The float64 activations of
verification are in ``exact``. Callers: the primitives of matmul, gated_matmul, conv2d.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.ops.common.promotion import added, promoted
from tracea_jax.ops.common.typed import jvp as jvp_of
from tracea_jax.ops.common.typed import ones_like
from tracea_jax.problem import Epilogue

ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda z: z,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


def accumulator_dtype(epilogue: Epilogue, *dtypes: jnp.dtype) -> jnp.dtype:
    """The dtype of the epilogue's computation: at least float32 for floating operands.

    Without an epilogue it is the output dtype, so that the product is exactly that of
    ``lax.dot_general``.

    Args:
      epilogue: the steps.
      *dtypes: of the operands, and last of the output.
    """
    out = dtypes[-1]
    if epilogue.is_identity:
        return out
    return promoted(*dtypes, *([jnp.float32] if is_floating(out) else []))


def written_dtype(out: jnp.dtype, *operands: jax.Array | None) -> jnp.dtype:
    """The dtype of an epilogue that is written by hand in jnp.

    It is the output's dtype, or that of a wider bias or residual. XLA fuses such code
    best: keeping the product in float32 for the epilogue would cost XLA one more pass
    over memory.
    """
    return promoted(out, *(x.dtype for x in operands if x is not None))


def other_dtype(operand: Any, out: jnp.dtype) -> str | None:
    """The dtype of an epilogue operand; None if absent or equal to the output's."""
    if operand is None or operand.dtype == out:
        return None
    return operand.dtype.name


def check_result(activation: str, out: jnp.dtype) -> None:
    """Raises ValueError if a result of this dtype cannot have the activation."""
    if activation not in ("none", "relu") and not is_floating(out):
        raise ValueError(f"{activation=} needs a floating-point result; it is {out}")


def is_floating(dtype: jnp.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def apply(
    acc: jax.Array,
    epilogue: Epilogue,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out: jnp.dtype,
) -> list[jax.Array]:
    """The results of an epilogue: y, then z if the epilogue saves it, or column sums.

    Args:
      acc: products, (..., m, n).
      epilogue: the steps.
      bias: anything that broadcasts to acc's shape.
      residual: acc's shape.
      out: dtype of the results.
    """
    if epilogue.is_derivative:
        assert residual is not None
        y = activation_jvp(epilogue.activation, residual, in_float32(acc))
        sums = [y.sum(tuple(range(y.ndim - 1)))] if epilogue.column_sums else []
        return [y.astype(out), *(s.astype(jnp.float32) for s in sums)]
    z = acc if bias is None else added(acc, bias)
    y = ACTIVATION_FUNCTIONS[epilogue.activation](z)
    if residual is not None:
        residual = residual.astype(acc.dtype)
        y = y + residual if epilogue.residual_op == "add" else y * residual
    results = [y, z] if epilogue.save_preactivation else [y]
    return [r.astype(out) for r in results]


def activation_jvp(activation: str, z: jax.Array, dz: jax.Array) -> jax.Array:
    """activation'(z) * dz in float32 or wider, rounded to dz's dtype."""
    wide = promoted(z.dtype, jnp.float32)
    return _derivative(activation, z.astype(wide), dz.astype(wide)).astype(dz.dtype)


def _derivative(
    activation: str, z: jax.Array, dz: jax.Array, factor: jax.Array | None = None
) -> jax.Array:
    """activation'(z) * factor * dz, linear in dz by one product.

    Its transpose then needs one array of the forward pass, which is moved if the
    compiler splits the cotangent in another way than z. relu selects dz where z > 0,
    so that infinities elsewhere do not matter.
    """
    f = ACTIVATION_FUNCTIONS[activation]
    if activation in ("none", "relu"):
        dy = jvp_of(f, (z,), (dz,))[1]
        return dy if factor is None else dy * factor
    slope = jvp_of(f, (z,), (ones_like(z),))[1]
    return dz * (slope if factor is None else slope * factor)


def in_float32(x: jax.Array) -> jax.Array:
    """x in float32, or unchanged if its dtype is wider."""
    return x.astype(promoted(x.dtype, jnp.float32))


def times(x: jax.Array, y: jax.Array, out: jnp.dtype) -> jax.Array:
    """x * y in float32 or wider, rounded to ``out``."""
    wide = promoted(x.dtype, y.dtype, jnp.float32)
    return (x.astype(wide) * y.astype(wide)).astype(out)


def jvp(
    epilogue: Epilogue,
    z: jax.Array,
    residual: Any,
    dz: jax.Array | None,
    dresidual: jax.Array | None,
) -> jax.Array | None:
    """The tangent of y, in float32 or wider and rounded to z's dtype.

    Args:
      epilogue: the steps.
      z: (..., m, n); its values do not matter if there is neither an activation nor a
        perturbed residual that is a factor.
      residual: the same shape, or None.
      dz, dresidual: tangents; None stands for zero, also as the result.
    """
    if epilogue.activation == "none" and not epilogue.residual:
        return dz
    wide = promoted(z.dtype, jnp.float32)
    multiplies = epilogue.residual and epilogue.residual_op == "multiply"
    terms: list[jax.Array] = []
    if dz is not None:
        factor = residual.astype(wide) if multiplies else None
        terms.append(
            _derivative(epilogue.activation, z.astype(wide), dz.astype(wide), factor)
        )
    if dresidual is not None:
        dy = dresidual.astype(wide)
        if multiplies:
            dy *= ACTIVATION_FUNCTIONS[epilogue.activation](z.astype(wide))
        terms.append(dy)
    return functools.reduce(jnp.add, terms).astype(z.dtype) if terms else None
