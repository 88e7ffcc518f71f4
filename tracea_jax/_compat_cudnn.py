"""cuDNN's flash attention by primitives of private JAX; see also ``_compat``."""

from __future__ import annotations

import inspect
from typing import Any

import jax
from jax.extend import source_info_util

source_info_util.register_exclusion(__file__)

# Every argument of JAX's lowering rules that the functions below know about.
_KNOWN = frozenset(
    "ctx query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k "
    "page_table_v score_mod_args activation fwd_output grad_output scale seed "
    "dropout_rate variadic_args mask_type layout sliding_window_length is_training "
    "score_mod_name score_mod_jaxpr".split()
)


def unavailable() -> str | None:
    """Why cuDNN's flash attention cannot be lowered, or None.

    ``jax.nn.dot_product_attention`` has no public form that a lowering rule could use:
    its primitives are wrapped for automatic partitioning, which fails there. The
    unwrapped ones are private. A machine that only lowers need not have cuDNN.
    """
    try:
        from jax._src.cudnn import fused_attention_stablehlo as fused
    except ImportError as e:
        return f"this JAX has no fused attention: {e}"
    for name in ("_dot_product_attention_fwd", "_dot_product_attention_bwd"):
        rule = getattr(fused, f"{name}_cuda_lowering", None)
        if rule is None or not hasattr(fused, f"{name}_p"):
            return f"this JAX has no primitive {name}"
        if unknown := sorted(set(inspect.signature(rule).parameters) - _KNOWN):
            return (
                f"this JAX's {name} takes {', '.join(unknown)}, which is unknown here"
            )
    installed = getattr(fused, "cuda_versions", None)
    version = installed.cudnn_get_version() if installed else None
    if version is not None and (version < 90500 or version in (91000, 91001)):
        return f"cuDNN {version} is too old or broken; 9.5 is needed, and not 9.10.0"
    return None


def attention_forward(
    qkv: Any,
    bias: Any,
    lengths: tuple[Any, Any] | None,
    *,
    residual: bool,
    **mask: Any,
) -> list[Any]:
    """[o], or with ``residual`` [o, log-sum-exp (batch, heads, q_len) in float32].

    Args:
      qkv: (q, k, v), each (batch, length, heads, head_dim).
      bias: None, or (1 or batch, 1 or heads, q_len, kv_len) in the operands' dtype.
      lengths: None, or the numbers of queries and of keys, (batch,) int32 each.
      residual: whether the second result is wanted.
      **mask: scale; causal; window, the number of keys a query sees up to its own.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    operands, params = _operands(fused, qkv, bias, lengths, False, **mask)
    return fused._dot_product_attention_fwd_p.bind(
        *operands, **params, is_training=residual
    )


def attention_backward(
    qkv: Any,
    bias: Any,
    lengths: tuple[Any, Any] | None,
    o: Any,
    lse: Any,
    do: Any,
    *,
    dbias: bool,
    **mask: Any,
) -> list[Any]:
    """[dq, dk, dv], and with ``dbias`` the bias's gradient in its shape.

    Args:
      qkv, bias, lengths, **mask: as in ``attention_forward``.
      o, lse: its results.
      do: cotangent of o.
      dbias: whether the last result is wanted.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    operands, params = _operands(fused, qkv, bias, lengths, dbias, **mask)
    return fused._dot_product_attention_bwd_p.bind(*operands, lse, o, do, **params)


def _operands(
    fused: Any,
    qkv: Any,
    bias: Any,
    lengths: tuple[Any, Any] | None,
    dbias: bool,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[list[Any], dict[str, Any]]:
    """Operands and parameters that both directions share; absent operands are empty.

    After bias and lengths come offsets of packed sequences and page tables, which are
    never given here; jax 0.12 also takes a function that changes the scores.
    """
    empty = jax.numpy.zeros(0, qkv[0].dtype)
    kind = ("PADDING_" if lengths else "") + ("CAUSAL" if causal else "")
    kind = kind.removesuffix("_") or "NO_MASK"
    operands = [*qkv, empty if bias is None else bias, *(lengths or (empty, empty))]
    params = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, dbias),
        "mask_type": fused.MaskType[kind],
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
    rule = inspect.signature(fused._dot_product_attention_fwd_cuda_lowering)
    if "score_mod_name" in rule.parameters:
        params |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return [*operands, *[empty] * 4], params
