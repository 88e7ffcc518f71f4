"""The primitive of a value that is used twice: x -> [x, x].

Where the value is a residual block's, ``rewrite`` puts it between the block and those
that use it. The two cotangents are then operands of one equation. Where no larger op
takes it in, it is the value twice, and its transpose the sum.
"""

from __future__ import annotations

from typing import Any

from tracea_jax.ops.common import by_reference, jax_rules, lowering
from tracea_jax.ops.common.typed import (
    Arrays,
    Batched,
    Cotangents,
    Differentiated,
    Dims,
    Operand,
    Tangents,
    Zero,
    mlir,
)


def reference(x: Any) -> list[Any]:
    return [x, x]


fork_p = lowering.primitive("tracea_fork", reference)
mlir.register_lowering(fork_p, mlir.lower_fun(reference, multiple_results=True))
by_reference.register(fork_p, reference)


def _jvp(primals: Arrays, tangents: Tangents) -> Differentiated:
    (tangent,) = tangents
    outs = fork_p.bind(*primals)
    return outs, [tangent] * 2 if isinstance(tangent, Zero) else fork_p.bind(tangent)


def _transpose(cts: Tangents, x: Operand) -> Cotangents:
    given = [ct for ct in cts if not isinstance(ct, Zero)]
    return [given[0] + given[1] if len(given) == 2 else (*given, *cts)[0]]


def _batch(operands: Arrays, dims: Dims) -> Batched:
    (dim,) = dims
    assert dim is not None
    return fork_p.bind(*operands), [dim, dim]


jax_rules.register(
    "channel_affine", fork_p, reference, jvp=_jvp, transpose=_transpose, batch=_batch
)
