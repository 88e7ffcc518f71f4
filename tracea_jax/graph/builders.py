"""Problems from plain values: what a call of an op with such arguments asks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax import ops
from tracea_jax.explain import explain
from tracea_jax.ops.common.precision import (
    canonical_precision,
    precision_from_name,
    precision_name,
)
from tracea_jax.problem import (
    AttentionProblem,
    Conv2dProblem,
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
)

Pair = tuple[int, int]


def matmul(
    m: int,
    n: int,
    k: int,
    *,
    dtype: Any = "float32",
    out: Any = None,
    batch: int = 1,
    layout: str = "nn",
    precision: Any = None,
    bias: bool = False,
    activation: str = "none",
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
    fields = _product(m, n, k, dtype, out, batch, layout, precision)
    return GemmProblem(**fields, epilogue=_epilogue(bias, activation, residual))


def gated_matmul(
    m: int,
    n: int,
    k: int,
    *,
    dtype: Any = "float32",
    out: Any = None,
    batch: int = 1,
    layout: str = "nn",
    precision: Any = None,
    activation: str = "silu",
) -> GatedMatmulProblem:
    """activation(a @ w_gate) * (a @ w_up); arguments as in ``matmul``."""
    fields = _product(m, n, k, dtype, out, batch, layout, precision)
    return GatedMatmulProblem(**fields, activation=_any(activation))


def conv2d(
    batch: int,
    height: int,
    width: int,
    in_channels: int,
    kernel_height: int,
    kernel_width: int,
    out_channels: int,
    *,
    dtype: Any = "float32",
    strides: int | Pair = (1, 1),
    padding: Any = "SAME",
    dilation: int | Pair = (1, 1),
    groups: int = 1,
    layout: str = "NHWC",
    bias: bool = False,
    activation: str = "none",
    residual: bool = False,
    direction: str = "forward",
) -> Conv2dProblem:
    """activation(conv(x, w) + bias + residual), or a gradient of the convolution.

    Args:
      batch, height, width, in_channels: of x.
      kernel_height, kernel_width, out_channels: of w, whose input channels are
        in_channels / groups.
      dtype: of the operands and the result.
      strides, padding, dilation, groups, layout: as in ``ops.conv2d``.
      bias, activation, residual: as in ``matmul``.
      direction: "forward", "input_grad" or "weight_grad".
    """
    _check_direction(direction, "forward", "input_grad", "weight_grad")
    sizes = _sizes(batch=batch, height=height, width=width, in_channels=in_channels)
    kernel = _sizes(kernel_height=kernel_height, kernel_width=kernel_width)
    (channels,) = _sizes(out_channels=out_channels)
    x, w = sizes, (*kernel, in_channels // groups, channels)
    if layout == "NCHW":
        x, w = (x[0], x[3], x[1], x[2]), (w[3], w[2], w[0], w[1])
    convolve = functools.partial(
        ops.conv2d,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        layout=layout,
    )
    epilogue = _epilogue(bias, activation, residual)
    if direction != "forward" and not epilogue.is_identity:
        raise ValueError("a gradient takes no bias, activation or residual")
    problem = _asked(convolve, dtype, x, w)
    return dataclasses.replace(problem, direction=direction, epilogue=epilogue)


def attention(
    batch: int,
    q_len: int,
    kv_len: int,
    heads: int,
    head_dim: int,
    *,
    dtype: Any = "float32",
    kv_heads: int | None = None,
    is_causal: bool = False,
    local_window_size: int | Pair | None = None,
    direction: str = "forward",
) -> AttentionProblem:
    """softmax(q k' / sqrt(head_dim)) v for each head, or its gradient.

    Args:
      batch, q_len, heads, head_dim: q is (batch, q_len, heads, head_dim).
      kv_len: k and v are (batch, kv_len, kv_heads, head_dim).
      dtype: of the operands and the result.
      kv_heads: if fewer than heads.
      is_causal, local_window_size: as in ``ops.attention``.
      direction: "forward" or "backward".
    """
    _check_direction(direction, "forward", "backward")
    q = _sizes(batch=batch, q_len=q_len, heads=heads, head_dim=head_dim)
    sizes = _sizes(kv_len=kv_len, kv_heads=heads if kv_heads is None else kv_heads)
    attend = functools.partial(
        ops.attention, is_causal=is_causal, local_window_size=local_window_size
    )
    kv = (batch, *sizes, head_dim)
    return dataclasses.replace(_asked(attend, dtype, q, kv, kv), direction=direction)


BUILDERS: dict[str, Callable[..., Any]] = {
    "matmul": matmul,
    "gated_matmul": gated_matmul,
    "conv2d": conv2d,
    "attention": attention,
}


def array(dtype: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """An abstract array.

    Raises:
      ValueError: on a dtype that JAX does not know, or has not enabled.
    """
    try:
        wanted = jnp.dtype(dtype)
    except TypeError as e:
        raise ValueError(f"dtype {dtype!r} is unknown to JAX") from e
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ValueError(f"{wanted} arrays need the variable JAX_ENABLE_X64=1")
    return jax.ShapeDtypeStruct(shape, wanted)


def _product(
    m: int,
    n: int,
    k: int,
    dtype: Any,
    out: Any,
    batch: int,
    layout: str,
    precision: Any,
) -> dict[str, Any]:
    """Fields that a product and a gated pair of them share."""
    batch, m, n, k = _sizes(batch=batch, m=m, n=n, k=k)
    if layout not in ("nn", "nt", "tn", "tt"):
        raise ValueError(f"{layout=} must be one of nn, nt, tn, tt")
    operand = array(dtype, ()).dtype.name
    return {
        "batch": batch,
        "m": m,
        "n": n,
        "k": k,
        "lhs": operand,
        "rhs": operand,
        "out": operand if out is None else array(out, ()).dtype.name,
        "layout": layout,
        "lhs_batched": batch > 1,
        "rhs_batched": batch > 1,
        "precision": _precision(precision),
    }


def _precision(precision: Any) -> str:
    if isinstance(precision, str):
        return precision_name(precision_from_name(precision))
    return precision_name(canonical_precision(precision))


def _epilogue(bias: bool, activation: str, residual: bool) -> Epilogue:
    return Epilogue(
        bias="row" if bias else "none",
        activation=_any(activation),
        residual=residual,
    )


def _any(name: str) -> Any:
    """A name that the problem checks itself."""
    return name


def _sizes(**sizes: int) -> tuple[int, ...]:
    for name, size in sizes.items():
        if not (isinstance(size, int) and size >= 1):
            raise ValueError(f"{name}={size!r} must be an integer of at least 1")
    return tuple(sizes.values())


def _check_direction(direction: str, *valid: str) -> None:
    if direction not in valid:
        raise ValueError(f"{direction=} must be one of {', '.join(valid)}")


def _asked(op: Callable[..., Any], dtype: Any, *shapes: tuple[int, ...]) -> Any:
    """The problem that a call of an op asks, as the op itself describes it."""
    (site,) = explain(op, ops=())(*(array(dtype, shape) for shape in shapes)).sites
    return site.problem
