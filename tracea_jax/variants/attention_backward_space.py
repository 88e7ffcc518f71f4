"""The space of attention_backward_sm90's configs: choices, and rules that refuse some.

Caller: the variant of that name.
"""

from __future__ import annotations

from typing import Any

from tracea_jax.emit import attention_backward_sm90 as emit
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as forward
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.space import Rule

_ROWS = forward.ROWS
CHOICES = {
    "tile_kv": (64, 128, 192),
    "block_q": (32, 48, 64, 80, 96, 128),
    "stages_q": (2, 3),
    "tile_q": (64, 128, 192),
    "block_kv": (32, 48, 64, 80, 96, 128),
    "stages_kv": (2, 3),
    "dq": ("recomputed", "beside", "ordered", "atomic"),
}
# Registers of a thread for sums and scores that there are without spilling any.
_REGISTERS = {1: emit.SINGLE_REGISTERS, 2: 208, 3: 136}


def looks_at_scores(problem: AttentionProblem) -> bool:
    """Returns whether scores have more than positions, lengths and segments say."""
    p = problem
    return p.bias is not None or p.mask is not None or p.alibi is not None


def _adds_beside(problem: AttentionProblem) -> bool:
    """Returns whether sums of dq leave registers for what is done to scores."""
    p = problem
    if not looks_at_scores(p):
        return True
    left, _ = rules.window(p)
    alone = (p.bias is None or p.alibi is None) and not p.segments and left is None
    in_tiles = p.bias is None or rules.biased_by_tiles(p)
    return p.mask is None and in_tiles and alone


def _most_registers(tile: Any) -> Any:
    one, two, three = _REGISTERS.values()
    return two - (tile > 2 * _ROWS) * (two - three) - (tile == _ROWS) * (two - one)


def _registers_of_keys(problem: AttentionProblem, config: Any) -> Any:
    return _most_registers(_ROWS * emit.consumers_of_keys(problem, config))


# What is said of the kernel that sums of dq do not need: each config is said once.
IDLE = {"tile_q": 128, "block_kv": 64, "stages_kv": 2}


def parts(problem: AttentionProblem) -> int:
    """Queries of a block of which two consumers add a part each."""
    return emit.PART * (3 - forward.slabs(problem.head_dim))


RULES = (
    Rule(
        code="beside",
        refuses=lambda p, c, d: (
            (c.dq == "beside") & (emit.consumers_of_keys(p, c) * _ROWS != c.tile_q)
        ),
        why=lambda p, c, d: (
            f"dq={c.dq!r} takes as many threads for {c.tile_q} queries as for "
            f"{c.tile_kv} keys"
        ),
    ),
    Rule(
        code="arguments",
        refuses=lambda p, c, d: (
            (c.dq == "beside")
            & (p.mask is not None and (p.segments or p.bias is not None))
        ),
        why=lambda p, c, d: (
            f"dq={c.dq!r} beside a mask and segments or a bias takes more arguments "
            "than a launch has"
        ),
    ),
    Rule(
        code="share",
        refuses=lambda p, c, d: (
            (
                (emit.consumers_of_keys(p, c) == 1)
                & (emit.keys_smem_bytes(p, c) > d.smem_of_each(2))
            )
            | (
                (c.tile_q == _ROWS)
                & (emit.queries_smem_bytes(p, c) > d.smem_of_each(2))
            )
        ),
        why=lambda p, c, d: (
            f"tiles of {_ROWS} rows take {emit.keys_smem_bytes(p, c)} and "
            f"{emit.queries_smem_bytes(p, c)} bytes of shared memory; two of them have "
            f"{d.smem_of_each(2)} each"
        ),
    ),
    Rule(
        code="parts",
        refuses=lambda p, c, d: (
            c.adds
            & (
                (c.tile_kv != 2 * emit.PART)
                | (c.block_q != parts(p))
                | (c.stages_q != 2)
            )
        ),
        why=lambda p, c, d: (
            f"dq={c.dq!r} takes tile_kv={2 * emit.PART}, block_q={parts(p)} and "
            "stages_q=2"
        ),
    ),
    Rule(
        code="padding",
        refuses=lambda p, c, d: (
            c.adds
            & (c.block_q == 2 * emit.PART)
            & bool(p.q_lengths and p.window is not None)
        ),
        why=lambda p, c, d: (
            f"dq={c.dq!r} with block_q={c.block_q} leaves no registers to clear padded "
            "queries beside a window"
        ),
    ),
    Rule(
        code="split",
        refuses=lambda p, c, d: (
            ((c.tile_kv != _ROWS) & emit.splits(p)) | (c.adds & emit.splits(p))
        ),
        why=lambda p, c, d: (
            f"tile_kv={c.tile_kv} and dq={c.dq!r}: heads above {emit.WIDEST} take "
            f"tiles of {_ROWS} keys and compute dq apart"
        ),
    ),
    Rule(
        code="narrow",
        refuses=lambda p, c, d: (c.block_kv < _ROWS) & (not emit.splits(p)),
        why=lambda p, c, d: (
            f"block_kv={c.block_kv} is for heads above {emit.WIDEST}, which leave no "
            f"room for {_ROWS} keys"
        ),
    ),
    Rule(
        code="scores",
        refuses=lambda p, c, d: c.adds & (not _adds_beside(p)),
        why=lambda p, c, d: (
            f"dq={c.dq!r} leaves no registers for a mask, for a bias that is not "
            "copied in tiles, nor for ALiBi or a bias beside each other, segments or "
            "a window's left side"
        ),
    ),
    Rule(
        code="cap",
        refuses=lambda p, c, d: c.adds & (p.soft_cap is not None),
        why=lambda p, c, d: f"dq={c.dq!r} leaves no registers for a soft cap",
    ),
    Rule(
        code="idle",
        refuses=lambda p, c, d: (
            c.adds
            & (
                (c.tile_q != IDLE["tile_q"])
                | (c.block_kv != IDLE["block_kv"])
                | (c.stages_kv != IDLE["stages_kv"])
            )
        ),
        why=lambda p, c, d: (
            f"dq={c.dq!r} has no kernel of its own, and is written as "
            + ", ".join(f"{name}={value}" for name, value in IDLE.items())
        ),
    ),
    Rule(
        code="smem",
        refuses=lambda p, c, d: (
            (emit.keys_smem_bytes(p, c) > d.smem_per_block_bytes)
            | (emit.queries_smem_bytes(p, c) > d.smem_per_block_bytes)
        ),
        why=lambda p, c, d: (
            f"the kernels take {emit.keys_smem_bytes(p, c)} and "
            f"{emit.queries_smem_bytes(p, c)} bytes of shared memory; a block of "
            f"{d.arch} has {d.smem_per_block_bytes}"
        ),
    ),
    Rule(
        code="registers",
        refuses=lambda p, c, d: (
            (
                ((c.dq == "recomputed") | (c.dq == "beside"))
                & (emit.keys_registers(p, c) > _registers_of_keys(p, c))
            )
            | (emit.queries_registers(p, c) > _most_registers(c.tile_q))
        ),
        why=lambda p, c, d: (
            f"sums and scores take {emit.keys_registers(p, c)} and "
            f"{emit.queries_registers(p, c)} registers of a thread; there are "
            f"{_registers_of_keys(p, c)} and {_most_registers(c.tile_q)}"
        ),
    ),
)
