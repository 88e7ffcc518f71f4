"""Arguments of ``attention`` that ``jax.nn.dot_product_attention`` has not, checked.

Among them are masks that are no arrays (``masks``). Caller: ``public``. What they mean
is in ``definition``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import core

from tracea_jax.masks import Mask
from tracea_jax.mistakes import shown
from tracea_jax.ops.attention.reference import OPTIONAL
from tracea_jax.ops.attention.ring.plan import ORDERS, Order
from tracea_jax.ops.common.shapes import as_array
from tracea_jax.ops.common.typed import finfo
from tracea_jax.problem.attention import Alibi

ALIBI: tuple[Alibi, ...] = ("distance", "linear")


def masking(mask: Any, q: jax.Array, k: jax.Array, **given: Any) -> dict[str, Any]:
    """All that says which keys a query sees, by the names that ``Spec`` has for it.

    Args:
      mask: an array, a ``masks.Mask`` or None.
      q, k: in rank 4.
      **given: the keyword arguments, checked, by the same names.
    """
    if not isinstance(mask, Mask):
        return {"mask": mask, "mask_block": None, "aligned_at_end": False, **given}
    has_rules = given["is_causal"] or given["window"] is not None

    def some(*names: str) -> tuple[Any, ...]:
        return tuple(given[n] for n in names if given[n] is not None)

    ids = some("q_segments", "kv_segments")
    keywords = Mask(
        is_causal=given["is_causal"],
        window=given["window"],
        from_end=False if has_rules else None,
        segments=((ids[0], ids[1]),) if ids else (),
        q_lengths=some("q_lengths"),
        kv_lengths=some("kv_lengths"),
    )
    return (mask & keywords).arguments(q.shape[0], q.shape[1], k.shape[1])


def segments(
    query_ids: Any, key_value_ids: Any, q: jax.Array, k: jax.Array
) -> dict[str, jax.Array | None]:
    """Segment ids of queries and keys, int32 (batch, length), or None for both."""
    if query_ids is None:
        if key_value_ids is not None:
            raise ValueError("key_value_segment_ids needs query_segment_ids")
        return {"q_segments": None, "kv_segments": None}
    if key_value_ids is None:
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                f"query_segment_ids needs key_value_segment_ids: there are {q.shape[1]}"
                f" queries and {k.shape[1]} keys"
            )
        key_value_ids = query_ids
    return {
        "q_segments": _ids("query_segment_ids", query_ids, q),
        "kv_segments": _ids("key_value_segment_ids", key_value_ids, k),
    }


def _ids(name: str, ids: Any, of: jax.Array) -> jax.Array:
    ids = as_array(name, ids)
    batch, length = of.shape[:2]
    if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.dtype.itemsize > 4:
        raise ValueError(f"{name} must be integers of up to 32 bits, not {ids.dtype}")
    if ids.shape not in ((length,), (1, length), (batch, length)):
        raise ValueError(
            f"{name} must have shape {(batch, length)} or {(length,)}, an id for each "
            f"position; it has shape {ids.shape}"
        )
    return jnp.broadcast_to(ids, (batch, length)).astype(jnp.int32)


def soft_cap(cap: Any) -> float | None:
    """The cap as a number."""
    if cap is None:
        return None
    try:
        found = float(cap)
    except (TypeError, ValueError) as e:  # a traced value is a TypeError too
        raise ValueError(
            f"logits_soft_cap must be a number that is known, not {shown(cap)}"
        ) from e
    limits = finfo(jnp.float32)  # of the scores
    if not float(limits.tiny) <= found <= float(limits.max):
        raise ValueError(
            "logits_soft_cap must be positive and finite, also as float32, not "
            f"{shown(cap)}"
        )
    return found


def of_heads(name: str, x: Any, q: jax.Array) -> jax.Array | None:
    """A number for each head, float32."""
    if x is None:
        return None
    x = as_array(name, x)
    if x.shape != q.shape[2:3] or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{name} must be floating point of shape {q.shape[2:3]}, a number for each "
            f"head; it is {x.dtype} of shape {x.shape}"
        )
    return x.astype(jnp.float32)


def alibi(form: Any, slopes: jax.Array | None) -> Alibi | None:
    """The form of ALiBi, checked; None without slopes."""
    if not isinstance(form, str) or form not in ALIBI:
        raise ValueError(f"alibi={shown(form)} must be one of {', '.join(ALIBI)}")
    return None if slopes is None else form


def sequence_order(order: Any, axis_name: Any) -> Order:
    """The order of a sequence that is split, checked."""
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(
            f"sequence_order={shown(order)} must be one of {', '.join(ORDERS)}"
        )
    if axis_name is None and order != "contiguous":
        raise ValueError(f"sequence_order={order!r} needs axis_name")
    return order


_OF_RINGS = ("q_segments", "kv_segments")  # which follow q, k and v round
_ARGUMENTS = {
    "q_lengths": "query_seq_lengths",
    "kv_lengths": "key_value_seq_lengths",
}


def check_ring(
    given: dict[str, Any], q: jax.Array, k: jax.Array, mask: Any, scale: Any
) -> None:
    """Refuses arguments that ring attention does not take.

    Args:
      given: optional operands and rules, by the names of ``Spec``.
      q, k: in rank 4.
      mask, scale: the arguments.

    Raises:
      ValueError: naming them, and what to do.
    """
    refused = [
        _ARGUMENTS.get(name, name)
        for name in OPTIONAL
        if name not in _OF_RINGS and given[name] is not None
    ]
    if isinstance(scale, core.Tracer):
        refused.append("a scale that is traced")
    from_end = isinstance(mask, Mask) and mask.from_end
    if from_end and q.shape[1] != k.shape[1]:
        refused.append("positions from the end of more keys than queries")
    if refused:
        raise ValueError(
            f"attention over axis_name= does not take {', '.join(refused)}: masks are "
            "is_causal, local_window_size and segment ids there. Gather keys and "
            "values with jax.lax.all_gather, and call attention without axis_name"
        )
