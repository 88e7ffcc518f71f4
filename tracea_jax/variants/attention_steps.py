"""What the calls of several kernels of attention have in common.

Callers: ``attention_sm90``, ``attention_sm80``, ``attention_backward_sm80``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tracea_jax.device import CudaDevice
from tracea_jax.emit import attention_map
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as emit
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.steps import Buffer, Launch


def optional_operands(problem: AttentionProblem) -> tuple[str, ...]:
    """The op's operands behind q, k and v."""
    p = problem
    there = {
        "bias": p.bias is not None,
        "mask": p.mask is not None,
        "q_lengths": p.q_lengths,
        "kv_lengths": p.kv_lengths,
        "q_segments": p.segments,
        "kv_segments": p.segments,
        "sinks": p.sinks,
        "alibi_slopes": p.alibi is not None,
    }
    return tuple(name for name, is_given in there.items() if is_given)


def map_step(problem: AttentionProblem, config: Any, device: CudaDevice) -> Launch:
    """Makes the map of blocks and the words of a mask, for a config's tiles."""
    return Launch(
        name="map",
        kernel=attention_map.kernel(problem, config, device),
        reads=attention_map.reads(problem),
        writes=attention_map.writes(problem, config),
    )


def map_buffers(problem: AttentionProblem, config: Any) -> Iterator[Buffer]:
    """What ``map_step`` writes, but for a counter."""
    shapes = emit.buffer_shapes(problem, config)
    if rules.is_mapped(problem):
        yield Buffer(name="map", shape=shapes["map"], dtype="uint32")
    if rules.reads_mask(problem, config):
        yield Buffer(name="mask_words", shape=shapes["mask"], dtype="uint32")
