"""gemm_sm80: the portable mma.sync GEMM for every NVIDIA GPU since Ampere.

Here are the reasons that refuse problems, the rules that refuse configs, and the model
that ranks configs; the kernel's text is written in ``emit.gemm_sm80``. Caller: the op's
record (``ops.matmul.op``). All formulas take a config whose fields may be columns. One
stage of a block's ring takes, in cycles of an SM:

    multiply = tile_m tile_n tile_k / macs                           tensor cores
    smem     = (bytes the warps read and the copies write) / 128
    issue    = (copies, each of a warp) / rate
    busy     = max(multiply, smem, issue)
    stage    = max(busy, latency / (stages - 1) / blocks of an SM)

A problem takes as many stages as the SM with the most blocks works through, and an
epilogue for each block, but at least the time to move its bytes through memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import gemm_sm80 as emit
from tracea_jax.emit.gemm_sm80 import GemmSm80Config
from tracea_jax.problem import ITEMSIZE, GemmProblem
from tracea_jax.variants.base import Call
from tracea_jax.variants.cuda_gemm import (
    EXACT_PRECISIONS,
    INT32_MAX,
    MAX_BAND,
    idle_stages,
    refused_extents,
    refused_results,
    repeated_raster,
)
from tracea_jax.variants.space import (
    Columns,
    Rule,
    Space,
    as_config,
    check_choices,
    check_ranges,
    check_rules,
    grid,
    legal_columns,
)

CHOICES: dict[str, tuple[int, ...]] = {
    "tile_m": (32, 64, 128, 256),
    "tile_n": (32, 64, 128, 256),
    "tile_k": (16, 32, 64),
    "warps_m": (1, 2, 4),
    "warps_n": (1, 2, 4),
}
GRID = CHOICES | {"stages": (3, 4, 6), "raster_band": (2, 8)}
USUAL_BAND = 8
_USUAL_RING_BYTES = 256  # along k
MAX_STAGES = 16
_RANGES = {"stages": (2, MAX_STAGES), "raster_band": (1, MAX_BAND)}
_ROW_BYTES = (64, 128)  # of a tile along k: 2 or 4 steps
_MOST_WARPS = 8
_LARGEST_WARP_SIDE = 64
# A thread runs out of registers if its accumulators and the copies that it starts for a
# stage are more than this together. Elements of odd rows pass through registers, too.
_MOST_WITH_COPIES = 160
_MOST_WITH_ODD_COPIES = 128
_MOST_WITH_ELEMENTS = 112
_WARP_TILES = (32, 64)  # sides of the warp tiles that are worth measuring
_WARPS = (4, 8)  # numbers of warps that are worth measuring
_MOST_ELONGATED = 4  # ratio of the sides of a tile worth measuring, at most
_SMALLEST = GemmSm80Config(
    tile_m=32, tile_n=32, tile_k=16, warps_m=1, warps_n=1, stages=2
)


@dataclasses.dataclass(frozen=True, slots=True)
class GemmSm80:
    """The variant gemm_sm80; for its methods see ``variants.base.Variant``."""

    name: str = "gemm_sm80"
    config_type: type = GemmSm80Config
    sources: tuple[str, ...] = ("cuda/gemm_sm80.cuh",)

    def reasons(self, problem: GemmProblem, device: Device) -> tuple[str, ...]:
        """Every sentence why the problem cannot be served; empty if it can."""
        return tuple(_reasons(problem, device))

    def why_not(self, problem: GemmProblem, device: Device) -> str | None:
        return next(_reasons(problem, device), None)

    def check(
        self, problem: GemmProblem, config: GemmSm80Config, device: Device
    ) -> None:
        assert isinstance(device, CudaDevice)
        check_choices(config, CHOICES)
        check_ranges(config, _RANGES)
        check_rules(LEGAL, problem, config, device)

    def space(self, problem: GemmProblem, device: Device) -> Space:
        assert isinstance(device, CudaDevice)
        columns, pruned = columns_of(problem, device, **GRID)
        return dataclasses.replace(
            self.described(problem, columns, device), pruned=pruned
        )

    def described(
        self, problem: GemmProblem, columns: Columns, device: Device
    ) -> Space:
        assert isinstance(device, CudaDevice)
        config = as_config(GemmSm80Config, columns)
        return Space(
            config_type=GemmSm80Config,
            columns=columns,
            derived=derived(problem, config, device),
            modelled_us=modelled_us(problem, config, device),
        )

    def heuristic(self, problem: GemmProblem, device: Device) -> GemmSm80Config:
        assert isinstance(device, CudaDevice)
        columns, _ = columns_of(problem, device, **GRID)
        config = as_config(GemmSm80Config, columns)
        # Among configs that the model cannot tell apart: the usual band, then larger
        # tiles, then the usual depth of the ring.
        time = np.log(modelled_us(problem, config, device)).round(3)
        larger = -config.tile_m * config.tile_n
        unusual = config.raster_band != USUAL_BAND
        depth = abs(config.stages * _row_bytes(problem, config) - _USUAL_RING_BYTES)
        best = int(np.lexsort((depth, larger, unusual, time))[0])
        return Space(config_type=GemmSm80Config, columns=columns).config(best)

    def expects_to_win(self, problem: GemmProblem, device: Device) -> bool:
        # XLA's libraries and its Triton kernels are tuned for these GPUs.
        return False

    def call(
        self, problem: GemmProblem, config: GemmSm80Config, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        return emit.kernel(problem, config, device)


GEMM_SM80 = GemmSm80()


def _reasons(problem: GemmProblem, device: Device) -> Iterator[str]:
    """Why the problem is refused; reasons that hold for every problem come first."""
    if not isinstance(device, CudaDevice):
        yield f"it runs on NVIDIA GPUs; the device is {device.platform}"
    elif device.capability < (8, 0):
        yield f"it needs sm_80 or newer; the device is {device.arch}"
    if problem.lhs != problem.rhs:
        yield f"operands must share a dtype; they are {problem.lhs} and {problem.rhs}"
    elif problem.lhs not in emit.DTYPES:
        yield f"operands of dtype {problem.lhs}; it takes {', '.join(emit.DTYPES)}"
    yield from refused_results(problem, emit.OUT_DTYPES)
    if problem.epilogue.is_derivative:
        yield "its epilogue computes no derivative of an activation"
    if problem.lhs == "float32" and problem.precision in EXACT_PRECISIONS[1:]:
        yield (
            f"precision {problem.precision} of float32 operands; it multiplies them "
            "as TF32, which is the default precision"
        )
    elif problem.precision not in EXACT_PRECISIONS:
        yield f"precision {problem.precision} names an algorithm only XLA has"
    yield from refused_extents(problem, ("m", "n", "k"), "32-bit coordinates")
    if emit.tile_count(problem, _SMALLEST) > INT32_MAX:
        yield "the output has more than 2^31 - 1 tiles of 32 x 32"


def columns_of(
    problem: GemmProblem, device: CudaDevice, **choices: Sequence[int]
) -> tuple[Columns, dict[str, int]]:
    """The configs of a grid worth measuring, and how many each rule refused."""
    return legal_columns(
        grid(**choices), GemmSm80Config, (*LEGAL, *WORTH), problem, device
    )


# ---- what the kernel can do ----------------------------------------------------------


def _row_bytes(p: GemmProblem, c: GemmSm80Config) -> Any:
    return c.tile_k * ITEMSIZE[p.lhs]


def _has_no_such_rows(p: GemmProblem, c: GemmSm80Config, d: CudaDevice) -> Any:
    return ~np.isin(_row_bytes(p, c), _ROW_BYTES)


def _has_too_many_warps(p: GemmProblem, c: GemmSm80Config, d: CudaDevice) -> Any:
    return c.warps_m * c.warps_n > _MOST_WARPS


def _splits_unevenly(p: GemmProblem, c: GemmSm80Config, d: CudaDevice) -> Any:
    sides = c.warp_tile_m, c.warp_tile_n
    smallest, largest = np.minimum(*sides), np.maximum(*sides)
    return (smallest < emit.BLOCK) | (largest > _LARGEST_WARP_SIDE)


def _copies_unevenly(p: GemmProblem, c: GemmSm80Config, d: CudaDevice) -> Any:
    smaller = np.minimum(c.tile_m, c.tile_n) * _row_bytes(p, c)
    return smaller < c.threads * emit.WIDEST_COPY_BYTES


def _copies_too_much(p: GemmProblem, c: GemmSm80Config, d: CudaDevice) -> Any:
    staged = emit.staged_registers(p, c)
    most = np.where(staged > 0, _MOST_WITH_ODD_COPIES, _MOST_WITH_COPIES)
    elements = (staged > 0) & (c.accumulators + staged > _MOST_WITH_ELEMENTS)
    return elements | (c.accumulators + emit.copies(p, c) > most)


def _does_not_fit(p: GemmProblem, c: GemmSm80Config, d: CudaDevice) -> Any:
    return emit.smem_bytes(p, c) > d.smem_per_block_bytes


LEGAL = (
    Rule(
        code="rows",
        refuses=_has_no_such_rows,
        why=lambda p, c, d: (
            f"tile_k={c.tile_k} must be one of "
            f"{', '.join(str(b // ITEMSIZE[p.lhs]) for b in _ROW_BYTES)} for {p.lhs}"
        ),
    ),
    Rule(
        code="warps",
        refuses=_has_too_many_warps,
        why=lambda p, c, d: (
            f"{c.warps_m}x{c.warps_n} warps leave a thread too few registers; at most "
            f"{_MOST_WARPS} do not"
        ),
    ),
    Rule(
        code="warp_tile",
        refuses=_splits_unevenly,
        why=lambda p, c, d: (
            f"{c.warps_m}x{c.warps_n} warps split a {c.tile_m}x{c.tile_n} tile into "
            f"{c.warp_tile_m}x{c.warp_tile_n}; the sides must be from {emit.BLOCK} to "
            f"{_LARGEST_WARP_SIDE}"
        ),
    ),
    Rule(
        code="copies",
        refuses=_copies_unevenly,
        why=lambda p, c, d: (
            f"{c.threads} threads have no 16 bytes each to copy of a side of "
            f"{min(c.tile_m, c.tile_n)}; use fewer warps"
        ),
    ),
    Rule(
        code="registers",
        refuses=_copies_too_much,
        why=lambda p, c, d: (
            f"{c.accumulators} accumulators a thread leave no room for "
            f"{emit.copies(p, c)} copies of a stage of such short or odd rows; use "
            "more warps or a smaller tile"
        ),
    ),
    Rule(
        code="smem",
        refuses=_does_not_fit,
        why=lambda p, c, d: (
            f"stages={c.stages} of {c.tile_m}x{c.tile_n}x{c.tile_k} tiles exceed "
            f"{d.smem_per_block_bytes} bytes of shared memory; at most "
            f"{emit.most_stages(p, c, d.smem_per_block_bytes)} fit"
        ),
    ),
)


# ---- what is worth measuring ---------------------------------------------------------


def _is_no_usual_split(p: GemmProblem, c: GemmSm80Config, d: CudaDevice) -> Any:
    """The config has unusual warp tiles, an unusual number of warps or long tiles."""
    usual = np.isin(c.warps_m * c.warps_n, _WARPS)
    for side in (c.warp_tile_m, c.warp_tile_n):
        usual &= np.isin(side, _WARP_TILES)
    sides = np.maximum(c.tile_m, c.tile_n), np.minimum(c.tile_m, c.tile_n)
    return ~(usual & (sides[0] <= _MOST_ELONGATED * sides[1]))


def _reads_more_than_another(p: GemmProblem, c: GemmSm80Config, d: CudaDevice) -> Any:
    """The same number of warps can split the tile otherwise and read less of it.

    Of two splits that read as much, the one with fewer ``warps_m`` stays.
    """
    reads = fragment_rows(c)
    better = np.zeros(np.shape(reads), bool)
    for warps_m in CHOICES["warps_m"]:
        warps_n = c.warps_m * c.warps_n // warps_m
        other = dataclasses.replace(c, warps_m=warps_m, warps_n=np.maximum(warps_n, 1))
        possible = np.isin(warps_n, CHOICES["warps_n"])
        possible &= ~np.asarray(_is_no_usual_split(p, other, d))
        less = fragment_rows(other) < reads
        as_much = (fragment_rows(other) == reads) & (warps_m < c.warps_m)
        better |= possible & (less | as_much)
    return better


def _computes_only_padding(p: GemmProblem, c: GemmSm80Config, d: CudaDevice) -> Any:
    """A tile half as high or wide would hold all of the output."""
    return ((c.tile_m > 64) & (p.m <= c.tile_m // 2)) | (
        (c.tile_n > 64) & (p.n <= c.tile_n // 2)
    )


def _is_deeper_than_latency(p: GemmProblem, c: GemmSm80Config, d: CudaDevice) -> Any:
    """The ring has more stages than long rows need to cover the latency."""
    return (_row_bytes(p, c) == max(_ROW_BYTES)) & (c.stages > 4)


WORTH = (
    Rule(
        code="split",
        refuses=_is_no_usual_split,
        why=lambda p, c, d: (
            f"warps of {c.warp_tile_m}x{c.warp_tile_n} in {c.warps_m}x{c.warps_n} are "
            "not among the usual ones"
        ),
    ),
    Rule(
        code="reads",
        refuses=_reads_more_than_another,
        why=lambda p, c, d: "another split of the tile reads less of shared memory",
    ),
    Rule(
        code="padding",
        refuses=_computes_only_padding,
        why=lambda p, c, d: (
            f"a {c.tile_m}x{c.tile_n} tile is too large for the output, {p.m}x{p.n}"
        ),
    ),
    idle_stages(min(GRID["stages"]), lambda p, c, d: steps(p, c)),
    Rule(
        code="latency",
        refuses=_is_deeper_than_latency,
        why=lambda p, c, d: f"{c.stages} stages of such rows are more than are needed",
    ),
    repeated_raster(
        USUAL_BAND,
        GRID["raster_band"],
        emit.tile_grid,
        at_once=lambda p, c, d: emit.tile_count(p, c) <= d.sm_count,
    ),
)


# ---- the model -----------------------------------------------------------------------

_CYCLES_PER_US = 1500.0
_MACS_PER_CYCLE = 1024  # of 16-bit elements, of one SM; half as many of TF32
_SMEM_BYTES_PER_CYCLE = 128
_COPIES_PER_CYCLE = 0.5  # of a whole warp
_LATENCY_CYCLES = 900.0
_BLOCK_CYCLES = 1500.0  # of a block to start, to fill the ring and to end
_STORES_PER_CYCLE = 0.25  # of a whole warp
_MEMORY_BYTES_PER_US = 1.5e6
_REGISTERS = 65536  # of one SM
_OTHER_REGISTERS = 100  # of a thread, besides its accumulators
_LAUNCH_US = 3.0


def steps(problem: GemmProblem, config: GemmSm80Config) -> Any:
    """Stages of k that each block reads."""
    return -(-problem.k // config.tile_k)


def fragment_rows(config: GemmSm80Config) -> Any:
    """Rows and columns of a stage that all warps read, counted for each warp."""
    return config.warps_n * config.tile_m + config.warps_m * config.tile_n


def resident(problem: GemmProblem, config: GemmSm80Config, device: CudaDevice) -> Any:
    """Blocks that fit on one SM at the same time."""
    smem = device.smem_per_block_bytes // emit.smem_bytes(problem, config)
    held = np.minimum(config.accumulators + _OTHER_REGISTERS, 255)
    return np.maximum(np.minimum(smem, _REGISTERS // (held * config.threads)), 1)


def modelled_us(
    problem: GemmProblem, config: GemmSm80Config, device: CudaDevice
) -> Any:
    """Time of one execution in microseconds; an array if the config holds columns."""
    memory = problem.bytes / _MEMORY_BYTES_PER_US + _LAUNCH_US
    return np.maximum(multiplied_us(problem, config, device), memory)


def multiplied_us(
    problem: GemmProblem, config: GemmSm80Config, device: CudaDevice
) -> Any:
    """The same where the memory is fast enough."""
    busy = _busy_cycles(problem, config)
    most = -(-emit.tile_count(problem, config) // device.sm_count)  # blocks of an SM
    together = np.minimum(resident(problem, config, device), most)
    wait = _LATENCY_CYCLES / (config.stages - 1) / together
    stage = np.maximum(busy, wait)
    block = steps(problem, config) * stage + _epilogue_cycles(problem, config)
    cycles = most * block + -(-most // together) * _BLOCK_CYCLES
    return cycles / _CYCLES_PER_US + _LAUNCH_US


def _busy_cycles(problem: GemmProblem, config: GemmSm80Config) -> Any:
    """Cycles of one stage on the slowest unit of the SM."""
    itemsize = ITEMSIZE[problem.lhs]
    macs = config.tile_m * config.tile_n * config.tile_k
    multiply = macs / (_MACS_PER_CYCLE * 2 / itemsize)
    rows = fragment_rows(config) + config.tile_m + config.tile_n
    smem = rows * _row_bytes(problem, config) / _SMEM_BYTES_PER_CYCLE
    copied = emit.copies(problem, config) * config.threads
    copied = copied + emit.staged_registers(problem, config) * config.threads
    copies = copied / emit.WARP / _COPIES_PER_CYCLE
    return np.maximum(np.maximum(multiply, smem), copies)


def _epilogue_cycles(problem: GemmProblem, config: GemmSm80Config) -> Any:
    epilogue = problem.epilogue
    arrays = 1 + epilogue.residual + epilogue.save_preactivation
    width = 1 + emit.pairs(problem)
    accesses = arrays * config.tile_m * config.tile_n / width / emit.WARP
    return accesses / _STORES_PER_CYCLE


def derived(
    problem: GemmProblem, config: GemmSm80Config, device: CudaDevice
) -> Columns:
    """Features that say how a config fits the problem, for a surrogate model."""
    blocks: Any = emit.tile_count(problem, config)
    most = -(-blocks // device.sm_count)
    outputs = config.tile_m * config.tile_n
    wanted = problem.batch * problem.m * problem.n
    return {
        "log2_accumulators": np.log2(config.accumulators),
        "log2_smem_bytes": np.log2(emit.smem_bytes(problem, config)),
        "wave_efficiency": blocks / (most * device.sm_count),
        "log2_padding": np.log2(blocks * outputs / wanted),
        "log2_l2_bytes_per_mac": np.log2((config.tile_m + config.tile_n) / outputs),
        "log2_k_steps": np.log2(most * steps(problem, config)),
    }
