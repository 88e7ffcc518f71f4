"""linear_cross_entropy: the loss of a language model's head without its logits.

Arguments are checked here, and brought into the form of ``primitive``; logits that are
few are computed at once. Programs call it ``tracea.ops.linear_cross_entropy``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from tracea_jax import variants
from tracea_jax.mistakes import check_kind, whole
from tracea_jax.ops.common.epilogue import is_floating
from tracea_jax.ops.common.precision import canonical_precision
from tracea_jax.ops.common.promotion import (
    preferred_dtype,
    product_dtype,
    promoted,
)
from tracea_jax.ops.common.shapes import check_arrays
from tracea_jax.ops.common.typed import jit
from tracea_jax.ops.linear_cross_entropy.chunks import Head, axis_of, chunk_of
from tracea_jax.ops.linear_cross_entropy.primitive import bind, reference
from tracea_jax.typing import Implementation

LAYOUTS = ("nt", "nn")


def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    layout: str = "nt",
    chunk: int | None = None,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """-log_softmax(x @ w^T + bias)[label], of each row of x.

        loss = linear_cross_entropy(hidden, embedding, tokens).mean()

    Where the logits are many, they are computed, and in the backward pass computed
    again, in chunks of the vocabulary: one chunk of them is in memory at a time, and
    the gradients cost four products instead of three. Statistics of the softmax and the
    sums of gradients are float32. The gradient of bfloat16 operands' logits is rounded
    to bfloat16 before it is multiplied. To leave rows out, or weigh them, multiply the
    result.

    Args:
      x: (..., features).
      w: (vocabulary, features), or with ``layout="nn"`` (features, vocabulary).
      labels: (...) integers in [0, vocabulary). Others give NaN.
      bias: (vocabulary,), added to the logits.
      layout: "nt" or "nn": whether the product takes w transposed, as the layouts of
        ``matmul``.
      chunk: columns of the vocabulary at a time. By default as many as have 256 MiB of
        logits in float32, or a sixteenth of the vocabulary if that is more; logits that
        fit in 256 MiB are computed at once.
      precision: as in ``jax.lax.dot_general``.
      preferred_element_type: dtype that the logits are rounded to; by default float32,
        or float64 for float64 operands.
      implementation: of the products, as in ``matmul``; for derivatives likewise.

    Returns:
      (...), float32 or wider.

    Raises:
      ValueError: on shapes that do not fit, an unknown layout or implementation, a
        chunk below 1.
      TypeError: on operands that are no arrays, x, w or bias that are not
        floating-point, labels that are not integers.
      TypeError, ValueError: on dtypes of x and w that ``jnp.matmul`` refuses.

    Reverse and forward mode, second derivatives, ``vmap``, ``scan``, ``checkpoint`` and
    ``shard_map`` work. Arrays that are sharded explicitly, and symbolic shapes, are
    computed at once. Source of the idea: Wijmans et al., Cut Your Losses in
    Large-Vocabulary Language Models (2024).
    """
    variants.check_implementation("matmul", implementation)
    check_kind("layout", layout, str, "'nt' or 'nn'")
    if layout not in LAYOUTS:
        raise ValueError(f"{layout=} must be one of {', '.join(LAYOUTS)}")
    if chunk is not None and whole("chunk", chunk) < 1:
        raise ValueError(f"{chunk=} must be at least 1")
    return _linear_cross_entropy(
        x,
        w,
        labels,
        bias,
        layout=layout,
        chunk=chunk,
        precision=canonical_precision(precision),
        logits=preferred_dtype(preferred_element_type),
        implementation=implementation,
    )


@functools.partial(
    jit,
    static_argnames=("layout", "chunk", "precision", "logits", "implementation"),
    inline=True,
)
def _linear_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    *,
    chunk: int | None,
    logits: Any,
    **how: Any,
) -> jax.Array:
    optional: dict[str, jax.Array] = {} if bias is None else {"bias": bias}
    check_arrays("linear_cross_entropy", x=x, w=w, labels=labels, **optional)
    floats = {"x": x, "w": w, **optional}
    _check_dtypes(floats, labels, logits)
    product_dtype(x, w, logits)
    vocabulary = _check_shapes(x, w, labels, bias, how["layout"])
    if labels.dtype.itemsize < 4:  # may be too short for the vocabulary's size
        labels = labels.astype(jnp.int32)
    lse, label = statistics(x, w, labels, bias, chunk=chunk, logits=logits, **how)
    known = (labels >= 0) & (labels < vocabulary)
    return jnp.where(known, lse - label, jnp.nan)


def statistics(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    *,
    layout: str,
    logits: Any,
    precision: Any,
    chunk: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-sum-exps and label logits, (...), in chunks or at once.

    Arguments are those of ``linear_cross_entropy``, and right. The logit of a label
    outside of the vocabulary is 0.
    """
    operands = [x, w] if bias is None else [x, w, bias]
    wide = promoted(*(a.dtype for a in operands))
    rows, vocabulary = math.prod(labels.shape), w.shape[axis_of(layout)]
    shapes: list[Any] = [n for a in (*operands, labels) for n in a.shape]
    if not all(isinstance(n, int) for n in shapes):
        chunk = None
    elif chunk is None:
        chunk = chunk_of(rows, vocabulary)
    head = Head(
        layout=layout,
        chunk=vocabulary if chunk is None else min(chunk, vocabulary),
        logits=jnp.dtype(logits or promoted(wide, jnp.float32)),
        precision=precision,
        implementation=implementation,
    )
    own = [] if bias is None else [bias]
    shape, labels = labels.shape, labels.astype(jnp.int32)
    if not shape:
        x, labels = x[None], labels[None]
    outs = (reference if chunk is None else bind)(x, w, labels, *own, head=head)
    lse, label = (y.reshape(shape) for y in outs)
    return lse, label


def _check_dtypes(floats: dict[str, jax.Array], labels: jax.Array, logits: Any) -> None:
    for name, a in floats.items():
        if not is_floating(a.dtype):
            raise TypeError(f"{name} must be floating-point; it is {a.dtype}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers; they are {labels.dtype}")
    if logits is not None and not is_floating(logits):
        raise TypeError(f"logits must be floating-point; {logits=}")


def _check_shapes(
    x: jax.Array, w: jax.Array, labels: jax.Array, bias: jax.Array | None, layout: str
) -> int:
    """The size of the vocabulary."""
    if w.ndim != 2 or x.ndim < 1:
        raise ValueError(
            f"x must have a last dimension of features, and w two; {x.shape=}, "
            f"{w.shape=}"
        )
    vocabulary, features = w.shape if layout == "nt" else w.shape[::-1]
    if x.shape[-1] != features:
        raise ValueError(
            f"w has {features} features with {layout=}, and x has {x.shape[-1]}: "
            f"{x.shape=}, {w.shape=}"
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of x without its features, {x.shape[:-1]}; "
            f"{labels.shape=}"
        )
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(f"bias must have shape ({vocabulary},); {bias.shape=}")
    return vocabulary
