"""attention_sm90: flash attention on Hopper's tensor cores, compiled on demand.

Here are the reasons that refuse problems, the legal configs and the one to use without
measurements; the kernel's text is in ``emit.attention_sm90``. Caller: the op's record
(``ops.attention.op``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import attention_sm90 as emit
from tracea_jax.emit.attention_sm90 import AttentionSm90Config
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_mask import refuses_extras, refuses_mask
from tracea_jax.variants.base import Call
from tracea_jax.variants.cuda_gemm import INT32_MAX
from tracea_jax.variants.space import (
    Rule,
    Space,
    check_choices,
    first_refusal,
    grid,
    legal_columns,
)
from tracea_jax.variants.steps import Buffer, Expression, Launch, Steps, zeros

_WIDEST_HEAD = 256
_LONGEST = 1 << 30  # positions that may be added without overflow
_SCALES = (2.0**-60, 2.0**20)  # what masked scores, -2^100, survive
# Fewest queries and keys with which it was at least as fast as cuDNN on an H200, by the
# columns of a head; other heads were not measured.
_FEWEST = {64: 1024, 128: 512, 256: 512}
CHOICES = {
    "tile_q": (64, 128, 192),
    "tile_kv": (48, 64, 80, 96, 112, 128, 144, 160, 176, 192),
    "stages": (2, 3, 4),
    "ping_pong": (False, True),
    "overlap": (False, True),
    "schedule": emit.SCHEDULES,
}
# What a thread has registers for, by the number of consumers, without spilling any:
# without a mask, and with one. See ``_registers``.
_PLAIN = {1: 208, 2: 196, 3: 128}
_MASKED = {1: 256, 2: 224, 3: 152}
_WIDEST = {1: 256, 2: 256, 3: 128}  # head that one instruction finds registers for

# For heads up to so many columns: queries of a tile, keys without and with a mask, and
# the time that a score then takes, relative to other tiles for the same heads. These
# tiles were fastest on an H200, or are next to some that were.
_TILES = (
    (64, ((192, 128, 96, 1.0), (128, 128, 128, 1.14))),
    (96, ((192, 96, 80, 1.0), (128, 128, 128, 1.14))),
    (128, ((128, 128, 128, 1.0),)),
    (192, ((128, 112, 96, 1.0),)),
    (256, ((128, 80, 64, 1.0),)),
)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSm90:
    """The variant attention_sm90; for its methods see ``variants.base.Variant``."""

    name: str = "attention_sm90"
    config_type: type = AttentionSm90Config
    sources: tuple[str, ...] = ("cuda/attention_sm90.cuh",)

    def why_not(self, problem: AttentionProblem, device: Device) -> str | None:
        return (
            device_refuses(device)
            or _head_refuses(problem)
            or size_refuses(problem)
            or _kind_refuses(problem)
        )

    def check(
        self, problem: AttentionProblem, config: AttentionSm90Config, device: Device
    ) -> None:
        check_choices(config, CHOICES)
        if rule := first_refusal(_RULES, problem, config, device):
            raise ValueError(rule.why(problem, config, device))

    def space(self, problem: AttentionProblem, device: Device) -> Space:
        columns, pruned = legal_columns(
            grid(**CHOICES), AttentionSm90Config, _RULES, problem, device
        )
        return Space(config_type=AttentionSm90Config, columns=columns, pruned=pruned)

    def heuristic(
        self, problem: AttentionProblem, device: Device
    ) -> AttentionSm90Config:
        return _usual(problem)

    def expects_to_win(self, problem: AttentionProblem, device: Device) -> bool:
        fewest = _FEWEST.get(problem.head_dim)
        return fewest is not None and min(problem.q_len, problem.kv_len) >= fewest

    def call(
        self, problem: AttentionProblem, config: AttentionSm90Config, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        kernel = emit.kernel(problem, config, device)
        if not emit.draws(config):
            return kernel
        lengths = ("q_lengths",) * problem.q_lengths
        lengths += ("kv_lengths",) * problem.kv_lengths
        operands = ("q", "k", "v", *lengths)
        results = ("o", *(("lse",) * problem.saves_lse))
        counter = Buffer(name="counter", shape=(1,), dtype="uint32")
        start = Expression(
            name="start",
            function=zeros,
            reads=(),
            writes=("counter",),
            arguments=(("shape", (1,)), ("dtype", "uint32")),
        )
        attend = Launch(
            name="attend",
            kernel=kernel,
            reads=(*operands, "counter"),
            writes=(*results, "counter"),
        )
        return Steps(
            operands=operands,
            results=results,
            scratch=(counter,),
            steps=(start, attend),
        )


ATTENTION_SM90 = AttentionSm90()


def _usual(problem: AttentionProblem) -> AttentionSm90Config:
    """The tile with least time for all scores that it computes.

    Large tiles are faster, but compute more scores that nobody sees. Tiles of equal
    work are dealt out; of unequal work they are drawn. Consumers that overlap their own
    products and softmax need registers for both, which pays where turns alone do not
    hide the softmax, and where no mask takes them.
    """
    masked = emit.masks(problem)
    wide = problem.head_dim > 128
    tiles = next(tiles for dim, tiles in _TILES if problem.head_dim <= dim)

    def time(tile: tuple[int, int, int, float]) -> float:
        return emit.scores(problem, config(tile)) * tile[-1]

    def config(tile: tuple[int, int, int, float]) -> AttentionSm90Config:
        tile_q, plain, partial, _ = tile
        return AttentionSm90Config(
            tile_q=tile_q,
            tile_kv=partial if masked else plain,
            overlap=wide or (problem.head_dim <= 96 and not masked),
            schedule="drawn" if masked or problem.q_lengths else "static",
        )

    return config(min(tiles, key=time))


def _registers(problem: AttentionProblem, config: Any) -> Any:
    """Of a thread: scores, rounded weights and sums of 64 queries in a warpgroup.

    While scores are masked, as many again as there are scores.
    """
    scores, sums = config.tile_kv // 2, problem.head_dim // 2
    return scores * (1 + emit.masks(problem)) + scores // 2 + sums


def _most_registers(problem: AttentionProblem, config: Any) -> Any:
    return _of_consumers(_MASKED if emit.masks(problem) else _PLAIN, config)


def _of_consumers(table: dict[int, int], config: Any) -> Any:
    """What the table says for the config's number of consumers."""
    counts = [config.consumers == n for n in table]
    return np.select(counts, list(table.values()))


