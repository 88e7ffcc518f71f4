"""Where attention_backward_sm90 is expected to be faster than cuDNN, from measurements.

Caller: the variant of that name.
"""

from __future__ import annotations

from tracea_jax.device import Device
from tracea_jax.emit import attention_backward_sm90 as emit
from tracea_jax.emit import attention_rules as rules
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_backward_space import looks_at_scores
from tracea_jax.variants.attention_cudnn import ATTENTION_CUDNN

_FEWEST = 512  # queries, and keys, that are worth three kernels
_FEWEST_WIDE = 1024  # for heads of 256
# Beside what is done to scores, by the columns of a head.
_FEWEST_BESIDE = {
    **{("bias", 64): 512, ("bias", 128): 512, ("mask", 128): 1024},
    **{("alibi", 64): 1024, ("alibi", 128): 512},
}
_MEASURED_HEADS = (64, 128)  # columns
_FEWEST_SEEN_BY_ALL = 4096  # keys, if nothing limits which a query sees
_NARROWEST = 512  # window that was measured


def expects_to_win(problem: AttentionProblem, device: Device) -> bool:
    """Where cuDNN cannot run, cannot skip what segments mask, or was slower.

    On an H100 cuDNN took 1.02 to 1.4 times as long for causal heads of 64 and
    128, from 512 to 16384 positions, 1.1 to 1.2 times for windows of 512 and 1024
    keys, and 1.06 to 1.18 times without a mask from 4096 positions on: with 2048 it
    was as fast, or faster. Other heads were not measured.
    """
    p = problem
    if min(p.q_len, p.kv_len) < _FEWEST:
        return False
    if emit.splits(p):
        return _wins_by_splitting(p)
    if looks_at_scores(p):
        fewest = _fewest(p)
        return fewest is not None and min(p.q_len, p.kv_len) >= fewest
    if p.segments or ATTENTION_CUDNN.why_not(p, device) is not None:
        return True
    if p.head_dim != p.columns or p.head_dim not in _MEASURED_HEADS:
        return False
    left, right = rules.window(p)
    if right is None and left is None:
        return p.kv_len >= _FEWEST_SEEN_BY_ALL
    return right == 0 and (left is None or left + 1 >= _NARROWEST)


def _wins_by_splitting(problem: AttentionProblem) -> bool:
    """Heads of 256: on an H100 cuDNN took 1.11 to 1.27 times as long."""
    p = problem
    is_plain = not (looks_at_scores(p) or p.segments or p.sinks or p.soft_cap)
    has_window = p.window is not None or p.q_lengths or p.kv_lengths
    is_measured = p.head_dim == p.columns == 256 and p.heads == p.kv_heads
    is_long = min(p.q_len, p.kv_len) >= _FEWEST_WIDE
    return is_plain and is_measured and not has_window and is_long


def _fewest(problem: AttentionProblem) -> int | None:
    """Fewest queries and keys with which it beats others beside a bias or a mask.

    On an H100, from so many positions to 4096, cuDNN took 1.3 to 2.2 times as long for
    a bias of each score and its gradient, and 1.15 to 1.3 times for random masks that
    all examples and heads share, up to 6 times for such of documents. It has no ALiBi,
    for which XLA took 4 to 7 times as long.
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
