"""Attention in jnp: its operands, and what XLA runs where no kernel does.

o = softmax(scale * q @ k' + bias, where allowed) @ v, for each head
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax._compat import linearize_hook
from tracea_jax.ops.common.typed import Aval, Zero, finfo, lax, vjp
from tracea_jax.ops.common.typed import jvp as jvp_of
from tracea_jax.problem import AttentionProblem

OPTIONAL = ("bias", "mask", "q_lengths", "kv_lengths")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the primitives compute; their parameter.

    Attributes:
      scale: what the scores are multiplied with.
      is_causal: whether query i sees keys j <= i only.
      window: (left, right): it sees keys i - left <= j <= i + right only; or None.
      precision: of both products, as ``jax.default_matmul_precision`` names it; None
        for JAX's default.
      optional: which of ``OPTIONAL`` follow q, k and v, in that order.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int, int] | None = None
    precision: str | None = None
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the operands that all primitives begin with."""
        return ("q", "k", "v", *self.optional)

    def named(self, operands: Sequence[Any]) -> dict[str, Any]:
        """The first operands by their names; those that are absent are None."""
        absent: dict[str, Any] = dict.fromkeys(OPTIONAL)
        return {**absent, **dict(zip(self.names, operands, strict=False))}

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The operands of the function itself, and those that follow."""
        count = len(self.names)
        return list(operands[:count]), list(operands[count:])


def matmul_precision(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Context in which products without a precision of their own have this one."""
    context: Any = jax.default_matmul_precision  # annotated as if it took no name
    return context(name)


def reference(*operands: Any, spec: Spec, lse: Any = None, **_: Any) -> list[Any]:
    """[o], or [o, log-sum-exp (batch, heads, q_len)] if ``lse`` is its dtype.

    It is ``jax.nn.dot_product_attention``, so XLA runs what it runs without us.
    """
    x = spec.named(operands)
    if lse is None:
        return [_attend(spec, x, False)]
    narrow = finfo(x["q"].dtype).bits < finfo(lse).bits
    if not narrow:
        o, residual = _attend(spec, x, True)
    else:  # its residual is rounded to the operands' dtype
        wide = {**x, "q": x["q"].astype(lse), "k": x["k"].astype(lse)}
        o = _attend(spec, x, False)
        _, residual = _attend(spec, {**wide, "v": wide["k"]}, True)
    return [o, residual.swapaxes(1, 2).astype(lse)]


def _attend(spec: Spec, x: dict[str, Any], return_residual: bool) -> Any:
    call = functools.partial(_dot_product_attention, spec, return_residual)
    if x["q"].dtype != jnp.float16:
        return call(x)
    # XLA has no float16 products with float32 sums on CPUs, which jax.nn asks for.
    on_cpu = functools.partial(_in_float32, call)
    return lax.platform_dependent(x, cpu=on_cpu, default=call)


def _in_float32(call: Callable[..., Any], x: dict[str, Any]) -> Any:
    def widened(a: jax.Array) -> jax.Array:
        return a.astype(jnp.float32) if a.dtype == jnp.float16 else a

    found = call(jax.tree.map(widened, x))

    def narrowed(a: jax.Array) -> jax.Array:
        return a.astype(jnp.float16)

    return jax.tree.map(narrowed, found)


def _dot_product_attention(spec: Spec, return_residual: bool, x: dict[str, Any]) -> Any:
    with matmul_precision(spec.precision):
        return jax.nn.dot_product_attention(
            x["q"],
            x["k"],
            x["v"],
            x["bias"],
            x["mask"],
            scale=spec.scale,
            is_causal=spec.is_causal,
            query_seq_lengths=x["q_lengths"],
            key_value_seq_lengths=x["kv_lengths"],
            local_window_size=spec.window,
            return_residual=return_residual,
            implementation="xla",
        )


def jvp(
    function: Callable[..., list[Any]], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """``jax.jvp`` that leaves out the primals with symbolically zero tangents."""
    live = [i for i, t in enumerate(tangents) if not isinstance(t, Zero)]

    def of_live(*values: Any) -> list[Any]:
        full = list(primals)
        for i, value in zip(live, values, strict=True):
            full[i] = value
        return function(*full)

    pick = [primals[i] for i in live], [tangents[i] for i in live]
    return jvp_of(of_live, *pick)


def tangent_reference(*operands: Any, spec: Spec, **_: Any) -> list[Any]:
    """[tangent of o] from q, k, v, optional..., o, lse, tangents."""
    primals, (_, _, *tangents) = spec.split(operands)
    count = len(tangents)  # bias comes right after v

    def function(*active: Any) -> list[Any]:
        return reference(*active, *primals[count:], spec=spec)

    return jvp_of(function, primals[:count], tangents)[1]


def backward_reference(
    *operands: Any, spec: Spec, bias_gradient: bool, **_: Any
) -> list[Any]:
    """Gradients of q, k, v (, bias) from q, k, v, optional..., o, lse, cotangent."""
    primals, (_, _, do) = spec.split(operands)
    count = 3 + bias_gradient

    def function(*active: Any) -> Any:
        return reference(*active, *primals[count:], spec=spec)[0]

    with linearize_hook(None):  # the reference is ours, not a user's function
        return list(vjp(function, *primals[:count])[1](do))


def problem_of(
    avals: Sequence[Aval],
    *,
    spec: Spec,
    lse: Any = None,
    direction: Any = "forward",
    **_: Any,
) -> AttentionProblem:
    """The problem that the primitives' parameters and static shapes describe."""
    x = spec.named(avals)
    q, k, bias, mask = x["q"], x["k"], x["bias"], x["mask"]
    return AttentionProblem(
        direction=direction,
        batch=q.shape[0],
        q_len=q.shape[1],
        kv_len=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        dtype=q.dtype.name,
        bias=None if bias is None else bias.shape,
        bias_dtype=None if bias is None else bias.dtype.name,
        mask=None if mask is None else mask.shape,
        is_causal=spec.is_causal,
        window=spec.window,
        q_lengths=x["q_lengths"] is not None,
        kv_lengths=x["kv_lengths"] is not None,
        scale=spec.scale,
        saves_lse=direction == "forward" and lse is not None,
    )
