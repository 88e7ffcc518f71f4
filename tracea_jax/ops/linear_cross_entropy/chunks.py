"""Log-sum-exp, label logits and their derivatives, a chunk of the vocabulary at a time.

With l = x @ w^T + bias of one chunk, every function here is a loop over the chunks that
keeps a few numbers a row between them:

    forward     m' = max(m, max(l)),  s' = s exp(m - m') + sum(exp(l - m'))
                and at the end lse = m + log(s)
    tangent     lse' = sum(exp(l - lse) l'),  label' = l'[label]
    backward    dl = ct_lse exp(l - lse) + ct_label onehot(label)
                dx = sum of dl @ w,  dw = dl^T @ x,  dbias = sum of dl over its rows

Chunks of columns, not of rows: the gradient of w, which is the large one, is written
once, and all rows stay together, however they are spread over devices. Where columns
may be spread too, there is one chunk of all: slices of them would be gathered.

Operands and parameters are those of ``primitive``, the only caller but for
``chunk_of``. Rules of JAX's transformations are not here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.promotion import promoted
from tracea_jax.ops.common.ranks import Ranks, as_ranks
from tracea_jax.ops.common.typed import (
    arange,
    checkpoint,
    full,
    lax,
    tree,
    zeros,
    zeros_like,
)
from tracea_jax.ops.matmul.primitive import FLIP, bind
from tracea_jax.problem import Epilogue

CHUNK_BYTES = 1 << 28  # of a chunk's logits in float32; fewer are not worth a loop
MOST_CHUNKS = 16  # each reads and writes the sum of dx once more
_ALIGNMENT = 128  # columns: what tiles of kernels divide


def chunk_of(rows: int, vocabulary: int) -> int | None:
    """Columns of a chunk; None where the logits are best computed at once."""
    size = 4 * rows * vocabulary
    count = min(-(-size // CHUNK_BYTES), MOST_CHUNKS)
    if count < 2:
        return None
    chunk = max(_ALIGNMENT, vocabulary // count // _ALIGNMENT * _ALIGNMENT)
    return chunk if chunk < vocabulary else None


def axis_of(layout: str) -> int:
    """The axis of w that runs over the vocabulary."""
    return 0 if layout == "nt" else 1


def why_at_once(rows: int, vocabulary: int) -> str:
    """Why logits that ``chunk_of`` has no chunk for are computed at once."""
    if 4 * rows * vocabulary > CHUNK_BYTES:
        return f"{vocabulary} columns are too few for chunks"
    few = f"{rows} x {vocabulary} logits fit in {CHUNK_BYTES >> 20} MiB"
    return f"{few}, too few for chunks to help"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Computation of logits from x (rows..., features) and w, and its chunks.

    Attributes:
      layout: "nt" for w (vocabulary, features), "nn" for (features, vocabulary).
      chunk: columns at a time; the last chunk has what is left.
      logits: dtype that the logits are rounded to.
      precision: as in ``jax.lax.dot_general``.
      implementation: of the products, as in ``ops.matmul``.
    """

    layout: str
    chunk: int
    logits: Any
    precision: Any
    implementation: str | None

    @property
    def axis(self) -> int:
        return axis_of(self.layout)

    def vocabulary(self, w: Any) -> int:
        return w.shape[self.axis]

    def at_once(self, w: Any) -> Head:
        """The same with all columns in one chunk."""
        return dataclasses.replace(self, chunk=self.vocabulary(w))

    def product(self, lhs: Any, rhs: Any, layout: str, out: Any, **others: Any) -> Any:
        """op(lhs) @ op(rhs) plus a bias or a residual, if there are any."""
        given = {name: x for name, x in others.items() if x is not None}
        outer = lhs.ndim - 1
        ranks = Ranks(rows=outer) if layout[0] == "n" else Ranks(contraction=outer)
        step = Epilogue(
            bias="row" if "bias" in given else "none", residual="residual" in given
        )
        (y,) = bind(
            lhs,
            rhs,
            *given.values(),
            layout=layout,
            out=out,
            precision=self.precision,
            epilogue=step,
            implementation=self.implementation,
            config=None,
            **as_ranks(ranks),
        )
        return y

    def logits_of(self, x: Any, w: Any, bias: Any = None) -> Any:
        """Rounded, and then as wide as statistics of them are."""
        y = self.product(x, w, self.layout, self.logits, bias=bias)
        return y.astype(statistics_dtype(self.logits))

    def narrowed(self, dlogits: Any, x: Any, w: Any) -> Any:
        """A cotangent of logits, as products take it.

        float16 has no room for cotangents that float32 logits do not have to squeeze
        into it; bfloat16 has the range, and what is summed has its digits anyway.
        """
        operands = promoted(x.dtype, w.dtype)
        is_short = operands == jnp.bfloat16
        return dlogits.astype(operands if is_short else self.logits)


