"""Steps of calls of attention's gradients, besides the kernels of their variants.

Queries that see no key, sinks, segments, and a bias. Callers:
``attention_backward_sm90`` and ``attention_backward_sm80``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tracea_jax.device import CudaDevice
from tracea_jax.emit import attention_backward_bias as bias
from tracea_jax.emit import attention_backward_rows as small
from tracea_jax.emit import attention_backward_sm90 as emit
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit.attention_backward_sm90 import AttentionBackwardSm90Config
from tracea_jax.emit.attention_gradient_scores import GradientScores
from tracea_jax.ir.tile_graph import KeyInterval
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.steps import Buffer, Expression, Launch, Step


def may_be_blind(problem: AttentionProblem) -> bool:
    """Tests whether a query might see no key; it then takes the mean of all values."""
    p = problem
    left, right = rules.window(p)
    if p.mask is not None or p.bias is not None:  # whose numbers nobody knows
        return True
    if rules.shifts(p) and (left, right) != (None, None):
        return True
    keys = KeyInterval(kv_len=p.kv_len, limit=p.kv_len, left=left, right=right)
    return p.kv_lengths or p.segments or keys.has_blind(0, p.q_len - 1)


def told(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> Iterator[GradientScores]:
    """Biases and masks of each kernel that computes scores."""
    yield emit.beside_keys(problem, config)
    yield emit.beside_queries(problem, config)
    if problem.bias_gradient:
        yield bias.beside(problem)


def of_bias(
    problem: AttentionProblem, config: AttentionBackwardSm90Config, device: CudaDevice
) -> Iterator[Step]:
    """The gradient of the bias."""
    p = problem
    how = bias.of(p, device)
    yield Launch(
        name="bias",
        kernel=bias.kernel(p, config, device),
        reads=bias.reads(p),
        writes=(how.writes,),
    )
    if not how.is_whole:
        yield Expression(
            name="terms",
            function=bias.sum_of_terms,
            reads=(how.writes,),
            writes=("dbias",),
            arguments=(("shape", p.bias), ("dtype", p.bias_dtype)),
        )


def blind_buffers(problem: AttentionProblem, config: Any) -> Iterator[Buffer]:
    """Buffers that ``of_blind`` reads and writes."""
    p = problem
    shapes = {
        "blind": emit.blind_shape(p, config),
        "everywhere": (p.batch, p.kv_heads, p.columns),
    }
    for name, shape in shapes.items():
        yield Buffer(name=name, shape=shape, dtype="float32")


def of_blind(problem: AttentionProblem) -> Expression:
    p = problem
    arguments = {
        "group": p.heads // p.kv_heads,
        "kv_len": p.kv_len,
        "dtype": p.dtype,
    }
    return Expression(
        name="mean",
        function=mean_of_blind,
        reads=("blind",),
        writes=("everywhere",),
        arguments=tuple(arguments.items()),
    )


def mean_of_blind(
    module: Any, blind: Any, *, group: int, kv_len: int, dtype: str
) -> Any:
    """Contribution of queries that see no key to the gradient of each value.

    Args:
      module: the array module.
      blind: float32 (batch, tiles, heads, head_dim), sums of their do.
      group: heads that share values.
      kv_len: keys, the masked ones included.
      dtype: that a weight is rounded to.

    Returns:
      float32 (batch, kv_heads, head_dim).
    """
    batch, _, heads, dim = blind.shape
    shared = module.sum(blind, 1).reshape(batch, heads // group, group, dim)
    return module.sum(shared, 2) * module.asarray(1 / kv_len, dtype).astype("float32")


def gradient_of_sinks(module: Any, sinks: Any, rows: Any) -> Any:
    """-sum of p delta over all queries, p being the weight of the sink.

    Args:
      module: the array module.
      sinks: float32 (heads,).
      rows: float32 (batch, heads, 2 or 3, queries), see attention_rows.cuh.

    Returns:
      float32 (heads,).
    """
    log2 = sinks[:, None] * math.log2(math.e)
    weights = module.exp2(log2 - rows[:, :, 0])
    return -module.sum(weights * rows[:, :, 1], (0, 2))


OF_SINKS = Expression(
    name="sinks",
    function=gradient_of_sinks,
    reads=("sinks", "rows"),
    writes=("dsinks",),
)


def segment_buffers(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> list[Buffer]:
    p = problem
    shapes: dict[str, tuple[int, ...]] = {
        "ids_kv": (p.batch, emit.padded_kv(p, config))
    }
    for name, (ids, field) in emit.SPANS.items():
        length = p.q_len if ids == "q_segments" else p.kv_len
        shapes[name] = (p.batch, -(-length // getattr(config, field)), 2)
    return [Buffer(name=n, shape=s, dtype="int32") for n, s in shapes.items()]


def of_segments(
    problem: AttentionProblem, config: AttentionBackwardSm90Config, device: CudaDevice
) -> Launch:
    return Launch(
        name="segments",
        kernel=small.spans_kernel(problem, config, device),
        reads=emit.SPANS_READ,
        writes=("ids_kv", *emit.SPANS),
    )
