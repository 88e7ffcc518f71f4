"""Problems of paged attention from plain values, for the graph and the command line."""

from __future__ import annotations

from jax.typing import DTypeLike

from tracea_jax.catalogue import Argument
from tracea_jax.ops.common import arguments
from tracea_jax.ops.common.building import array, sizes
from tracea_jax.problem import PagedAttentionProblem


def build(
    batch: int,
    pages_per_sequence: int,
    page_size: int,
    heads: int,
    head_dim: int,
    *,
    dtype: DTypeLike = "float32",
    kv_heads: int | None = None,
    pages: int | None = None,
) -> PagedAttentionProblem:
    """softmax(q k' / sqrt(head_dim)) v for each head, keys and values in pages.

    Args:
      batch, heads, head_dim: q is (batch, heads, head_dim).
      pages_per_sequence: page_indices is (batch, pages_per_sequence).
      page_size: keys of a page.
      dtype: of the operands and the result.
      kv_heads: if fewer than heads.
      pages: in all; by default as many as all sequences have.
    """
    b, n, size, h, d = sizes(
        batch=batch,
        pages_per_sequence=pages_per_sequence,
        page_size=page_size,
        heads=heads,
        head_dim=head_dim,
    )
    (keys,) = sizes(kv_heads=h if kv_heads is None else kv_heads)
    (count,) = sizes(pages=b * n if pages is None else pages)
    if h % keys:
        raise ValueError(f"{heads=} must be a multiple of {kv_heads=}")
    return PagedAttentionProblem(
        batch=b,
        heads=h,
        kv_heads=keys,
        head_dim=d,
        pages=count,
        page_size=size,
        pages_per_sequence=n,
        dtype=array(dtype, ()).dtype.name,
        scale=d**-0.5,
    )


ARGUMENTS = (
    arguments.size("batch", "number of sequences"),
    arguments.size("pages_per_sequence", "pages that a sequence may have"),
    arguments.size("page_size", "keys and values of a page"),
    arguments.size("heads", "heads of the queries"),
    arguments.size("head_dim", "entries of a head"),
    Argument("--kv-heads", {"type": arguments.positive, "help": "if fewer than HEADS"}),
    Argument(
        "--pages", {"type": arguments.positive, "help": "in all, if sequences share"}
    ),
)