def statistics_dtype(logits: Any) -> Any:
    """The dtype of log-sum-exps and losses: at least float32."""
    return promoted(logits, jnp.float32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk: columns from ``start``, ``size`` many; ``start`` may be traced.

    Where it has all columns, which may be split over devices, nothing is sliced.
    """

    head: Head
    start: Any
    size: int
    is_all: bool = False

    def of(self, w: Any) -> Any:
        """The chunk's part of an array of w's shape."""
        if self.is_all:
            return w
        return lax.dynamic_slice_in_dim(w, self.start, self.size, self.head.axis)

    def of_bias(self, bias: Any) -> Any:
        if bias is None or self.is_all:
            return bias
        return lax.dynamic_slice_in_dim(bias, self.start, self.size, 0)

    def put(self, whole: Any, part: Any, axis: int) -> Any:
        if self.is_all:
            return part
        return lax.dynamic_update_slice_in_dim(whole, part, self.start, axis)

    def logits(self, x: Any, w: Any, bias: Any) -> Any:
        return self.head.logits_of(x, self.of(w), self.of_bias(bias))

    def is_label(self, labels: Any) -> Any:
        """(rows..., size): where a column is the row's label."""
        columns = lax.iota(labels.dtype, self.size)
        columns = columns.reshape(*[1] * labels.ndim, self.size)
        return columns == (labels - self.start)[..., None]

    def at_label(self, logits: Any, labels: Any, otherwise: Any) -> Any:
        """(rows...): each row's entry at its label, if that is in this chunk."""
        if self.is_all:
            found = jnp.where(self.is_label(labels), logits, zeros_like(logits)).sum(-1)
            inside = (labels >= 0) & (labels < self.size)
            return jnp.where(inside, found, otherwise)
        local = labels - self.start
        inside = (local >= 0) & (local < self.size)
        clipped = jnp.clip(local, 0, self.size - 1)[..., None]
        found = jnp.take_along_axis(logits, clipped, -1, mode="promise_in_bounds")
        return jnp.where(inside, found[..., 0], otherwise)


def forward(
    x: Any, w: Any, labels: Any, bias: Any = None, *, head: Head
) -> tuple[Any, Any]:
    """[log-sum-exp, label logit] of each row."""
    rows, wide = labels.shape, statistics_dtype(head.logits)

    def of_chunk(carry: Any, chunk: Chunk) -> Any:
        largest, total, label = carry
        logits = chunk.logits(x, w, bias)
        new = jnp.maximum(largest, logits.max(-1))
        shift = _finite(new)
        added = jnp.exp(logits - shift[..., None]).sum(-1)
        total = total * jnp.exp(largest - shift) + added
        return new, total, chunk.at_label(logits, labels, label)

    start = full(rows, -jnp.inf, wide), *_zeros((rows, wide), (rows, wide))
    operands = _present(x, w, labels, bias)
    largest, total, label = _over(head, w, of_chunk, start, operands)
    return jnp.log(total) + _finite(largest), label


def _finite(largest: Any) -> Any:
    """The number subtracted from logits: their maximum, or 0 as in ``logsumexp``."""
    return jnp.where(jnp.isfinite(largest), largest, zeros_like(largest))


def tangent(
    x: Any,
    w: Any,
    labels: Any,
    bias: Any,
    lse: Any,
    dx: Any,
    dw: Any,
    dbias: Any,
    *,
    head: Head,
) -> tuple[Any, Any]:
    """[tangent of the log-sum-exp, of the label logit]; dx, dw, dbias may be None."""
    wide = lse.dtype

    def of_chunk(carry: Any, chunk: Chunk) -> Any:
        dlse, dlabel = carry
        logits = chunk.logits(x, w, bias)
        terms: list[Any] = []
        if dx is not None:
            terms.append(head.product(dx, chunk.of(w), head.layout, wide))
        if dw is not None:
            terms.append(head.product(x, chunk.of(dw), head.layout, wide))
        if dbias is not None:
            terms.append(
                jnp.broadcast_to(chunk.of_bias(dbias), logits.shape).astype(wide)
            )
        dlogits = functools.reduce(jnp.add, terms)
        dlse += (jnp.exp(logits - lse[..., None]) * dlogits).sum(-1)
        return dlse, chunk.at_label(dlogits, labels, dlabel)

    start = _zeros((lse.shape, wide), (lse.shape, wide))
    operands = _present(x, w, labels, bias, lse, dx, dw, dbias)
    return _over(head, w, of_chunk, start, operands)


def backward(
    x: Any,
    w: Any,
    labels: Any,
    bias: Any,
    lse: Any,
    ct_lse: Any,
    ct_label: Any,
    *,
    wanted: Sequence[str],
    head: Head,
) -> dict[str, Any]:
    """Gradients of the wanted ones of x, w, bias, of their dtypes."""
    wide = lse.dtype

    def of_chunk(grads: dict[str, Any], chunk: Chunk) -> dict[str, Any]:
        logits = chunk.logits(x, w, bias)
        dlogits = ct_lse[..., None] * jnp.exp(logits - lse[..., None])
        ones = jnp.where(chunk.is_label(labels), ct_label[..., None], 0)
        dlogits = dlogits + ones.astype(wide)
        short, new = head.narrowed(dlogits, x, w), dict(grads)
        if "x" in wanted:
            layout = "n" + FLIP[head.layout[1]]
            part = chunk.of(w)
            new["x"] = head.product(short, part, layout, wide, residual=grads["x"])
        if "w" in wanted:
            pair = (short, x) if head.layout == "nt" else (x, short)
            part = head.product(*pair, "tn", w.dtype)
            new["w"] = chunk.put(grads["w"], part, head.axis)
        if "bias" in wanted:
            part = dlogits.sum(tuple(range(x.ndim - 1))).astype(bias.dtype)
            new["bias"] = chunk.put(grads["bias"], part, 0)
        return new

    shapes = {"x": (x.shape, wide), "w": (w.shape, w.dtype)}
    if bias is not None:
        shapes["bias"] = (bias.shape, bias.dtype)
    start = dict(zip(wanted, _zeros(*(shapes[n] for n in wanted)), strict=True))
    operands = _present(x, w, labels, bias, lse, ct_lse, ct_label)
    grads = _over(head, w, of_chunk, start, operands)
    return {n: g.astype(x.dtype) if n == "x" else g for n, g in grads.items()}


# --- the loop -------------------------------------------------------------------------


def _over(
    head: Head,
    w: Any,
    of_chunk: Callable[[Any, Chunk], Any],
    start: Any,
    operands: Sequence[Any],
) -> Any:
    """The carry after all chunks.

    Derivatives of the loop compute a chunk again: no chunk's logits outlive it.

    Args:
      head, w: tell the chunks.
      of_chunk: (carry, chunk) -> carry.
      start: the first carry.
      operands: that the carry will depend on.
    """
    count, rest = divmod(head.vocabulary(w), head.chunk)

    def step(carry: Any, index: Any) -> Any:
        chunk = Chunk(head=head, start=index * head.chunk, size=head.chunk)
        return of_chunk(carry, chunk), None

    def last(carry: Any) -> Any:
        return of_chunk(carry, Chunk(head=head, start=count * head.chunk, size=rest))

    leaves, structure = tree.flatten(start)
    aligned = lowering.align_varying_axes([*leaves, *operands])[: len(leaves)]
    carry = tree.unflatten(structure, aligned)
    if (count, rest) == (1, 0):
        return of_chunk(carry, Chunk(head=head, start=0, size=head.chunk, is_all=True))
    indices = arange(count, dtype=jnp.int32)
    carry, _ = lax.scan(checkpoint(step, prevent_cse=False), carry, indices)
    return checkpoint(last)(carry) if rest else carry


def _zeros(*shapes: tuple[tuple[int, ...], Any]) -> tuple[Any, ...]:
    return tuple(zeros(shape, dtype) for shape, dtype in shapes)


def _present(*operands: Any) -> list[Any]:
    return [x for x in operands if x is not None]
