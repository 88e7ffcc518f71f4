"""attention_backward_sm90: the gradients of flash attention on Hopper's tensor cores.

The output and the log-sum-exp come from whatever ran forward. Two kernels compute dk
and dv, and dq, in two launches or in one; or (``dq`` of the config) the first also adds
up dq in memory: in the order of the keys, so that results are the same from run to run,
or in none. A further one computes the gradient of a bias, whose terms it sums in an
order that depends on shapes alone. All skip what nobody sees. A query all of whose
scores a bias puts below -2^23 weighs the keys that it sees with the largest bias
equally.

Here are the reasons that refuse problems, the legal configs and the calls; the kernels'
text is in ``emit.attention_backward_kernels`` and beside it.
Caller: the op's record (``ops.attention.op``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import attention_backward_bias as of_bias
from tracea_jax.emit import attention_backward_kernels as kernels
from tracea_jax.emit import attention_backward_rows as small
from tracea_jax.emit import attention_backward_sm90 as emit
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as forward
from tracea_jax.emit.attention_backward_sm90 import AttentionBackwardSm90Config
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants import attention_backward_steps as steps_of
from tracea_jax.variants.attention_backward_sm90_wins import expects_to_win
from tracea_jax.variants.attention_backward_space import (
    CHOICES,
    IDLE,
    RULES,
    looks_at_scores,
    parts,
)
from tracea_jax.variants.attention_mask import refuses_extras
from tracea_jax.variants.attention_sm90 import device_refuses, size_refuses
from tracea_jax.variants.attention_steps import (
    map_buffers_of,
    map_steps_of,
    optional_operands,
)
from tracea_jax.variants.cuda_gemm import INT32_MAX
from tracea_jax.variants.space import (
    Space,
    check_choices,
    check_rules,
    first_refusal,
    grid,
    legal_space,
)
from tracea_jax.variants.steps import Buffer, Launch, Step, Steps

_WIDEST, _WIDEST_VALUE = 256, 128  # value that is not split
_ROWS = forward.ROWS
_LONGEST = 1 << 30  # positions that may be added without overflow
_MANY = 4096  # positions that are worth sums of dq in memory
# Fewer that are, too: columns of a head, whether the mask is causal, heads that share
# keys, of which a block meets all queries, and positions.
_FEWEST_ADDED = (
    *((64, False, 1, 3000), (64, False, 4, 2048), (64, True, 4, 1024)),
    *((128, False, 1, 2048), (128, False, 4, 1024), (128, True, 8, 2048)),
)
_EXTRAS = ("segments", "sinks", "soft_cap", "value_dim", "aligned_at_end", "alibi")
# The config whose maps of blocks are largest.
_SMALLEST = AttentionBackwardSm90Config(
    tile_kv=128, block_q=32, tile_q=128, block_kv=64
)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionBackwardSm90:
    """The variant attention_backward_sm90; see ``variants.base.Variant``."""

    name: str = "attention_backward_sm90"
    config_type: type = AttentionBackwardSm90Config
    sources: tuple[str, ...] = (
        "cuda/attention_backward_both_sm90.cuh",
        "cuda/attention_backward_keys_sm90.cuh",
        "cuda/attention_backward_queries_sm90.cuh",
        "cuda/attention_backward_dq_sm90.cuh",
        "cuda/attention_backward_bias_sm90.cuh",
        "cuda/attention_map.cuh",
        "cuda/attention_rows.cuh",
        "cuda/attention_spans.cuh",
    )

    def why_not(self, problem: AttentionProblem, device: Device) -> str | None:
        if problem.direction != "backward":
            return "it computes gradients only"
        return (
            device_refuses(device)
            or _head_refuses(problem)
            or size_refuses(problem)
            or _tiles_refuse(problem)
            or _kind_refuses(problem)
            or _split_refuses(problem, device)
        )

    def check(
        self,
        problem: AttentionProblem,
        config: AttentionBackwardSm90Config,
        device: Device,
    ) -> None:
        check_choices(config, CHOICES)
        check_rules(RULES, problem, config, device)

    def space(self, problem: AttentionProblem, device: Device) -> Space:
        return legal_space(
            grid(**CHOICES), AttentionBackwardSm90Config, RULES, problem, device
        )

    def heuristic(
        self, problem: AttentionProblem, device: Device
    ) -> AttentionBackwardSm90Config:
        p = problem
        if emit.splits(p):
            return _of_split(p, device)
        if p.head_dim > 128:
            return AttentionBackwardSm90Config(
                tile_kv=128, block_q=32, tile_q=128, block_kv=64
            )
        if _adds_faster(p):
            added = AttentionBackwardSm90Config(
                tile_kv=2 * emit.PART, block_q=parts(p), dq="ordered", **IDLE
            )
            if first_refusal(RULES, p, added, device) is None:
                return added
        if _suits_small_tiles(p):
            stages = 2 if max(p.head_dim, p.columns) > 64 else 3
            small = AttentionBackwardSm90Config(
                **{"tile_kv": 64, "block_q": 64, "stages_q": stages},
                **{"tile_q": 64, "block_kv": 64, "stages_kv": stages},
                dq="beside",
            )
            if first_refusal(RULES, p, small, device) is None:
                return small
        if max(p.head_dim, p.columns) > 64:
            block_q = 48 if emit.is_crowded(p) else 64
            return AttentionBackwardSm90Config(
                tile_kv=128, block_q=block_q, tile_q=128, block_kv=64, stages_kv=3
            )
        narrow = p.soft_cap is not None or looks_at_scores(p)
        block_kv = 64 if narrow else 80
        tile_q = 128 if emit.is_crowded(p) else 192
        return AttentionBackwardSm90Config(
            tile_kv=128, block_q=96, tile_q=tile_q, block_kv=block_kv, stages_kv=3
        )

    def expects_to_win(self, problem: AttentionProblem, device: Device) -> bool:
        return expects_to_win(problem, device)

    def may_vary(
        self,
        problem: AttentionProblem,
        config: AttentionBackwardSm90Config,
        device: Device,
    ) -> str | None:
        if config.dq != "atomic":
            return None
        return f"dq={config.dq!r} adds up the gradient of the queries in no fixed order"

    def call(
        self,
        problem: AttentionProblem,
        config: AttentionBackwardSm90Config,
        device: Device,
    ) -> Steps:
        assert isinstance(device, CudaDevice)
        p = problem
        more = ("dbias",) * p.bias_gradient + ("dsinks",) * p.sinks
        return Steps(
            operands=("q", "k", "v", *optional_operands(p), "o", "lse", "do"),
            results=("dq", "dk", "dv", *more),
            scratch=tuple(_buffers(p, config, device)),
            steps=tuple(_steps(p, config, device)),
        )


ATTENTION_BACKWARD_SM90 = AttentionBackwardSm90()


def _buffers(
    problem: AttentionProblem, config: AttentionBackwardSm90Config, device: CudaDevice
) -> Iterator[Buffer]:
    """Buffers that steps write for other steps."""
    p, c = problem, config
    yield Buffer(name="rows", shape=emit.rows_shape(p, c), dtype="float32")
    if c.adds:
        yield Buffer(name="sums", shape=emit.sums_shape(p, c), dtype="float32")
    if c.dq == "ordered":
        yield Buffer(name="turns", shape=emit.turns_shape(p, c), dtype="int32")
    if steps_of.may_be_blind(p):
        yield from steps_of.blind_buffers(p, c)
    if p.segments:
        yield from steps_of.segment_buffers(p, c)
    for told in steps_of.told(p, c):
        if told.is_mapped:
            yield from map_buffers_of(told.side)
    if p.bias_gradient and not (how := of_bias.of(p, device)).is_whole:
        yield Buffer(name=how.writes, shape=how.shape, dtype=how.dtype)


def _steps(
    problem: AttentionProblem, config: AttentionBackwardSm90Config, device: CudaDevice
) -> Iterator[Step]:
    p, c = problem, config
    has_blind = steps_of.may_be_blind(p)
    yield Launch(
        name="prepare",
        kernel=small.rows_kernel(p, c, device, has_blind),
        reads=emit.rows_reads(p),
        writes=("rows", *("blind",) * has_blind, *emit.begun(c)),
    )
    if has_blind:
        yield steps_of.of_blind(p)
    if p.segments:
        yield steps_of.of_segments(p, c, device)
    if p.sinks:
        yield steps_of.OF_SINKS
    for told in steps_of.told(p, c):
        if told.is_mapped:
            yield from map_steps_of(told.side, device)
    if p.bias_gradient:
        yield from steps_of.of_bias(p, c, device)
    if c.dq == "beside":
        yield Launch(
            name="both",
            kernel=kernels.both_kernel(p, c, device, has_blind),
            reads=emit.both_reads(p, c, has_blind),
            writes=("dk", "dv", "dq"),
        )
    else:
        yield Launch(
            name="keys",
            kernel=kernels.keys_kernel(p, c, device, has_blind),
            reads=emit.keys_reads(p, c, has_blind),
            writes=emit.keys_writes(c),
        )
        yield _of_queries(p, c, device)


def _of_queries(
    problem: AttentionProblem, config: AttentionBackwardSm90Config, device: CudaDevice
) -> Launch:
    if config.adds:
        kernel = small.dq_kernel(problem, config, device)
        reads = emit.dq_reads(config)
    else:
        kernel = kernels.queries_kernel(problem, config, device)
        reads = emit.queries_reads(problem, config)
    return Launch(name="queries", kernel=kernel, reads=reads, writes=("dq",))


def _adds_faster(problem: AttentionProblem) -> bool:
    """Returns whether the sums of dq in memory pay: blocks of keys meet many queries.

    They save two of seven products, but blocks wait for those of earlier keys, and the
    sums are cleared and rounded. On an H100 the ordered sums were faster from the keys
    of ``_FEWEST_ADDED`` or ``_MANY`` on, also with ALiBi, and with a bias and a causal
    mask. With windows they were slower: few queries are between a block's turns then.
    """
    p = problem
    left, right = rules.window(p)
    if p.segments or left is not None or p.mask is not None:
        return False
    if looks_at_scores(p):
        reads_half = p.bias is None or right == 0
        return reads_half and p.heads == p.kv_heads and p.kv_len >= _MANY
    shared = p.heads // p.kv_heads
    fewest = (
        keys
        for head_dim, is_causal, sharing, keys in _FEWEST_ADDED
        if (head_dim, is_causal) == (p.head_dim, right == 0) and shared >= sharing
    )
    return min(p.q_len, p.kv_len) >= min(fewest, default=_MANY)


def _suits_small_tiles(problem: AttentionProblem) -> bool:
    """Returns whether two small tiles that share a multiprocessor beat a large one.

    They compute fewer scores in vain, which counts for documents, windows and causal
    masks, and leave fewer multiprocessors without a tile, which counts without a mask.
    Two launches of large tiles were slower, most of all for narrow windows and short
    sequences.
    """
    p = problem
    if looks_at_scores(p) or p.soft_cap is not None:
        return False
    left, right = rules.window(p)
    return p.segments or right == 0 or (left, right) == (None, None)


def _of_split(problem: AttentionProblem, device: Any) -> AttentionBackwardSm90Config:
    """The config of wide heads whose blocks are largest; the last if none is legal."""
    configs = [
        AttentionBackwardSm90Config(
            tile_kv=_ROWS, block_q=block_q, tile_q=128, block_kv=block_kv
        )
        for block_q, block_kv in ((64, 48), (64, 32), (48, 32), (32, 32))
    ]
    legal = (c for c in configs if not first_refusal(RULES, problem, c, device))
    return next(legal, configs[-1])


def _split_refuses(problem: AttentionProblem, device: Any) -> str | None:
    """Why no config of wide heads is legal, or None."""
    if not emit.splits(problem):
        return None
    config = _of_split(problem, device)
    rule = first_refusal(RULES, problem, config, device)
    return None if rule is None else rule.why(problem, config, device)


def _head_refuses(problem: AttentionProblem) -> str | None:
    if problem.dtype not in forward.DTYPES:
        return (
            f"operands of dtype {problem.dtype}; it takes {', '.join(forward.DTYPES)}"
        )
    p = problem
    most = (_WIDEST, _WIDEST) if emit.splits(p) else (emit.WIDEST, _WIDEST_VALUE)
    for name, columns, widest in (
        ("head_dim", p.head_dim, most[0]),
        ("value_dim", p.columns, most[1]),
    ):
        if columns % 8 or not 0 < columns <= widest:
            return f"{name}={columns}; it takes multiples of 8 up to {widest}"
    return None


def _tiles_refuse(problem: AttentionProblem) -> str | None:
    p = problem
    if -(-p.kv_len // _ROWS) * p.kv_heads * p.batch > INT32_MAX:
        return "the keys have more than 2^31 - 1 tiles of 64"
    if p.bias_gradient:
        tile = _ROWS
        tiles = -(-p.q_len // tile) * -(-p.kv_len // tile)
        if tiles * p.heads * p.batch > INT32_MAX:
            return f"the scores have more than 2^31 - 1 tiles of {tile}x{tile}"
    for told in steps_of.told(p, _SMALLEST):
        if math.prod(forward.buffer_shapes(told.side.problem, told.side)["map"]) > (
            INT32_MAX
        ):
            return "the map of a mask would have more than 2^31 - 1 words"
    return None


def _kind_refuses(problem: AttentionProblem) -> str | None:
    p = problem
    if reason := refuses_extras(p, *_EXTRAS):
        return reason
    if p.segments and max(p.q_len, p.kv_len) > _ROWS * emit.MOST_BLOCKS:
        return f"segments and a length above {_ROWS * emit.MOST_BLOCKS}"
    if p.bias and p.bias_dtype not in forward.BIAS_DTYPES:
        return (
            f"a bias of dtype {p.bias_dtype}; it reads {', '.join(forward.BIAS_DTYPES)}"
        )
    if rules.shifts(p) and (p.window or p.mask or p.bias or p.alibi):
        return (
            "positions from ends that each example has its own of, with a window, a "
            "mask, a bias or slopes"
        )
    if p.window and max(map(abs, p.window)) > _LONGEST:
        return f"window {p.window} with a side above {_LONGEST}"
    return None
