"""Attention of one query a sequence to keys and values that lie in pages."""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.problem.attention import AttentionProblem
from tracea_jax.problem.base import Problem
from tracea_jax.problem.epilogue import ITEMSIZE

_INDEX_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PagedAttentionProblem(Problem):
    """o = softmax(scale * q @ k') @ v, for each head of each sequence.

    Query head h reads key/value head h // (heads / kv_heads).

    Attributes:
      batch, heads, kv_heads, head_dim: q is (batch, heads, head_dim).
      pages, page_size: k_pages and v_pages are (kv_heads, pages, page_size, head_dim).
      pages_per_sequence: page_indices is (batch, pages_per_sequence).
      dtype: name of the operands' and the result's dtype.
      scale: what the scores are multiplied with.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    pages: int
    page_size: int
    pages_per_sequence: int
    dtype: str = "float32"
    scale: float = 1.0

    op = "paged_attention"
    extents = ("batch", "heads", "kv_heads", "pages", "pages_per_sequence")

    @property
    def gathered(self) -> AttentionProblem:
        """The same attention to caches that lie in one piece."""
        return AttentionProblem(
            batch=self.batch,
            q_len=1,
            kv_len=self.pages_per_sequence * self.page_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            scale=self.scale,
            kv_lengths=True,
        )

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return (self.dtype,)

    @property
    def flops(self) -> int:
        """Those of sequences that fill all their pages."""
        return self.gathered.flops

    @property
    def bytes(self) -> int:
        """Fewest bytes moved through memory, by sequences that fill all their pages."""
        table = self.batch * (self.pages_per_sequence + 1)
        return self.gathered.bytes + table * _INDEX_BYTES

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages of the keys, also of those that no sequence reads."""
        entries = self.kv_heads * self.pages * self.page_size * self.head_dim
        return entries * ITEMSIZE.get(self.dtype, 4)

    @classmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        typical = cls(
            batch=64,
            heads=32,
            kv_heads=8,
            head_dim=128,
            pages=4096,
            page_size=64,
            pages_per_sequence=64,
            dtype=dtype,
            scale=128**-0.5,
        )
        return {"": typical}

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PagedAttentionProblem:
        return cls(**{k: v for k, v in data.items() if k != "op"})

    def __str__(self) -> str:
        heads = str(self.heads)
        if self.kv_heads != self.heads:
            heads += f"/{self.kv_heads}"
        return (
            f"paged_attention {self.batch}x{self.pages_per_sequence}x{self.page_size} "
            f"of {self.pages} pages heads {heads} dim {self.head_dim} {self.dtype}"
        )
