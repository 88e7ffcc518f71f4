"""attention_sm90: flash attention on Hopper's tensor cores, compiled on demand.

Here are the reasons that refuse problems, the legal configs and the one to use without
measurements; the kernel's numbers and text are in
``emit.attention_sm90`` and ``emit.attention_sm90_kernel``. Caller: the op's record
(``ops.attention.op``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as emit
from tracea_jax.emit import attention_sm90_kernel as text
from tracea_jax.emit.attention_sm90 import AttentionSm90Config
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_sm90_space import (
    CHOICES,
    KEYS,
    RULES,
    WIDE,
    widest,
)
from tracea_jax.variants.attention_sm90_wins import expects_to_win
from tracea_jax.variants.attention_steps import map_buffers, map_step, optional_operands
from tracea_jax.variants.base import Call
from tracea_jax.variants.cuda_gemm import INT32_MAX
from tracea_jax.variants.space import (
    Space,
    check_choices,
    check_rules,
    first_refusal,
    grid,
    legal_space,
)
from tracea_jax.variants.steps import Buffer, Expression, Launch, Step, Steps, zeros

_WIDEST_HEAD = 256
_LONGEST = 1 << 30  # positions that may be added without overflow
_SCALES = (2.0**-60, 2.0**20)  # what masked scores, -2^100, survive
_ROUNDS_OF_PACKED = 1.1  # as many times the rounds of packed heads are worth packing
# The config whose map of blocks is largest.
_SMALLEST = AttentionSm90Config(tile_q=64, tile_kv=48)
_Tile = tuple[int, tuple[int, int], tuple[float, float]]
# For heads up to so many columns: queries of a tile, keys without and with a mask, and
# the times that a score then takes, relative to other tiles for the same heads. These
# tiles are the fastest of ``attention.json`` of an H200, or next to some that are.
_TILES = (
    (64, ((192, (128, 96), (1.0, 1.0)), (128, (128, 128), (1.25, 1.14)))),
    (96, ((192, (96, 80), (1.0, 1.0)), (128, (128, 128), (1.14, 1.14)))),
    (128, ((128, (128, 128), (1.0, 1.0)),)),
    (192, ((128, (112, 96), (1.0, 1.0)),)),
    (256, ((128, (80, 64), (1.0, 1.0)),)),
)
_TILES_NARROW_VALUES = ((128, (128, 112), (1.0, 1.0)),)
# Causal tiles of up to so many rounds that are dealt out: drawing takes longer than
# unequal work, of up to so many tiles of a head.
_FEW_ROUNDS, _FEW_TILES = 2, 16
# For heads up to 64 columns and windows up to 512 keys: short blocks, which consumers
# that do not see them pass over. Other tiles were slower.
_OF_WINDOWS = AttentionSm90Config(
    tile_q=192, tile_kv=64, stages=4, overlap=False, schedule="static"
)
_WIDEST_WINDOW = 512
_EVEN = 4  # times the window: with fewer keys tiles have unequal work


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSm90:
    """The variant attention_sm90; for its methods see ``variants.base.Variant``."""

    name: str = "attention_sm90"
    config_type: type = AttentionSm90Config
    sources: tuple[str, ...] = ("cuda/attention_sm90.cuh", "cuda/attention_map.cuh")

    def why_not(self, problem: AttentionProblem, device: Device) -> str | None:
        return (
            device_refuses(device)
            or head_refuses(problem)
            or size_refuses(problem)
            or kind_refuses(problem)
        )

    def check(
        self, problem: AttentionProblem, config: AttentionSm90Config, device: Device
    ) -> None:
        check_choices(config, CHOICES)
        check_rules(RULES, problem, config, device)

    def space(self, problem: AttentionProblem, device: Device) -> Space:
        return legal_space(grid(**CHOICES), AttentionSm90Config, RULES, problem, device)

    def heuristic(
        self, problem: AttentionProblem, device: Device
    ) -> AttentionSm90Config:
        return self.likely(problem, device, 1)[0]

    def likely(
        self, problem: AttentionProblem, device: Device, count: int
    ) -> tuple[AttentionSm90Config, ...]:
        """So many legal configs of different tiles, the likely fastest first."""
        return tuple(_likely(problem, device)[:count])

    def expects_to_win(self, problem: AttentionProblem, device: Device) -> bool:
        return expects_to_win(problem, self.heuristic(problem, device), device)

    def call(
        self, problem: AttentionProblem, config: AttentionSm90Config, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        kernel = text.kernel(problem, config, device)
        before = tuple(_before(problem, config, device))
        if not before:
            return kernel
        written = [name for step in before for name in step.writes]
        reads = emit.operands(problem, config)
        results = ("o", *(("lse",) * problem.saves_lse))
        updated = ("counter",) * emit.draws(config)
        attend = Launch(
            name="attend", kernel=kernel, reads=reads, writes=(*results, *updated)
        )
        given = [name for name in optional_operands(problem) if name not in written]
        return Steps(
            operands=("q", "k", "v", *given),
            results=results,
            scratch=tuple(_buffers(problem, config)),
            steps=(*before, attend),
        )


ATTENTION_SM90 = AttentionSm90()


def _before(
    problem: AttentionProblem, config: AttentionSm90Config, device: CudaDevice
) -> Iterator[Step]:
    """Steps before the kernel."""
    if rules.is_mapped(problem):
        yield map_step(problem, config, device)
    elif emit.draws(config):
        yield Expression(
            name="zeros",
            function=zeros,
            reads=(),
            writes=("counter",),
            arguments=(("shape", (1,)), ("dtype", "uint32")),
        )


def _buffers(
    problem: AttentionProblem, config: AttentionSm90Config
) -> Iterator[Buffer]:
    """Buffers that are written before the kernel starts."""
    yield from map_buffers(problem, config)
    if emit.draws(config):
        yield Buffer(name="counter", shape=(1,), dtype="uint32")


def _likely(problem: AttentionProblem, device: Any) -> list[AttentionSm90Config]:
    """A config for each tile, that with least time for all its scores first.

    Large tiles are faster, but compute more scores that nobody sees. Tiles of equal
    work are dealt out; of unequal work they are drawn. Consumers that overlap their own
    products and softmax need registers for both, which pays where turns alone do not
    hide the softmax, and where no mask takes them. On an H100 turns alone were enough
    for heads of 64, and for values of 128 columns with keys of 192.
    """
    masked = bool(rules.masks(problem))
    wide = widest(problem)
    left, _ = rules.window(problem)
    if left is not None and left < _WIDEST_WINDOW and wide <= 64:
        # Of a window that many of the first queries see only a part of.
        is_uneven = (left + 1) * _EVEN >= problem.kv_len
        schedule = "drawn" if is_uneven else "static"
        short = dataclasses.replace(_OF_WINDOWS, schedule=schedule)
        if first_refusal(RULES, problem, short, device) is None:
            return [short]
    tiles = next(tiles for dim, tiles in _TILES if wide <= dim)
    if problem.columns <= 128 < problem.head_dim <= 192:
        tiles = _TILES_NARROW_VALUES
    if any(_divide(problem, tile_q) for tile_q, *_ in tiles):
        tiles = tuple(tile for tile in tiles if _divide(problem, tile[0]))

    def time(tile: _Tile) -> float:
        found = config(tile)
        at_once = emit.scores(problem, found) * tile[-1][masked]
        if found.schedule != "static":
            return at_once
        # Tiles of equal work take whole rounds.
        count = emit.tile_count(problem, found)
        return at_once * -(-count // device.sm_count) / count

    def config(tile: _Tile) -> AttentionSm90Config:
        tile_q, keys, _ = tile
        return AttentionSm90Config(
            tile_q=tile_q,
            tile_kv=_fewer_keys(problem, tile_q, keys[masked], device),
            overlap=problem.columns > 128 or (64 < wide <= 96 and not masked),
            schedule="drawn" if masked or problem.q_lengths else "static",
        )

    found = [config(tile) for tile in sorted(tiles, key=time)]
    found = [_dealt_if_few(problem, config, device) for config in found]
    found = [_overlapped_if_whole(problem, config) for config in found]
    return [_packed_if_faster(problem, config, device) for config in found]


def _dealt_if_few(
    problem: AttentionProblem, config: AttentionSm90Config, device: Any
) -> AttentionSm90Config:
    """The config; of few causal tiles without a counter, which a kernel has to clear.

    On an H100 that was faster with up to two rounds of tiles, but for 4096 positions;
    no results are kept.
    """
    p = problem
    looks = rules.is_mapped(p) or p.q_lengths or p.kv_lengths
    if looks or rules.window(p) != (None, 0) or p.q_len > _FEW_TILES * config.tile_q:
        return config
    if emit.tile_count(p, config) > _FEW_ROUNDS * device.sm_count:
        return config
    return dataclasses.replace(config, schedule="static")


def _overlapped_if_whole(
    problem: AttentionProblem, config: AttentionSm90Config
) -> AttentionSm90Config:
    """The config; of masks of whole blocks with overlap, and without turns.

    On an H100 that was faster than turns, for heads of 128 columns, where a tenth of
    the blocks or more is seen, and as fast where fewer are. ``attention_masks.json``
    has the times of this choice.
    """
    p = problem
    adds = p.bias is not None or p.alibi is not None or p.soft_cap is not None
    if adds or not 96 < widest(p) <= WIDE:
        return config
    if not rules.sees_whole(problem, config):
        return config
    return dataclasses.replace(config, overlap=True, ping_pong=False)


def _packed_if_faster(
    problem: AttentionProblem, config: AttentionSm90Config, device: Any
) -> AttentionSm90Config:
    """The config, with packed heads if that leaves clearly fewer rounds of tiles.

    Tiles of few queries are then full. With as many rounds packed heads were slower.
    """
    packed = dataclasses.replace(config, packed=True)
    if first_refusal(RULES, problem, packed, device) is not None:
        return config
    rounds = [
        -(-emit.tile_count(problem, c) // device.sm_count) for c in (config, packed)
    ]
    return packed if rounds[0] > _ROUNDS_OF_PACKED * rounds[1] else config


def _divide(problem: AttentionProblem, tile_q: int, tile_kv: int = 1) -> bool:
    """True if tiles divide the blocks of a mask, which then needs no look at scores."""
    queries, keys = problem.mask_block or (1, 1)
    return queries % tile_q == 0 and keys % tile_kv == 0


def _fewer_keys(problem: AttentionProblem, tile_q: int, most: int, device: Any) -> int:
    """The largest block of at most so many keys that a legal config has.

    Preferably one that divides the blocks of a mask.
    """

    def fits(keys: int) -> bool:
        config = AttentionSm90Config(tile_q=tile_q, tile_kv=keys)
        return first_refusal(RULES, problem, config, device) is None

    legal = [n for n in KEYS if n <= most and fits(n)]
    dividing = [n for n in legal if _divide(problem, tile_q, n)]
    return max(dividing or legal, default=min(KEYS))


def device_refuses(device: Device) -> str | None:
    if not isinstance(device, CudaDevice):
        return f"it runs on NVIDIA GPUs; the device is {device.platform}"
    if device.capability != (9, 0):
        return f"wgmma exists only on sm_90a; the device is {device.arch}"
    return None


def head_refuses(problem: AttentionProblem) -> str | None:
    if problem.dtype not in emit.DTYPES:
        return f"operands of dtype {problem.dtype}; it takes {', '.join(emit.DTYPES)}"
    for name, columns in (
        ("head_dim", problem.head_dim),
        ("value_dim", problem.columns),
    ):
        if columns % 8 or not 0 < columns <= _WIDEST_HEAD:
            return f"{name}={columns}; it takes multiples of 8 up to {_WIDEST_HEAD}"
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
    if p.soft_cap is not None and not low <= p.soft_cap <= high:
        return f"soft_cap={p.soft_cap}; it takes caps from {low:.3g} to {high:.3g}"
    if math.prod(emit.buffer_shapes(p, _SMALLEST)["map"]) > INT32_MAX:
        return "the map of a mask would have more than 2^31 - 1 words"
    return None


def kind_refuses(problem: AttentionProblem) -> str | None:
    p = problem
    if p.direction == "backward":
        return "it computes no gradients"
    if p.bias and p.bias_dtype not in emit.BIAS_DTYPES:
        return f"a bias of dtype {p.bias_dtype}; it reads {', '.join(emit.BIAS_DTYPES)}"
    if p.window and max(map(abs, p.window)) > _LONGEST:
        return f"window {p.window} with a side above {_LONGEST}"
    return None
