"""What is computed before a kernel of attention starts: maps and words of masks.

Callers: ``attention_sm90``, ``attention_sm80``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as emit
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_map import mask_words, tile_map
from tracea_jax.variants.steps import Buffer, Expression


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
    }
    return tuple(name for name, is_given in there.items() if is_given)


def mask_steps(problem: AttentionProblem, config: Any) -> Iterator[Expression]:
    """The map of blocks and the words of a mask, for tiles of a config's sizes."""
    p = problem
    shape, block = (p.q_len, p.kv_len), p.mask_block or (1, 1)
    if rules.is_mapped(p):
        names = ("q_segments", "kv_segments") * p.segments
        names += ("mask",) * (p.mask is not None)
        arguments: dict[str, Any] = {
            "names": names,
            "shape": shape,
            "tile": (config.tile_q, config.tile_kv),
            "block": block,
        }
        yield expression(tile_map, names, "map", arguments)
    if rules.reads_mask(p, config):
        rows = p.q_len if p.mask_block or not p.mask else p.mask[2]
        arguments = {"shape": (rows, p.kv_len), "keys": config.tile_kv, "block": block}
        yield expression(mask_words, ("mask",), "mask_words", arguments)


def expression(
    function: Callable[..., Any],
    reads: tuple[str, ...],
    writes: str,
    arguments: dict[str, Any],
) -> Expression:
    """A step that computes one buffer."""
    return Expression(
        name=function.__name__,
        function=function,
        reads=reads,
        writes=(writes,),
        arguments=tuple(arguments.items()),
    )


def mask_buffers(problem: AttentionProblem, config: Any) -> Iterator[Buffer]:
    """What ``mask_steps`` write."""
    shapes = emit.buffer_shapes(problem, config)
    if rules.is_mapped(problem):
        yield Buffer(name="map", shape=shapes["map"], dtype="uint32")
    if rules.reads_mask(problem, config):
        yield Buffer(name="mask_words", shape=shapes["mask"], dtype="uint32")
