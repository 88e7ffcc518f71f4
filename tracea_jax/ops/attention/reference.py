"""Attention in jnp: its operands, and what XLA runs where no kernel does.

o = softmax(scale * q @ k' + bias, where allowed) @ v, for each head

It is ``jax.nn.dot_product_attention`` as far as that goes; the rest is written out in
``definition``. Callers: the primitives, and all that make problems of their parameters.
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
from tracea_jax.ops.attention import definition
from tracea_jax.ops.common.typed import Aval, Zero, eval_shape, finfo, lax, vjp
from tracea_jax.ops.common.typed import jvp as jvp_of
from tracea_jax.problem import AttentionProblem
from tracea_jax.problem.attention import Alibi

OPTIONAL = (
    "bias",
    "mask",
    "q_lengths",
    "kv_lengths",
    "q_segments",
    "kv_segments",
    "sinks",
    "alibi_slopes",
)
OF_HEADS = ("sinks", "alibi_slopes")  # (heads,), and no batch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The computation of the primitives, which is their parameter.

    Attributes:
      scale: what the scores are multiplied with.
      is_causal: whether query i sees keys j <= i only.
      window: (left, right): it sees keys i - left <= j <= i + right only; or None.
      aligned_at_end: whether positions count from the end: the last query stands at the
        last key, of those that the example has.
      mask_block: (queries, keys) that one entry of the mask stands for; None for one
        score.
      soft_cap: what bounds the scores, or None.
      alibi: what ``alibi_slopes`` make of positions, as in ``AttentionProblem``.
      precision: of both products, as ``jax.default_matmul_precision`` names it; None
        for JAX's default.
      optional: which of ``OPTIONAL`` follow q, k and v, in that order.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int, int] | None = None
    aligned_at_end: bool = False
    mask_block: tuple[int, int] | None = None
    soft_cap: float | None = None
    alibi: Alibi | None = None
    precision: str | None = None
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the operands that all primitives begin with."""
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

    It is ``jax.nn.dot_product_attention`` wherever that has the arguments, so XLA runs
    what it runs without us.
    """
    x = spec.named(operands)
    if is_written_out(spec, x):
        o, residual = supported(functools.partial(_written_out, spec), x)
        return [o] if lse is None else [o, residual.astype(lse)]
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


def is_written_out(spec: Spec, x: dict[str, Any]) -> bool:
    """Returns whether JAX's own function cannot compute it, whatever the mask."""
    other_values = x["v"].shape[3] != x["k"].shape[3]
    return spec.soft_cap is not None or x["sinks"] is not None or other_values


def _attend(spec: Spec, x: dict[str, Any], return_residual: bool) -> Any:
    call = functools.partial(_dot_product_attention, spec, return_residual)
    return supported(call, x)


def supported(call: Callable[..., Any], x: dict[str, Any]) -> Any:
    """The call's result, on platforms without the products it asks for too."""
    if x["q"].dtype != jnp.float16:
        return call(x)
    # XLA has no float16 products with float32 sums on CPUs, which jax.nn asks for.
    on_cpu = functools.partial(_in_float32, call)
    return lax.platform_dependent(x, cpu=on_cpu, default=call)


def _in_float32(call: Callable[..., Any], x: dict[str, Any]) -> Any:
    def widened(a: jax.Array) -> jax.Array:
        return a.astype(jnp.float32) if a.dtype == jnp.float16 else a

    def narrowed(a: jax.Array, like: Any) -> jax.Array:
        return a.astype(like.dtype)

    found = call(jax.tree.map(widened, x))
    return jax.tree.map(narrowed, found, eval_shape(call, x))


def _written_out(spec: Spec, x: dict[str, Any]) -> Any:
    with matmul_precision(spec.precision):
        return definition.attend(spec, x)


def _dot_product_attention(spec: Spec, return_residual: bool, x: dict[str, Any]) -> Any:
    at_start = not spec.aligned_at_end  # else the mask has the rules on positions
    with matmul_precision(spec.precision):
        return jax.nn.dot_product_attention(
            x["q"],
            x["k"],
            x["v"],
            definition.bias(spec, x),
            definition.allowed(spec, x),
            scale=spec.scale,
            is_causal=spec.is_causal and at_start,
            query_seq_lengths=x["q_lengths"],
            key_value_seq_lengths=x["kv_lengths"],
            local_window_size=spec.window if at_start else None,
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


def differentiated(*, bias_gradient: bool, sinks_gradient: bool) -> tuple[str, ...]:
    """The operands that have tangents and gradients, in this order."""
    bias = ("bias",) if bias_gradient else ()
    return ("q", "k", "v", *bias, *(("sinks",) if sinks_gradient else ()))


def tangent_reference(
    *operands: Any,
    spec: Spec,
    bias_gradient: bool = False,
    sinks_gradient: bool = False,
    **_: Any,
) -> list[Any]:
    """[tangent of o] from q, k, v, optional..., o, lse, tangents."""
    primals, (_, _, *tangents) = spec.split(operands)
    names = differentiated(bias_gradient=bias_gradient, sinks_gradient=sinks_gradient)
    function, active = _of_active(primals, names, spec)
    return jvp_of(function, active, tangents)[1]


def backward_reference(
    *operands: Any,
    spec: Spec,
    bias_gradient: bool = False,
    sinks_gradient: bool = False,
    **_: Any,
) -> list[Any]:
    """Gradients of q, k, v (, bias) (, sinks), from these and the rest of the operands:
    optional..., o, lse, cotangent."""
    primals, (_, _, do) = spec.split(operands)
    names = differentiated(bias_gradient=bias_gradient, sinks_gradient=sinks_gradient)
    function, active = _of_active(primals, names, spec)
    with linearize_hook(None):  # the reference is ours, not a user's function
        return list(vjp(function, *active)[1]([do]))


def _of_active(
    primals: list[Any], names: Sequence[str], spec: Spec
) -> tuple[Callable[..., list[Any]], list[Any]]:
    """The reference as a function of some operands, and their values."""
    places = [spec.names.index(name) for name in names]

    def function(*active: Any) -> list[Any]:
        full = list(primals)
        for place, value in zip(places, active, strict=True):
            full[place] = value
        return reference(*full, spec=spec)

    return function, [primals[place] for place in places]


def problem_of(
    avals: Sequence[Aval],
    *,
    spec: Spec,
    lse: Any = None,
    direction: Any = "forward",
    bias_gradient: bool = False,
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
        mask_block=spec.mask_block,
        segments=x["q_segments"] is not None,
        soft_cap=spec.soft_cap,
        sinks=x["sinks"] is not None,
        value_dim=x["v"].shape[3],
        aligned_at_end=spec.aligned_at_end,
        alibi=spec.alibi,
        bias_gradient=bias_gradient and direction == "backward",
    )
