"""The value behind ``tracea.masks``: which keys each query sees, as rules and arrays.

``Mask`` is a conjunction. ``Mask.arguments`` says it in the words of the primitive of
``ops.attention``: one rule of each kind as it is, all else as one boolean array.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.ir.tile_graph import TileGraph
from tracea_jax.masks import checks, tiles
from tracea_jax.page import Page, Printable


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("arrays", "segments", "q_lengths", "kv_lengths"),
    meta_fields=("is_causal", "window", "from_end", "blocks"),
)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Mask(Printable):
    """Which keys each query sees: what all of its parts allow. See ``tracea.masks``.

    Attributes:
      is_causal, window: rules on positions, as in ``masks.causal`` and ``window``.
      from_end: whether they count from the end; None if there are none.
      arrays: boolean, of up to 4 dimensions.
      blocks: for each of them the (queries, keys) that an entry stands for, or None for
        one score.
      segments: pairs of ids of queries and of keys.
      q_lengths, kv_lengths: of the examples; the least counts.
    """

    is_causal: bool = False
    window: tuple[int, int] | None = None
    from_end: bool | None = None
    arrays: tuple[Any, ...] = ()
    blocks: tuple[tuple[int, int] | None, ...] = ()
    segments: tuple[tuple[Any, Any], ...] = ()
    q_lengths: tuple[Any, ...] = ()
    kv_lengths: tuple[Any, ...] = ()

    def __and__(self, other: Mask) -> Mask:
        """The conjunction of both masks.

        Raises:
          ValueError: if both have rules on positions that count from different ends.
        """
        if not isinstance(other, Mask):
            return NotImplemented
        ends = {m.from_end for m in (self, other) if m.from_end is not None}
        if len(ends) > 1:
            raise ValueError(
                "positions of one mask count from the start, those of the other from "
                "the end; give both the same from_end"
            )
        windows = [m.window for m in (self, other) if m.window is not None]
        lefts, rights = [w[0] for w in windows], [w[1] for w in windows]
        return Mask(
            is_causal=self.is_causal or other.is_causal,
            window=(min(lefts), min(rights)) if windows else None,
            from_end=next(iter(ends), None),
            arrays=self.arrays + other.arrays,
            blocks=self.blocks + other.blocks,
            segments=self.segments + other.segments,
            q_lengths=self.q_lengths + other.q_lengths,
            kv_lengths=self.kv_lengths + other.kv_lengths,
        )

    def arguments(self, batch: int, q_len: int, kv_len: int) -> dict[str, Any]:
        """Arguments of the primitive, by their names in ``Spec``.

        Raises:
          ValueError: if an array does not fit these sizes.
        """
        first, *others = self.segments or ((None, None),)
        ids = [_ids(x, batch, n) for x, n in zip(first, (q_len, kv_len), strict=True)]
        dense = [_same(*pair) for pair in others]
        block = self.blocks[0] if len(self.blocks) == 1 and not dense else None
        if block is None:
            dense += [
                _per_score(checks.rank_4(x), own, q_len, kv_len)
                for x, own in zip(self.arrays, self.blocks, strict=True)
            ]
        mask = functools.reduce(jnp.logical_and, dense) if dense else None
        sees_all, from_end = self._at_end(q_len, kv_len)
        return {
            "is_causal": self.is_causal and not sees_all,
            "window": self.window,
            "aligned_at_end": from_end,
            "mask": checks.rank_4(jnp.asarray(self.arrays[0])) if block else mask,
            "mask_block": block,
            "q_segments": ids[0],
            "kv_segments": ids[1],
            "q_lengths": _least(self.q_lengths, batch),
            "kv_lengths": _least(self.kv_lengths, batch),
        }

    def _at_end(self, q_len: int, kv_len: int) -> tuple[bool, bool]:
        """Returns whether causal queries see all keys, and whether ends matter.

        So a step of a decoder is the same problem as without positions.
        """
        if not self.from_end or (
            q_len == kv_len and not self.q_lengths and not self.kv_lengths
        ):
            return False, False
        sees_all = q_len == 1 and not self.q_lengths
        return sees_all, not sees_all or self.window is not None

    def tile_graph(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        block: tuple[int, int] = (128, 128),
        example: int = 0,
        head: int = 0,
    ) -> TileGraph:
        """The tiles of one head's scores, and what the mask leaves of them.

        Args:
          q_len, kv_len: queries and keys; as many keys as queries by default.
          block: (queries, keys) of a tile.
          example, head: which one, where the arrays of the mask tell them apart.

        Raises:
          ValueError: if an array is not known yet, as inside of ``jax.jit``; if one is
            not of these sizes; if there is no such example or head.
        """
        kv_len = q_len if kv_len is None else kv_len
        return tiles.graph(self, q_len, kv_len, block, example, head)

    @property
    def page(self) -> Page:
        text = tiles.sentence(self)
        if not tiles.is_known(self):
            return Page((text,))
        lengths = tiles.shown_lengths(self)
        if (misfit := tiles.why_misfit(self, *lengths)) is not None:
            return Page((text, misfit))
        graph = self.tile_graph(*lengths, block=tiles.shown(self))
        return Page((text, *graph.page.parts))


def _ids(ids: Any, batch: int, length: int) -> Any:
    if ids is None:
        return None
    if ids.shape not in ((length,), (1, length), (batch, length)):
        raise ValueError(
            f"segment ids must have shape {(batch, length)} or {(length,)}, an id for "
            f"each position; they have shape {ids.shape}"
        )
    return jnp.broadcast_to(jnp.asarray(ids), (batch, length))


def _same(q_ids: Any, kv_ids: Any) -> Any:
    """A mask of rank 4 that says what a pair of ids says."""
    own, theirs = (x if x.ndim == 2 else x[None] for x in (q_ids, kv_ids))
    return own[:, None, :, None] == theirs[:, None, None, :]


def _per_score(x: Any, block: tuple[int, int] | None, q_len: int, kv_len: int) -> Any:
    if block is None:
        return x
    for axis, (of, length) in enumerate(zip(block, (q_len, kv_len), strict=True), 2):
        if x.shape[axis] != -(-length // of):
            raise ValueError(
                f"blocks of {block} need {-(-length // of)} entries for {length} "
                f"positions; there are {x.shape[axis]}"
            )
        x = jnp.take(x, jnp.arange(length) // of, axis=axis)
    return x


def _least(lengths: tuple[Any, ...], batch: int) -> Any:
    if not lengths:
        return None
    for x in lengths:
        if x.shape not in ((), (1,), (batch,)):
            raise ValueError(
                f"lengths must have shape {(batch,)}, one for each example; they have "
                f"shape {x.shape}"
            )
    return jnp.broadcast_to(functools.reduce(jnp.minimum, lengths), (batch,))
