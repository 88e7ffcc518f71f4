"""paged_attention: one query a sequence against keys and values that lie in pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tracea_jax import variants
from tracea_jax.mistakes import shown
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.shapes import as_array
from tracea_jax.ops.paged_attention.primitive import bind
from tracea_jax.typing import Implementation


def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    lengths: ArrayLike,
    page_indices: ArrayLike,
    *,
    scale: float = 1.0,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """softmax(scale * q @ keys') @ values, for each head of each sequence.

    The arguments, their layouts and the scale of 1 are those of
    ``jax.experimental.pallas.ops.tpu.paged_attention``: pass a scale, or scaled
    queries. Sizes: B sequences, N heads, K key/value heads (N a multiple of K; head n
    reads n // (N / K)), H the dimension of a head.

    Args:
      q: (B, N, H), the query of each sequence.
      k_pages, v_pages: (K, pages, page_size, H), of q's dtype.
      lengths: int32 (B,), keys of each sequence; a sequence without keys gets zeros.
      page_indices: int32 (B, pages of a sequence): page i of a sequence holds its keys
        from i * page_size on. Each is one of 0 .. pages - 1, except that entries behind
        the length are not looked at.
      scale: what the scores are multiplied with.
      implementation: None for the best known, "xla", "tracea" (an implementation other
        than XLA's own or an error with every reason), or a variant's name.
      config: explicit config, the variant's own type or a dict of its fields.

    Returns:
      (B, N, H) of q's dtype. What pages hold behind a sequence's length has no
      influence on it.

    Raises:
      TypeError: on operands that are no arrays.
      ValueError: on shapes or dtypes that do not fit, an unknown implementation, or an
        implementation that cannot run the problem.

    "paged_attention_sm90" takes bfloat16 and float16, heads of up to 256 numbers and
    pages of 8, 16, 32, 64, 128 or a multiple of 128 keys; other problems are left to
    XLA, which gathers the pages first.
    """
    variants.check_implementation("paged_attention", implementation)
    given = dict(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        lengths=lengths,
        page_indices=page_indices,
    )
    arrays = [as_array(name, x) for name, x in given.items()]
    _check(*arrays)
    (o,) = bind(
        *arrays,
        scale=_scale(scale),
        implementation=implementation,
        config=lowering.hashable_config(config),
    )
    return o


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, indices: jax.Array
) -> None:
    if q.ndim != 3 or k.ndim != 4:
        raise ValueError(
            "q must have shape (batch, heads, head_dim) and k_pages (kv_heads, pages, "
            f"page_size, head_dim); their shapes are {q.shape} and {k.shape}"
        )
    if v.shape != k.shape:
        raise ValueError(
            f"v_pages must have k_pages' shape {k.shape}; it has {v.shape}"
        )
    if not (q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)):
        raise ValueError(
            "q, k_pages and v_pages must share a floating dtype; they are "
            f"{q.dtype}, {k.dtype} and {v.dtype}"
        )
    if q.shape[2] != k.shape[3] or k.shape[0] == 0 or q.shape[1] % k.shape[0]:
        raise ValueError(
            "q must have k_pages' head_dim, and a multiple of its heads; their shapes "
            f"are {q.shape} and {k.shape}"
        )
    batch = q.shape[0]
    if lengths.shape != (batch,) or lengths.dtype != np.int32:
        raise ValueError(
            f"lengths must be int32 of shape {(batch,)}; it is {lengths.dtype} of "
            f"shape {lengths.shape}"
        )
    if (
        indices.ndim != 2
        or indices.shape[0] != batch
        or indices.dtype != np.int32
        or indices.shape[1] == 0
    ):
        raise ValueError(
            f"page_indices must be int32 of shape ({batch}, pages of a sequence); it "
            f"is {indices.dtype} of shape {indices.shape}"
        )


def _scale(scale: Any) -> float:
    try:
        return float(scale)
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"scale must be a number that is known while tracing, not {shown(scale)}"
        ) from e
