"""Steps that the calls of several attention kernels share.

Callers: ``attention_sm90``, ``attention_sm80``, ``attention_backward_sm80``,
``attention_backward_sm90``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tracea_jax.device import CudaDevice
from tracea_jax.emit import attention_map
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as emit
from tracea_jax.emit.attention_sides import Side
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.steps import Buffer, Expression, Launch, Step


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
    """Buffers that ``map_step`` writes, without the counter."""
    shapes = emit.buffer_shapes(problem, config)
    if rules.is_mapped(problem):
        yield Buffer(name="map", shape=shapes["map"], dtype="uint32")
    if rules.reads_mask(problem, config):
        yield Buffer(name="mask_words", shape=shapes["mask"], dtype="uint32")


def map_steps_of(side: Side, device: CudaDevice) -> Iterator[Step]:
    """The map and the words of a mask, as the side's own rows see other ones."""
    if not rules.is_mapped(side.problem):
        return
    step = map_step(side.problem, side, device)
    if side.of_keys and side.problem.mask:
        yield Expression(
            name="mask_of_keys",
            function=turned,
            reads=("mask",),
            writes=("mask_of_keys",),
        )
    own = side.of_keys and side.problem.mask is not None
    reads = (side.buffer(n) if n == "mask" and own else side.of(n) for n in step.reads)
    yield dataclasses.replace(
        step,
        name=side.buffer(step.name),
        reads=tuple(reads),
        writes=tuple(side.buffer(name) for name in step.writes),
    )


def map_buffers_of(side: Side) -> Iterator[Buffer]:
    """Buffers that ``map_steps_of`` writes."""
    if side.of_keys and side.problem.mask:
        shape = side.problem.mask
        yield Buffer(name=side.buffer("mask"), shape=shape, dtype="bool")
    for buffer in map_buffers(side.problem, side):
        yield dataclasses.replace(buffer, name=side.buffer(buffer.name))


def turned(module: Any, mask: Any) -> Any:
    """A mask with keys and queries in each other's place."""
    return module.swapaxes(mask, 2, 3)
