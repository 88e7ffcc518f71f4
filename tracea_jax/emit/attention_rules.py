"""Biases and masking rules (which query sees which key) in attention kernels.

Rules on positions and lengths are numbers of a launch. Segments and masks are a map of
blocks, which a kernel makes before it (``attention_map``), and words of a mask for
blocks that are mixed.
Callers: ``attention_sm90`` and ``attention_sm80`` beside this module, and the variants
of these names.
"""

from __future__ import annotations

from typing import Any

from tracea_jax.problem import AttentionProblem

_BIAS_ELEMENTS = {
    "float32": "float",
    "bfloat16": "tracea::bf16",
    "float16": "tracea::f16",
}
_ALIGNED = 8  # elements of 16 bits; tensor maps read rows that start at a multiple


def window(problem: AttentionProblem) -> tuple[int | None, int | None]:
    """(left, right): query i sees keys i - left .. i + right; None for no limit.

    A side that excludes no key is dropped. Positions that count from the end are
    shifted here, or on the device if only that knows by how much (``shifts``).
    """
    left, right = problem.window or (None, None)
    if problem.is_causal:
        right = 0 if right is None else min(right, 0)
    if shifts(problem):
        return left, right
    ahead = problem.kv_len - problem.q_len if problem.aligned_at_end else 0
    left = None if left is None else left - ahead
    right = None if right is None else right + ahead
    if left is not None and left >= problem.q_len - 1:
        left = None
    if right is not None and right >= problem.kv_len - 1:
        right = None
    return left, right


def shifts(problem: AttentionProblem) -> bool:
    """Returns whether positions count from ends that each example has its own of."""
    return problem.aligned_at_end and (problem.q_lengths or problem.kv_lengths)


def is_mapped(problem: AttentionProblem) -> bool:
    """Returns whether which blocks a tile sees is read from a map."""
    return problem.segments or problem.mask is not None


def reads_mask(problem: AttentionProblem, config: Any) -> Any:
    """True if scores are masked one by one: no mask of blocks that tiles divide."""
    if problem.mask is None:
        return False
    queries, keys = problem.mask_block or (1, 1)
    return (queries % config.tile_q != 0) | (keys % config.tile_kv != 0)


def sees_whole(problem: AttentionProblem, config: Any) -> Any:
    """Tests whether a mask of blocks that tiles divide is all that limits what is seen.

    Then no score of a block that is seen is masked.
    """
    p = problem
    if p.mask is None or p.segments or p.q_lengths or p.kv_lengths:
        return False
    if window(p) != (None, None) or p.kv_len % config.tile_kv:
        return False
    return not reads_mask(p, config)


def masks(problem: AttentionProblem) -> bool:
    """Returns whether more than the last block of keys of a tile may be partial."""
    return window(problem) != (None, None) or problem.kv_lengths or is_mapped(problem)


def biased_by_tiles(problem: AttentionProblem) -> bool:
    """Returns whether tiles of a bias are copied into shared memory.

    Others are shared by queries or keys, or their rows start where no copy can.
    """
    p = problem
    if p.bias is None or p.bias_dtype not in ("bfloat16", "float16"):
        return False
    return p.bias[2] > 1 and p.bias[3] > 1 and p.kv_len % _ALIGNED == 0


def bias_element(problem: AttentionProblem) -> str:
    """The C++ type of an entry of the bias, also of one that is not there."""
    return _BIAS_ELEMENTS[problem.bias_dtype or "float32"]
