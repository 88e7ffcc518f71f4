"""attention_decode_sm90: few queries against long caches on Hopper.

Here are the reasons that refuse problems, the legal configs and the one to use without
measurements; the kernels' text is in ``emit.attention_decode_sm90``. Caller: the op's
record (``ops.attention.op``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import attention_decode_sm90 as emit
from tracea_jax.emit.attention_decode_sm90 import AttentionDecodeSm90Config
from tracea_jax.emit.attention_sm90 import DTYPES, ROWS
from tracea_jax.emit.kernel import Kernel
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_cudnn import ATTENTION_CUDNN
from tracea_jax.variants.attention_mask import refuses_extras, refuses_mask
from tracea_jax.variants.attention_sm90_wins import FAST_MEMORY_BYTES
from tracea_jax.variants.base import Call
from tracea_jax.variants.space import (
    Rule,
    Space,
    check_choices,
    check_rules,
    grid,
    legal_space,
)
from tracea_jax.variants.steps import Buffer, Launch, Steps

_WIDEST_HEAD = 256
_MOST_QUERIES = 64
_FEW_QUERIES = 16  # more were not measured
_FEWEST_KEYS = 100
# Keys, with which it was compared with cuDNN, by the columns of a head; other wide ones
# only where there are many tiles.
_LONG_ENOUGH, _LONG_ENOUGH_OF_WIDEST = 1024, 512
_SEVERAL, _MANY_KEYS = 8, 2048  # queries and keys, with which it was without lengths
_FEW_BYTES = 100 << 20  # of keys and values
_MEASURED_HEAD = 128  # columns
_LARGE_BYTES = 1 << 27  # so much is worth a second kernel, for occupying all blocks
_LONGEST = 1 << 30  # positions that may be added without overflow
_SCALES = (2.0**-60, 2.0**20)  # what masked scores, -2^100, survive
_LARGEST_PARTS = 1 << 28  # bytes of sums
_MOST_ITEMS = 1 << 30  # parts, or tiles: a number of thread blocks more fits int32
CHOICES = {
    "tile_kv": (32, 64, 128),
    "blocks_per_sm": (1, 2, 3),
    "splits": (1, 2, 3, 4, 6, 8, 11, 16, 22, 33, 44, 66),
    "persistent": (False, True),
}
# Registers of a thread for scores and sums, by blocks that share a multiprocessor.
_REGISTERS = {1: 208, 2: 136, 3: 88}


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionDecodeSm90:
    """The variant attention_decode_sm90; see ``variants.base.Variant``."""

    name: str = "attention_decode_sm90"
    config_type: type = AttentionDecodeSm90Config
    sources: tuple[str, ...] = (
        "cuda/attention_decode_sm90.cuh",
        "cuda/attention_combine.cuh",
    )

    def why_not(self, problem: AttentionProblem, device: Device) -> str | None:
        return (
            _device_refuses(device)
            or _head_refuses(problem)
            or _size_refuses(problem)
            or _kind_refuses(problem)
        )

    def check(
        self,
        problem: AttentionProblem,
        config: AttentionDecodeSm90Config,
        device: Device,
    ) -> None:
        check_choices(config, CHOICES)
        check_rules(_RULES, problem, config, device)

    def space(self, problem: AttentionProblem, device: Device) -> Space:
        return legal_space(
            grid(**CHOICES), AttentionDecodeSm90Config, _RULES, problem, device
        )

    def heuristic(
        self, problem: AttentionProblem, device: Device
    ) -> AttentionDecodeSm90Config:
        assert isinstance(device, CudaDevice)
        wide = problem.head_dim > 128
        config = AttentionDecodeSm90Config(tile_kv=64, blocks_per_sm=1 if wide else 2)
        config = dataclasses.replace(config, splits=_splits(problem, config, device))
        return dataclasses.replace(config, persistent=_stays(problem, config, device))

    def expects_to_win(self, problem: AttentionProblem, device: Device) -> bool:
        """Returns whether cuDNN is not expected to win, or sequences are long.

        By ``attention_decode.json`` of an H100 cuDNN took 1.00 to 1.02 times as long
        for 64 sequences of 2049 keys, 8 of 32768 and 1 of 131072, with 8 heads of keys
        each, and 1.11 times for 16 of 1024. On an H200, whose memory is faster, it took
        0.93 to 0.96 times as long for the first three, and 1.10 times for the last. It
        was also slower for several queries of many keys without lengths, and for heads
        of 256, on an H100; no results are kept of these.
        """
        assert isinstance(device, CudaDevice)
        p = problem
        if p.q_len > _FEW_QUERIES or p.kv_len < _FEWEST_KEYS:
            return False
        theirs = ATTENTION_CUDNN.why_not(p, device) is None
        if not (theirs and ATTENTION_CUDNN.expects_to_win(p, device)):
            return True
        rows = p.q_len * (p.heads // p.kv_heads)
        is_widest = p.head_dim == _WIDEST_HEAD
        long_enough = _LONG_ENOUGH_OF_WIDEST if is_widest else _LONG_ENOUGH
        if rows > ROWS or p.kv_len < long_enough:
            return False
        if not p.kv_lengths:
            is_measured = p.head_dim == _MEASURED_HEAD and p.kv_len >= _MANY_KEYS
            return is_measured and p.q_len >= _SEVERAL
        if device.memory_bytes >= FAST_MEMORY_BYTES and p.bytes > _FEW_BYTES:
            return False
        if emit.tiles(p) >= 2 * device.sm_count:
            return True
        return p.head_dim <= _MEASURED_HEAD or is_widest

    def call(
        self,
        problem: AttentionProblem,
        config: AttentionDecodeSm90Config,
        device: Device,
    ) -> Call:
        assert isinstance(device, CudaDevice)
        operands = ("q", "k", "v", *(("kv_lengths",) * problem.kv_lengths))
        kernels = emit.kernels(problem, config, device)
        return in_steps(problem, config, kernels, operands)


ATTENTION_DECODE_SM90 = AttentionDecodeSm90()


def in_steps(
    problem: AttentionProblem,
    config: AttentionDecodeSm90Config,
    kernels: Sequence[Kernel],
    operands: tuple[str, ...],
) -> Call:
    """The kernels as one call of these operands."""
    attend, *combine = kernels
    if not combine:
        return attend
    p = problem
    parts = (p.batch, p.q_len, p.heads, config.splits)
    results = ("o", *(("lse",) * p.saves_lse))
    between = ("sums", "totals")
    return Steps(
        operands=operands,
        results=results,
        scratch=(
            Buffer(name="sums", shape=(*parts, p.head_dim), dtype="float32"),
            Buffer(name="totals", shape=(*parts, 2), dtype="float32"),
        ),
        steps=(
            Launch(name="attend", kernel=attend, reads=operands, writes=between),
            Launch(name="combine", kernel=combine[0], reads=between, writes=results),
        ),
    )


def _splits(
    problem: AttentionProblem, config: AttentionDecodeSm90Config, device: CudaDevice
) -> int:
    """The fewest parts that occupy the multiprocessors almost as well as any.

    No part is shorter than two blocks of keys.
    """
    is_large = problem.bytes >= _LARGE_BYTES
    at_once = device.sm_count * (config.blocks_per_sm if is_large else 1)
    tiles = emit.tiles(problem)
    longest = max(1, problem.kv_len // (2 * config.tile_kv))

    def occupied(splits: int) -> float:
        waves = -(-tiles * splits // at_once)
        return tiles * splits / (waves * at_once)

    legal = [
        n
        for n in CHOICES["splits"]
        if n <= longest and not _parts_refuse(problem, _with(config, n))
    ]
    best = max(map(occupied, legal))
    return next(n for n in legal if occupied(n) >= 0.9 * best)


def _stays(
    problem: AttentionProblem, config: AttentionDecodeSm90Config, device: CudaDevice
) -> bool:
    """Returns whether a block goes on with another part, whose copies follow its own.

    Where memory is faster, beginning a block anew takes longer beside reading a part.
    """
    parts = emit.tiles(problem) * config.splits
    is_fast = device.memory_bytes >= FAST_MEMORY_BYTES
    is_more = parts > device.sm_count * config.blocks_per_sm
    return is_fast and is_more and problem.bytes >= _LARGE_BYTES


def _with(config: AttentionDecodeSm90Config, splits: int) -> AttentionDecodeSm90Config:
    return dataclasses.replace(config, splits=splits)


# --- configs --------------------------------------------------------------------------


def _registers(problem: AttentionProblem, config: Any) -> Any:
    """Registers of a thread: scores, sums, and those of masks with two sides."""
    left, _ = emit.sides(problem)
    return config.tile_kv // 2 + problem.head_dim // 2 + 16 * (left is not None)


def _most_registers(config: Any) -> Any:
    counts = [config.blocks_per_sm == n for n in _REGISTERS]
    return np.select(counts, list(_REGISTERS.values()))


def _parts_bytes(problem: AttentionProblem, config: Any) -> Any:
    rows = problem.batch * problem.q_len * problem.heads
    return rows * (problem.head_dim + 2) * 4 * config.splits


def _parts_refuse(problem: AttentionProblem, config: Any) -> Any:
    """True if the sums of all parts are too large, or too many blocks are launched."""
    too_large = _parts_bytes(problem, config) > _LARGEST_PARTS
    too_many = emit.tiles(problem) * config.splits > _MOST_ITEMS
    return np.logical_and(config.splits > 1, np.logical_or(too_large, too_many))


_RULES = (
    Rule(
        code="smem",
        refuses=lambda p, c, d: emit.slots(p, c, d) < emit.FEWEST_SLOTS,
        why=lambda p, c, d: (
            f"shared memory holds {emit.slots(p, c, d)} blocks of {c.tile_kv} keys or "
            f"values; the config needs {emit.FEWEST_SLOTS}"
        ),
    ),
    Rule(
        code="registers",
        refuses=lambda p, c, d: _registers(p, c) > _most_registers(c),
        why=lambda p, c, d: (
            f"scores and sums take {_registers(p, c)} registers of a thread; "
            f"with {c.blocks_per_sm} blocks on a multiprocessor it has "
            f"{_most_registers(c)}"
        ),
    ),
    Rule(
        code="parts",
        refuses=lambda p, c, d: _parts_refuse(p, c),
        why=lambda p, c, d: (
            f"the sums of {c.splits} parts take {_parts_bytes(p, c)} bytes; at most "
            f"{_LARGEST_PARTS} are spent on them"
        ),
    ),
)


# --- problems -------------------------------------------------------------------------


def _device_refuses(device: Device) -> str | None:
    if not isinstance(device, CudaDevice):
        return f"it runs on NVIDIA GPUs; the device is {device.platform}"
    if device.capability != (9, 0):
        return f"wgmma exists only on sm_90a; the device is {device.arch}"
    return None


def _head_refuses(problem: AttentionProblem) -> str | None:
    p = problem
    if p.dtype not in DTYPES:
        return f"operands of dtype {p.dtype}; it takes {', '.join(DTYPES)}"
    if p.head_dim % 8 or not 0 < p.head_dim <= _WIDEST_HEAD:
        return f"head_dim={p.head_dim}; it takes multiples of 8 up to {_WIDEST_HEAD}"
    if p.kv_heads and p.heads // p.kv_heads > ROWS:
        return f"{p.heads // p.kv_heads} heads share keys; it takes {ROWS} at most"
    return None


def _size_refuses(problem: AttentionProblem) -> str | None:
    p = problem
    if not all((p.batch, p.q_len, p.kv_len, p.heads, p.kv_heads)):
        return "there is nothing to compute"
    if p.q_len > _MOST_QUERIES:
        return f"{p.q_len} queries; it takes {_MOST_QUERIES} at most"
    if p.kv_len > _LONGEST:
        return f"a length above {_LONGEST}"
    if emit.tiles(p) > _MOST_ITEMS:
        return "there are more than 2^30 heads of keys in all sequences"
    low, high = _SCALES
    if not low <= p.scale <= high:
        return f"scale={p.scale}; it takes scales from {low:.3g} to {high:.3g}"
    return None


def _kind_refuses(problem: AttentionProblem) -> str | None:
    p = problem
    if p.direction == "backward":
        return "it computes no gradients"
    if reason := refuses_extras(p, "aligned_at_end"):
        return reason
    if p.bias:
        return "it adds no bias"
    if p.mask:
        return refuses_mask(p) or "it reads no mask"
    if p.q_lengths:
        return "it takes no numbers of queries"
    if p.window and max(map(abs, p.window)) > _LONGEST:
        return f"window {p.window} with a side above {_LONGEST}"
    return None
