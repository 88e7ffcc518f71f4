"""How paged attention is split over devices: sequences, and heads with their pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracea_jax.ops.common.sharding import Rule
from tracea_jax.ops.common.typed import Aval


def rule(avals: Sequence[Aval], **_: Any) -> Rule:
    """The rule of the primitive of paged_attention."""
    q, k_pages, v_pages, lengths, indices = avals
    kv_heads, pages, page_size, head_dim = k_pages.shape
    sizes = {
        "b": q.shape[0],
        "h": kv_heads,
        "g": q.shape[1] // kv_heads,
        "p": pages,
        "s": page_size,
        "d": head_dim,
        "i": indices.shape[1],
    }

    def of(*names: str) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f for f in name if sizes[f] > 1) for name in names)

    del v_pages, lengths
    of_pages = of("h", "p", "s", "d")
    return Rule(
        operands=(of("b", "hg", "d"), of_pages, of_pages, of("b"), of("b", "i")),
        results=(of("b", "hg", "d"),),
        sizes=sizes,
        whole={
            "p": "every sequence may use any page",
            "s": "a page is read as a whole",
            "d": "head_dim is summed over by every score",
            "i": "a sequence's pages are read by one device",
        },
    )
