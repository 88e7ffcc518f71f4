"""Problems for which attention_backward_sm90 is expected to be faster than cuDNN.

Caller: the variant of that name.
"""

from __future__ import annotations

import math

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import attention_backward_sm90 as emit
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit.attention_sm90 import ROWS
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_backward_space import looks_at_scores
from tracea_jax.variants.attention_cudnn import ATTENTION_CUDNN

_FEWEST = 512  # queries, and keys, that are worth three kernels
_FEWEST_ALONE = 256  # that are if each head has keys of its own, and nothing else is
_MEASURED_HEADS = (64, 128)  # columns
# If nothing limits which keys a query sees: by the columns of a head, and for lengths.
_FEWEST_SEEN_BY_ALL = {64: 192, 128: 512}
_FEWEST_WITH_LENGTHS = 4096
# Heads of the same keys, positions, and blocks of 128 keys for a multiprocessor.
_MANY_SHARING, _LONGEST_SHARED, _OCCUPIED_SHARED = 8, 8192, 4
_MOST_SHARING_WIDE, _LONGEST_SHARED_WIDE = 2, 2048  # keys of a query, heads of 256
# Blocks of keys of wide heads for a multiprocessor, if all queries see them, and with a
# causal mask, where the longest takes twice as long as others on average.
_OCCUPIED, _OCCUPIED_CAUSAL = 0.95, 1.9
# Beside what is done to scores, by the columns of a head.
_FEWEST_BESIDE = {
    **{("bias", 64): 512, ("bias", 128): 512, ("mask", 128): 1024},
    **{("alibi", 64): 1024, ("alibi", 128): 512},
}
_NARROWEST = 512  # window that was measured


def expects_to_win(problem: AttentionProblem, device: Device) -> bool:
    """Returns whether cuDNN cannot run, cannot skip what segments mask, or was slower.

    By ``attention_backward.json`` of an H100 cuDNN took 1.15 times as long for causal
    heads of 64 and 128 and 4096 positions, and 1.06 to 1.1 times without a mask; by
    ``attention_masks.json``, with the forward pass, 1.12 to 1.44 times for windows of
    512 and 1024 keys. The limits are those of other lengths that were compared: cuDNN
    was as fast or faster with fewer positions, with few queries of many keys, and where
    eight heads of 128 share the keys of long sequences, or their blocks are for less
    than four rounds. Other heads were not measured.
    """
    p = problem
    shortest = min(p.q_len, p.kv_len)
    if _sees_all(p) and ATTENTION_CUDNN.why_not(p, device) is None:
        return p.head_dim == p.columns and shortest >= _fewest_seen_by_all(p, device)
    if shortest < (_FEWEST_ALONE if _is_alone(p, device) else _FEWEST):
        return False
    if emit.splits(p):
        return _wins_by_splitting(p, device)
    if looks_at_scores(p):
        fewest = _fewest(p)
        return fewest is not None and shortest >= fewest
    if p.segments or ATTENTION_CUDNN.why_not(p, device) is not None:
        return True
    if p.head_dim != p.columns or p.head_dim not in _MEASURED_HEADS:
        return False
    left, right = rules.window(p)
    if left is not None:
        return right == 0 and left + 1 >= _NARROWEST
    if p.head_dim == 128 and p.heads // p.kv_heads >= _MANY_SHARING:
        is_occupied = _blocks(p, 2 * ROWS, device) >= _OCCUPIED_SHARED
        return right == 0 and is_occupied and p.kv_len <= _LONGEST_SHARED
    return right == 0


def _sees_all(problem: AttentionProblem) -> bool:
    """Returns whether nothing but lengths says which keys a query sees."""
    p = problem
    is_plain = not (looks_at_scores(p) or p.segments)
    return is_plain and rules.window(p) == (None, None) and not emit.splits(p)


def _is_alone(problem: AttentionProblem, device: Device) -> bool:
    """True if heads have keys of their own, and nothing but a causal mask is there.

    With blocks of 64 keys for all multiprocessors, of 256 positions: cuDNN was slower
    for 64 examples on an H100; no results are kept.
    """
    p = problem
    is_plain = not (looks_at_scores(p) or p.segments or p.soft_cap or p.sinks)
    has_lengths = p.q_lengths or p.kv_lengths or p.q_len != p.kv_len
    is_measured = p.head_dim == p.columns and p.head_dim in _MEASURED_HEADS
    if not (is_plain and is_measured and p.heads == p.kv_heads) or has_lengths:
        return False
    is_seen = rules.window(p) in ((None, None), (None, 0))
    return is_seen and _blocks(p, ROWS, device) >= 1


def _fewest_seen_by_all(problem: AttentionProblem, device: Device) -> float:
    p = problem
    if p.head_dim not in _MEASURED_HEADS:
        return math.inf
    if p.q_lengths or p.kv_lengths or p.q_len != p.kv_len:
        return _FEWEST_WITH_LENGTHS
    fewest = _FEWEST_SEEN_BY_ALL[p.head_dim]
    return min(_FEWEST_ALONE, fewest) if _is_alone(p, device) else fewest


def _blocks(problem: AttentionProblem, keys: int, device: Device) -> float:
    """Blocks of so many keys for a multiprocessor."""
    p = problem
    assert isinstance(device, CudaDevice)
    return -(-p.kv_len // keys) * p.kv_heads * p.batch / device.sm_count


def _wins_by_splitting(problem: AttentionProblem, device: Device) -> bool:
    """Heads of 256, whose blocks of 64 keys must occupy the multiprocessors.

    With fewer blocks cuDNN was faster on an H100, as it was where eight heads share the
    keys of long sequences. No results are kept of these problems.
    """
    p = problem
    is_plain = not (looks_at_scores(p) or p.segments or p.sinks or p.soft_cap)
    has_lengths = p.q_lengths or p.kv_lengths
    if not is_plain or has_lengths or not p.head_dim == p.columns == 256:
        return False
    left, right = rules.window(p)
    if left is not None and (right != 0 or left + 1 < _NARROWEST):
        return False
    is_uneven = left is None and right is not None
    occupied = _OCCUPIED_CAUSAL if is_uneven else _OCCUPIED
    if right not in (None, 0) or _blocks(p, ROWS, device) < occupied:
        return False
    seen = p.kv_len if left is None else left + 1
    return p.heads // p.kv_heads <= _MOST_SHARING_WIDE or seen <= _LONGEST_SHARED_WIDE


def _fewest(problem: AttentionProblem) -> int | None:
    """Fewest queries and keys with which it beats others beside a bias or a mask.

    By ``attention_masks.json`` of an H100 cuDNN took 1.9 times as long for a bias of
    each head and its gradient, with the forward pass, for 4096 positions. It computes
    what a mask hides, which the kernel skips in blocks; and it has no ALiBi, for which
    XLA keeps all scores in memory.
    """
    p = problem
    there = {"bias": p.bias, "alibi": p.alibi, "mask": p.mask}
    kinds = [kind for kind, value in there.items() if value is not None]
    in_tiles = p.bias is None or rules.biased_by_tiles(p)
    is_whole = p.columns == p.head_dim and not (p.segments or p.soft_cap or p.sinks)
    if len(kinds) > 1 or not in_tiles or not is_whole:
        return None
    if p.mask and (p.mask[:2] != (1, 1) or p.dtype != "bfloat16"):
        return None
    return _FEWEST_BESIDE.get((kinds[0], p.head_dim))