def _smem_bytes(problem: AttentionProblem, config: Any) -> Any:
    """The least shared memory that the config takes."""
    return emit.smem_bytes(problem, config, in_place=True)


_RULES = (
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
        refuses=lambda p, c, d: p.head_dim > _of_consumers(_WIDEST, c),
        why=lambda p, c, d: (
            f"{c.consumers} consumers have registers for heads up to "
            f"{_of_consumers(_WIDEST, c)}; head_dim={p.head_dim}"
        ),
    ),
    Rule(
        code="turns",
        refuses=lambda p, c, d: np.logical_and(c.ping_pong, c.consumers == 1),
        why=lambda p, c, d: "one consumer has nobody to take turns with",
    ),
)


def device_refuses(device: Device) -> str | None:
    if not isinstance(device, CudaDevice):
        return f"it runs on NVIDIA GPUs; the device is {device.platform}"
    if device.capability != (9, 0):
        return f"wgmma exists only on sm_90a; the device is {device.arch}"
    return None


def _head_refuses(problem: AttentionProblem) -> str | None:
    if problem.dtype not in emit.DTYPES:
        return f"operands of dtype {problem.dtype}; it takes {', '.join(emit.DTYPES)}"
    if problem.head_dim % 8 or not 0 < problem.head_dim <= _WIDEST_HEAD:
        return (
            f"head_dim={problem.head_dim}; it takes multiples of 8 up to {_WIDEST_HEAD}"
        )
    return None


def size_refuses(problem: AttentionProblem) -> str | None:
    p = problem
    if not all((p.batch, p.q_len, p.kv_len, p.heads, p.kv_heads)):
        return "there is nothing to compute"
    if max(p.q_len, p.kv_len) > _LONGEST:
        return f"a length above {_LONGEST}"
    if -(-p.q_len // emit.ROWS) * p.heads * p.batch > INT32_MAX:
        return "the output has more than 2^31 - 1 tiles of 64 queries"
    low, high = _SCALES
    if not low <= p.scale <= high:
        return f"scale={p.scale}; it takes scales from {low:.3g} to {high:.3g}"
    return None


def _kind_refuses(problem: AttentionProblem) -> str | None:
    p = problem
    if p.direction == "backward":
        return "it computes no gradients"
    if reason := refuses_extras(p):
        return reason
    if p.bias:
        return "it adds no bias"
    if p.mask:
        return refuses_mask(p) or "it reads no mask"
    if p.window and max(map(abs, p.window)) > _LONGEST:
        return f"window {p.window} with a side above {_LONGEST}"
    return None
