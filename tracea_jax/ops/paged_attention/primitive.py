"""The primitive of paged attention, and what JAX's transformations make of it.

    q, k_pages, v_pages, lengths, page_indices -> o

Derivatives are those of the reference. A mapped axis is folded into the batch where the
pages are shared, as by sequences of one cache; mapped pages are left to the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.ops.attention import reference as attention
from tracea_jax.ops.attention.reference import Spec
from tracea_jax.ops.common import jax_rules, lowering
from tracea_jax.ops.common.shapes import flat, move_mapped
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Batched,
    Differentiated,
    Dims,
    Tangents,
    ad,
    arange,
    jvp,
    zeros,
)
from tracea_jax.ops.paged_attention.sharding import rule
from tracea_jax.problem import PagedAttentionProblem

_PAGES = (1, 2)  # numbers of the operands that are pages


def reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    page_indices: jax.Array,
    *,
    scale: float,
    **_: Any,
) -> list[jax.Array]:
    """[o]: attention to the pages of each sequence, gathered into one piece.

    What lies behind a sequence's length has no influence, not even if it is NaN.
    """
    batch, heads, head_dim = q.shape
    keys = _gathered(k_pages, page_indices)
    values = _gathered(v_pages, page_indices)
    is_inside = (arange(keys.shape[1])[None] < lengths[:, None])[..., None, None]
    values = jnp.where(is_inside, values, zeros((), values.dtype))
    spec = Spec(scale=scale, optional=("kv_lengths",))
    (o,) = attention.reference(q[:, None], keys, values, lengths, spec=spec)
    return [o.reshape(batch, heads, head_dim)]


def _gathered(pages: jax.Array, indices: jax.Array) -> jax.Array:
    """(kv_heads, pages, page_size, head_dim) to (batch, length, kv_heads, head_dim)."""
    kv_heads, _, page_size, head_dim = pages.shape
    of_sequences = pages.at[:, indices].get(mode="clip")
    order = jnp.moveaxis(of_sequences, 0, 3)
    batch, count = indices.shape
    return order.reshape(batch, count * page_size, kv_heads, head_dim)


def problem_of(
    avals: Sequence[Aval], *, scale: float, **_: Any
) -> PagedAttentionProblem:
    """The problem that the primitive's parameters and static shapes describe."""
    (q, k_pages), page_indices = avals[:2], avals[4]
    kv_heads, pages, page_size, head_dim = k_pages.shape
    return PagedAttentionProblem(
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        pages=pages,
        page_size=page_size,
        pages_per_sequence=page_indices.shape[1],
        dtype=q.dtype.name,
        scale=scale,
    )


paged_attention_p = lowering.primitive("tracea_paged_attention", reference)
PLANNED = lowering.register(
    "paged_attention", paged_attention_p, problem_of, reference, sharding=rule
)


def bind(*operands: Any, **params: Any) -> list[Any]:
    """The primitive's results."""
    return lowering.bound(paged_attention_p, reference, operands, params)


def _jvp(primals: Arrays, tangents: Tangents, **params: Any) -> Differentiated:
    """The primitive's own value, the derivative of its reference."""
    outs = bind(*primals, **params)
    active = [ad.instantiate_zeros(t) for t in tangents[:3]]

    def of_floats(*floats: Any) -> list[jax.Array]:
        return reference(*floats, *primals[3:], **params)

    _, douts = jvp(of_floats, list(primals[:3]), active)
    return outs, douts


def _batch(operands: Arrays, dims: Dims, **params: Any) -> Batched:
    if any(dims[i] is not None for i in _PAGES):
        f = functools.partial(reference, **params)
        return jax.vmap(f, in_axes=tuple(dims))(*operands), [0]
    moved, mapped, size = move_mapped(operands, dims)
    shared = [i in _PAGES for i in range(len(moved))]
    spread = [
        x if is_mapped or is_shared else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_mapped, is_shared in zip(moved, mapped, shared, strict=True)
    ]
    folded = [
        x if is_shared else flat(x, x.ndim - 2)
        for x, is_shared in zip(spread, shared, strict=True)
    ]
    (o,) = bind(*folded, **params)
    return [o.reshape(*spread[0].shape[:2], *o.shape[1:])], [0]


jax_rules.register(
    "paged_attention", paged_attention_p, reference, jvp=_jvp, batch=_batch
)
