"""Attention by cuDNN: the operands it wants, in jnp around JAX's own primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax import _compat_cudnn, serving
from tracea_jax.ops.attention import definition
from tracea_jax.ops.attention.reference import Spec, problem_of
from tracea_jax.ops.common.typed import arange, full, zeros
from tracea_jax.variants.attention_cudnn import masking

# What forbids a key. Twice it is still finite, and cuDNN subtracts such numbers.
_FORBIDDEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}


def forward(*operands: Any, spec: Spec, lse: Any = None, **_: Any) -> list[Any]:
    """``reference.reference``, computed by cuDNN."""
    x = spec.named(operands)
    o, *residual = _compat_cudnn.attention_forward(
        operands[:3],
        _bias(x, spec),
        _lengths(x),
        residual=lse is not None,
        **_mask(x, spec),
    )
    return [_clear(o, x["q_lengths"]), *(r.astype(lse) for r in residual)]


def backward(
    *operands: Any,
    spec: Spec,
    bias_gradient: bool,
    **_: Any,
) -> list[Any]:
    """``reference.backward_reference``, computed by cuDNN."""
    primals, (o, lse, do) = spec.split(operands)
    x = spec.named(primals)
    dq, dk, dv, *dbias = _compat_cudnn.attention_backward(
        operands[:3],
        _bias(x, spec),
        _lengths(x),
        o,
        lse,
        do,
        dbias=bias_gradient,
        **_mask(x, spec),
    )
    grads = [_clear(dq, x["q_lengths"])]
    grads += [_clear(d, x["kv_lengths"]) for d in (dk, dv)]
    return [*grads, *(_sum_to(d, x["bias"]) for d in dbias)]


def _why_not() -> str | None:
    return _compat_cudnn.unavailable()


serving.WHY_NOT["attention", "cudnn"] = _why_not


def _mask(x: dict[str, Any], spec: Spec) -> dict[str, Any]:
    causal, window = masking(problem_of([x[n] for n in spec.names], spec=spec))
    return {"scale": spec.scale, "causal": causal, "window": window}


def _lengths(x: dict[str, Any]) -> tuple[Any, Any] | None:
    """Numbers of queries and keys of each example, if either may be short."""
    if x["q_lengths"] is None and x["kv_lengths"] is None:
        return None

    def or_all(lengths: Any, of: Any) -> Any:
        if lengths is None:
            return full(of.shape[:1], of.shape[1], jnp.int32)
        return jnp.clip(lengths, 1, of.shape[1])  # a sum of no keys is not finite

    return or_all(x["q_lengths"], x["q"]), or_all(x["kv_lengths"], x["k"])


def _bias(x: dict[str, Any], spec: Spec) -> Any:
    """Bias and mask, segments as a mask too, as one bias over all scores of a head."""
    bias, mask, q = x["bias"], definition.allowed(spec, x), x["q"]
    if bias is None and mask is None:
        return None
    forbidden = np.asarray(_FORBIDDEN[q.dtype.name], q.dtype)
    if bias is None:
        bias = zeros((), q.dtype)
    else:
        bias = jnp.maximum(bias, forbidden)
    if mask is not None:
        bias = jnp.where(mask, bias, forbidden)
    return jnp.broadcast_to(bias, (*bias.shape[:2], q.shape[1], x["k"].shape[1]))


def _clear(y: jax.Array, lengths: Any) -> jax.Array:
    """y, (batch, length, ...), with zeros past each example's own length."""
    if lengths is None:
        return y
    inside = arange(y.shape[1])[None] < lengths[:, None]
    return jnp.where(inside[:, :, None, None], y, zeros((), y.dtype))


def _sum_to(gradient: jax.Array, bias: jax.Array) -> jax.Array:
    """The gradient of what was broadcast from the bias, as the bias's."""
    axes: Sequence[int] = [
        i
        for i, (n, own) in enumerate(zip(gradient.shape, bias.shape, strict=True))
        if own == 1 and n != 1
    ]
    if not axes:
        return gradient
    wide = gradient.astype(jnp.float32).sum(axes, keepdims=True)
    return wide.astype(bias.dtype)
