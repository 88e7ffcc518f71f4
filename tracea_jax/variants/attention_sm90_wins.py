"""Problems for which attention_sm90 is expected to be faster than cuDNN and XLA.

Callers: ``attention_sm90``, ``attention_decode_sm90``.
"""

from __future__ import annotations

from tracea_jax.device import Device
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as emit
from tracea_jax.emit.attention_sm90 import AttentionSm90Config
from tracea_jax.problem import AttentionProblem

# Fewest queries and keys with which it was at least as fast as cuDNN on an H100, by the
# columns of a head, if queries see all keys and if only those before them, see
# ``attention_forward.json``; other heads were not measured.
_FEWEST = {64: 512, 128: 2048, 256: 1024}
_FEWEST_CAUSAL = {64: 512, 128: 512, 256: 512}
# The first on an H200, see ``attention.json``: its memory, for which tiles of few keys
# wait, is faster. It is told by its size.
_FEWEST_OF_FAST_MEMORY = {**_FEWEST, 128: 512}
FAST_MEMORY_BYTES = 100 << 30
# Of heads of 64 columns, where the longest tiles would compute many queries in vain,
# and shorter ones were slower than cuDNN.
_FEWEST_IN_VAIN = 1024
_LONGEST_TILE, _TILE, _MANY_IN_VAIN = 192, 128, 1.14
_FEWEST_CHANGED = {64: 1024, 128: 512}  # on an H200; cuDNN has no kernel for that
# With fewer queries of heads of 128 columns it was faster, too, from so many keys on.
_FEW_QUERIES, _MANY_KEYS = 8, 2048
_OCCUPIED = 0.45  # of the multiprocessors: with fewer tiles decoding is faster
_FEWEST_BIASED = 4096  # of heads of 128 columns
_FEWEST_NARROW_VALUES = 256  # of heads of 192 columns with values of 128


def expects_to_win(
    problem: AttentionProblem, usual: AttentionSm90Config, device: Device
) -> bool:
    """Returns whether the kernel, with the config that is its default, ought to run."""
    fewest = _fewest(problem, device)
    if fewest is not None and min(problem.q_len, problem.kv_len) >= fewest:
        return True
    occupied = _OCCUPIED * getattr(device, "sm_count", 0)
    return _are_few(problem) and emit.tile_count(problem, usual) >= occupied


def _are_few(problem: AttentionProblem) -> bool:
    """Returns whether few queries see many keys, all or all before them.

    cuDNN was slower for 8 to 200 queries of 4096 keys on an H100; no results are kept.
    """
    p = problem
    looks = rules.is_mapped(p) or p.bias or p.soft_cap or p.sinks or p.alibi or p.window
    if looks or (p.is_causal and not p.aligned_at_end):
        return False
    is_measured = p.head_dim == p.columns == 128 and not p.q_lengths
    return is_measured and p.q_len >= _FEW_QUERIES and p.kv_len >= _MANY_KEYS


def _computes_in_vain(problem: AttentionProblem) -> bool:
    """True if the last of the longest tiles would be mostly beyond the queries."""
    longest, others = (
        -(-problem.q_len // tile) * tile for tile in (_LONGEST_TILE, _TILE)
    )
    return longest > _MANY_IN_VAIN * others


def _fewest(problem: AttentionProblem, device: Device) -> int | None:
    """Fewest queries and keys with which it is expected to win; None if never.

    No other kernel has caps, sinks, slopes, blocks of a mask or values of another size,
    and cuDNN has segments only as a mask: others compute all scores. By
    ``attention_masks.json`` of an H100 they took 7.9 to 18 times as long for segments,
    caps and sinks, and 1.9 to 10 times for blocks, of which half to a fifteenth are
    seen.
    """
    p = problem
    if p.mask and not p.mask_block:  # dense masks were not measured
        return None
    if p.value_dim:
        return _FEWEST_NARROW_VALUES if (p.head_dim, p.columns) == (192, 128) else None
    if p.bias:
        return _FEWEST_BIASED if p.head_dim == 128 else None
    if p.mask or p.segments or p.soft_cap or p.sinks or p.alibi:
        return _FEWEST_CHANGED.get(p.head_dim)
    _, right = rules.window(p)
    if right is not None:
        return _FEWEST_CAUSAL.get(p.head_dim)
    if p.head_dim == 64 and _computes_in_vain(p):
        return _FEWEST_IN_VAIN
    is_fast = getattr(device, "memory_bytes", 0) >= FAST_MEMORY_BYTES
    return (_FEWEST_OF_FAST_MEMORY if is_fast else _FEWEST).get(p.head_dim)
