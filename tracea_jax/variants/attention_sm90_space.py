"""Which configs of attention_sm90 are legal: what a block has room and registers for.

Caller: the variant of that name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as emit
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.space import Rule

KEYS = (48, 64, 80, 96, 112, 128, 144, 160, 176, 192)
CHOICES = {
    "tile_q": (64, 128, 192),
    "tile_kv": KEYS,
    "stages": (2, 3, 4),
    "ping_pong": (False, True),
    "overlap": (False, True),
    "schedule": emit.SCHEDULES,
    "packed": (False, True),
}
# Heads that share keys; a warp stores the rows of whole queries.
_PACKED = (2, 4, 8, 16)
_WIDEST_MASKED = 128  # keys of a block, of which a thread has 32 in a row
# What a thread has registers for, by the number of consumers, without spilling any:
# without a mask, and with one. See ``_registers``.
_PLAIN = {1: 208, 2: 196, 3: 128}
_MASKED = {1: 256, 2: 224, 3: 152}
_CAPPED = 32
_BIASED = 20
_BESIDE_ALIBI, _BESIDE_BOUNDS, _BESIDE_CAP, _WIDENED = 18, 18, 4, 24
WIDE, _WIDER = 128, 192  # columns of heads
_WIDEST = {1: 256, 2: 256, 3: 128}  # head that one instruction finds registers for


def _registers(problem: AttentionProblem, config: Any) -> Any:
    """Registers of a thread: scores, rounded weights, sums of 64 queries a warpgroup.

    While scores are masked, as many again as there are scores. Wide heads leave too few
    to cap many scores at once, or to read a bias for them, and three consumers for what
    adds a bias.
    """
    scores, sums = config.tile_kv // 2, problem.columns // 2
    capped = _CAPPED * (problem.soft_cap is not None and widest(problem) > WIDE)
    read = _of_bias(problem) * (config.consumers < 3)
    biased = _BIASED * rules.biased_by_tiles(problem) * (config.consumers > 2)
    more = np.maximum(capped, read) + biased
    return scores * (1 + rules.masks(problem)) + scores // 2 + sums + more


def widest(problem: AttentionProblem) -> int:
    return max(problem.head_dim, problem.columns)


def _of_bias(problem: AttentionProblem) -> int:
    """Registers of a bias that is read for each score, beside masks.

    With ALiBi scores begin from the sum of both. With a map, wide heads leave none for
    bounds that each example has its own of. Without one, blocks that a window cuts and
    those that it does not are steps of their own, and entries of 16 bits come into
    registers before any is widened.
    """
    p = problem
    has_each = p.bias is not None and p.bias[3] > 1 and not rules.biased_by_tiles(p)
    if not (has_each and rules.masks(p)):
        return 0
    is_wide, is_widest = widest(p) > WIDE, widest(p) > _WIDER
    if p.alibi:
        return _BESIDE_ALIBI * (is_wide + is_widest)
    if rules.is_mapped(p):
        return _BESIDE_BOUNDS * (rules.shifts(p) and is_widest)
    if is_widest:
        is_cut = rules.window(p) != (None, None)
        return _WIDENED * (is_cut and p.bias_dtype != "float32")
    return _BESIDE_CAP * (p.soft_cap is not None and not is_wide)


def _most_registers(problem: AttentionProblem, config: Any) -> Any:
    return _of_consumers(_MASKED if rules.masks(problem) else _PLAIN, config)


def _of_consumers(table: dict[int, int], config: Any) -> Any:
    """The table's entry for the config's number of consumers."""
    counts = [config.consumers == n for n in table]
    return np.select(counts, list(table.values()))


def _smem_bytes(problem: AttentionProblem, config: Any) -> Any:
    """The least shared memory that the config takes."""
    return emit.smem_bytes(problem, config, emit.least_room(problem))


def _can_pack(problem: AttentionProblem) -> bool:
    """Returns whether a tile may have queries of all heads that share keys."""
    p = problem
    looks = rules.is_mapped(p) or p.bias is not None or p.alibi is not None
    return p.heads // p.kv_heads in _PACKED and not looks


RULES = (
    Rule(
        code="smem",
        refuses=lambda p, c, d: _smem_bytes(p, c) > d.smem_per_block_bytes,
        why=lambda p, c, d: (
            f"the config takes {_smem_bytes(p, c)} bytes of shared memory; a block of "
            f"{d.arch} has {d.smem_per_block_bytes}"
        ),
    ),
    Rule(
        code="registers",
        refuses=lambda p, c, d: _registers(p, c) > _most_registers(p, c),
        why=lambda p, c, d: (
            f"scores, weights and sums take {_registers(p, c)} registers of a thread; "
            f"{c.consumers} consumers have {_most_registers(p, c)}"
        ),
    ),
    Rule(
        code="sums",
        refuses=lambda p, c, d: p.columns > _of_consumers(_WIDEST, c),
        why=lambda p, c, d: (
            f"{c.consumers} consumers have registers for heads up to "
            f"{_of_consumers(_WIDEST, c)}; head_dim={p.columns}"
        ),
    ),
    Rule(
        code="mask",
        refuses=lambda p, c, d: np.logical_and(
            rules.reads_mask(p, c), c.tile_kv > _WIDEST_MASKED
        ),
        why=lambda p, c, d: (
            f"tile_kv={c.tile_kv} with a mask; a word holds the entries of blocks of "
            f"up to {_WIDEST_MASKED} keys"
        ),
    ),
    Rule(
        code="packed",
        refuses=lambda p, c, d: np.logical_and(c.packed, not _can_pack(p)),
        why=lambda p, c, d: (
            f"packed=True with {p.heads // p.kv_heads} heads that share keys; it takes "
            f"{', '.join(map(str, _PACKED))}, and nothing that each score looks at"
        ),
    ),
    Rule(
        code="turns",
        refuses=lambda p, c, d: np.logical_and(c.ping_pong, c.consumers == 1),
        why=lambda p, c, d: "one consumer has nobody to take turns with",
    ),
)
