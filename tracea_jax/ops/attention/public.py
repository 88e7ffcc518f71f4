"""attention: jax.nn.dot_product_attention on the best implementation there is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import (
    Any,
    Literal,
    SupportsIndex,
    TypedDict,
    Unpack,
    cast,
    overload,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from tracea_jax import variants
from tracea_jax.masks import Mask
from tracea_jax.mistakes import flag, shown, whole
from tracea_jax.ops.attention import options
from tracea_jax.ops.attention.primitives import bind
from tracea_jax.ops.attention.reference import (
    OPTIONAL,
    Spec,
    matmul_precision,
    reference,
)
from tracea_jax.ops.attention.ring.attend import attend
from tracea_jax.ops.attention.ring.plan import Order
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.precision import canonical_precision, precision_name
from tracea_jax.ops.common.promotion import preferred_dtype
from tracea_jax.ops.common.shapes import as_array
from tracea_jax.problem.attention import Alibi
from tracea_jax.typing import Implementation

AxisName = Hashable | tuple[Hashable, ...]


class Keywords(TypedDict, total=False):
    """Those of ``attention`` that do not decide what it returns."""

    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: SupportsIndex | tuple[int, int] | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    alibi_slopes: ArrayLike | None
    alibi: Alibi
    precision: PrecisionLike
    preferred_element_type: DTypeLike | None
    axis_name: AxisName | None
    sequence_order: Order
    implementation: Implementation | None
    config: Any


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: Literal[False] = False,
    **how: Unpack[Keywords],
) -> jax.Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: Literal[True],
    **how: Unpack[Keywords],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    return_residual: bool,
    **how: Unpack[Keywords],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: SupportsIndex | tuple[int, int] | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    alibi: Alibi = "distance",
    return_residual: bool = False,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    sequence_order: Order = "contiguous",
    implementation: Implementation | None = None,
    config: Any = None,
) -> Any:
    """softmax(scale * query @ key' + bias, where allowed) @ value, for each head.

    Arguments and results are those of ``jax.nn.dot_product_attention``, and some more.
    Sizes: B examples, T queries, S keys, N heads, K key/value heads (N a multiple of K;
    head n reads n // (N / K)), H the dimension of a head, V that of its values. Scores
    and softmax are float32.

    Args:
      query: (B, T, N, H), or (T, N, H) without a batch.
      key: (B, S, K, H) or (S, K, H), of query's dtype.
      value: (B, S, K, V) or (S, K, V), of query's dtype.
      bias: added to the scaled scores; of rank 4 (or less: leading dimensions are 1),
        broadcast to (B, N, T, S). Differentiable.
      mask: boolean, like bias; False forbids a key to a query. Or one of
        ``tracea.masks``, such as ``masks.causal() & masks.segments(ids)``, which
        kernels need not read for every score.
      scale: 1 / sqrt(H) by default.
      is_causal: whether query i sees keys j <= i only, also if T != S.
      query_seq_lengths: int32 (B,); the output of later queries is zero.
      key_value_seq_lengths: int32 (B,); later keys are forbidden.
      local_window_size: (left, right): query i sees keys i - left <= j <= i + right
        only; one number stands for both.
      query_segment_ids: integers (B, T), or (T,) for all examples: a query sees only
        the keys with its own number, as where several documents are packed into one
        sequence. Numbers need no order, and none stands for padding.
      key_value_segment_ids: (B, S) or (S,); those of the queries if T == S.
      logits_soft_cap: a positive number c: the scaled scores s, bias included, become
        c * tanh(s / c) before the masks.
      sinks: (N,), a further logit for the softmax of each head, whose weight multiplies
        no value. Differentiable.
      alibi_slopes: (N,), which make a bias of the distance of query i and key j without
        reading one: ``-slope |i - j|``, as ALiBi's. The bias and they add up. Positions
        count from where those of ``is_causal`` do. Differentiable, by XLA.
      alibi: "distance" for that, "linear" for slope (j - i), which is the same where
        queries see no later keys.
      return_residual: whether to return (output, log-sum-exp of each query's scores);
        the second counts the sink too; it is (B, T, N) or (T, N) and has no derivative.
      precision: of both products, as in ``jax.lax.dot_general``; one for both operands.
        It changes nothing for 16-bit operands, whose products are exact in float32.
      preferred_element_type: None or query's dtype; the output has no other.
      axis_name: inside ``jax.shard_map``, the mesh axis, or axes, that the sequence is
        split over: query, key, value and ids are this device's part, and its queries
        see the keys of all devices. Keys and values go round from device to device
        (ring attention). Masks are rules and segments only, positions count over the
        whole sequence, and there are first derivatives in reverse mode only.
      sequence_order: with ``axis_name``, how the sequence is split: "contiguous", or
        "zigzag" as by ``ops.zigzag``. Causal work of devices is equal in both; parts
        that follow each other are first exchanged between devices.
      implementation: None for the best known, "xla", "tracea" (an implementation other
        than XLA's own or an error with every reason), or a variant's name; for
        derivatives likewise.
      config: explicit config, the variant's own type or a dict of its fields.

    Returns:
      The output, (B, T, N, V) or (T, N, V), of query's dtype.

    Raises:
      TypeError: on operands that are no arrays, or an argument of another type.
      ValueError: on shapes or dtypes that do not fit, an unknown implementation, or an
        implementation that cannot run the problem.

    A query without any allowed key gets the mean of all values from XLA and from
    "attention_cpu", or nearly zero if there are sinks; from "cudnn", only that the
    result is finite. "attention_cpu" takes
    float32, bfloat16 and float16, and derivatives if there is no bias; "cudnn" takes
    bfloat16 and float16 (see ``tracea doctor``). Other dtypes, symbolic shapes and a
    scale that is a traced value are left to XLA.
    """
    variants.check_implementation("attention", implementation)
    q, k, v = (
        _rank_4(name, x)
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    _check_shapes(q, k, v)
    _check_result_dtype(preferred_element_type, q.dtype)
    order = options.sequence_order(sequence_order, axis_name)
    sees = options.masking(
        mask,
        q,
        k,
        is_causal=flag("is_causal", is_causal),
        window=_window(local_window_size),
        q_lengths=_check_lengths("query_seq_lengths", query_seq_lengths, q),
        kv_lengths=_check_lengths("key_value_seq_lengths", key_value_seq_lengths, k),
        **options.segments(query_segment_ids, key_value_segment_ids, q, k),
    )
    block = sees["mask_block"] or (1, 1)
    extra = {
        **sees,
        "bias": _check_scores("bias", bias, q, k),
        "mask": _check_scores("mask", sees["mask"], q, k, block),
        "sinks": options.of_heads("sinks", sinks, q),
        "alibi_slopes": options.of_heads("alibi_slopes", alibi_slopes, q),
    }
    if axis_name is not None:
        options.check_ring(extra, q, k, mask, scale)
    spec = Spec(
        scale=_scale(scale, q, implementation),
        is_causal=sees["is_causal"],
        window=sees["window"],
        aligned_at_end=sees["aligned_at_end"],
        mask_block=sees["mask_block"],
        soft_cap=options.soft_cap(logits_soft_cap),
        alibi=options.alibi(alibi, extra["alibi_slopes"]),
        precision=_precision(precision),
        optional=tuple(name for name in OPTIONAL if extra[name] is not None),
    )
    operands = [q, k, v, *(extra[name] for name in spec.optional)]
    lse = q.dtype if flag("return_residual", return_residual) else None
    if axis_name is not None:
        ids: list[Any] = operands[3:]
        outs = attend(
            q,
            k,
            v,
            tuple(ids),
            axis=axis_name,
            order=order,
            spec=spec,
            lse=lse,
            implementation=implementation,
            config=lowering.hashable_config(config),
        )
    elif isinstance(spec.scale, jax.Array):  # traced: no parameter of a primitive
        outs = reference(*operands, spec=spec, lse=lse)
    else:
        outs = bind(
            *operands,
            spec=spec,
            lse=lse,
            implementation=implementation,
            config=lowering.hashable_config(config),
        )
    o = outs[0].reshape(*jnp.shape(query)[:-1], v.shape[3])
    if not return_residual:
        return o
    return o, outs[1].swapaxes(1, 2).reshape(o.shape[:-1])


def _rank_4(name: str, x: ArrayLike) -> jax.Array:
    x = as_array(name, x)
    return jnp.expand_dims(x, tuple(range(4 - x.ndim))) if x.ndim < 4 else x


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} must have shape (batch, length, heads, head_dim) or (length, "
                f"heads, head_dim); it has shape {x.shape}"
            )
        if x.dtype != q.dtype:
            raise ValueError(
                f"query, key and value must share a dtype; {name} is {x.dtype}, query "
                f"is {q.dtype}"
            )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"query must be floating point; it is {q.dtype}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"value must have key's shape {k.shape}, but for the last size; it has "
            f"{v.shape}"
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            "query and key must agree in batch and head_dim; their shapes are "
            f"{q.shape} and {k.shape}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"the number of query heads, {q.shape[2]}, must be a multiple of the "
            f"number of key/value heads, {k.shape[2]}"
        )


def _scale(scale: Any, q: jax.Array, implementation: str | None) -> Any:
    """The scale as a number, or as it is if it is traced."""
    if scale is None:
        return float(1.0 / np.sqrt(q.shape[-1]))
    try:
        return float(scale)
    except jax.errors.ConcretizationTypeError:
        if implementation not in (None, "xla"):
            raise ValueError(
                f"{implementation=} needs a scale that is known; it is traced"
            ) from None
        return scale
    except (TypeError, ValueError) as e:
        raise ValueError(f"scale must be a number, not {shown(scale)}") from e


def _check_result_dtype(preferred: Any, dtype: Any) -> None:
    wanted = preferred_dtype(preferred)
    if wanted not in (None, dtype):
        raise ValueError(
            f"preferred_element_type={wanted} is not possible: the "
            f"output has the operands' dtype, {dtype}; cast it, or the operands"
        )


def _check_scores(
    name: str,
    x: ArrayLike | None,
    q: jax.Array,
    k: jax.Array,
    block: tuple[int, int] = (1, 1),
) -> jax.Array | None:
    """Bias or mask in rank 4, with an entry for each block of scores."""
    if x is None:
        return None
    x = _rank_4(name, x)
    if name == "mask" and x.dtype != bool:
        raise ValueError(
            f"mask must be boolean; it is {x.dtype} (what is added to the scores is "
            "the bias)"
        )
    if name == "bias" and jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ValueError(f"bias must be real; it is {x.dtype}")
    of_q, of_k = block
    whole = (q.shape[0], q.shape[2], -(-q.shape[1] // of_q), -(-k.shape[1] // of_k))
    fits = x.ndim == 4 and all(
        own == 1 or own == n for own, n in zip(x.shape, whole, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} must broadcast to (batch, heads, q_len, kv_len) = {whole}; it has "
            f"shape {x.shape}"
        )
    return x


def _check_lengths(name: str, x: ArrayLike | None, of: jax.Array) -> jax.Array | None:
    if x is None:
        return None
    x = as_array(name, x)
    if x.shape != of.shape[:1] or x.dtype != np.int32:
        raise ValueError(
            f"{name} must be int32 of shape {of.shape[:1]}, one length an example; it "
            f"is {x.dtype} of shape {x.shape}"
        )
    return x


def _window(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    one = (size, size)
    sides = tuple(cast("Sequence[Any]", size) if isinstance(size, Sequence) else one)
    if len(sides) != 2:
        raise ValueError(f"local_window_size={size} must be a number or (left, right)")
    left, right = (whole("local_window_size", side) for side in sides)
    return left, right


def _precision(precision: Any) -> str | None:
    """The name under which the reference's products get it; None for the default."""
    canonical = canonical_precision(precision)
    if canonical is None:
        return None
    name = precision_name(canonical)
    try:
        with matmul_precision(name):
            return name
    except ValueError as e:
        raise ValueError(
            f"{precision=} is not possible: attention takes one level or named "
            "algorithm for all operands of both products"
        ) from e
