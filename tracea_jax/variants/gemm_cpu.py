"""gemm_cpu: the packed, register-tiled GEMM in C++, prebuilt for each CPU ISA.

Here are its configs, heuristic and the problems it expects to win; the kernel is in
kernels/cpu, and the costs of a call are in ``cpu_calls``. Callers: the op's record
(``ops.matmul.op``), and ``conv2d_cpu`` and ``gated``, which run on products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tracea_jax.device import CPU_ISAS, CpuDevice, Device
from tracea_jax.problem import GemmProblem
from tracea_jax.variants import cpu_calls
from tracea_jax.variants.base import Call, CpuCall
from tracea_jax.variants.cpu import (
    blocking_features,
    ceil_div,
    refuses_product,
    tasks_of_thread,
)
from tracea_jax.variants.space import (
    Columns,
    Space,
    check_ranges,
    grid,
    repeated,
    survivors,
)

TARGET = "tracea_cpu_gemm_v1"
ABI = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmCpuConfig:
    """Cache blocking and task count; the register tile follows from the ISA.

    Attributes:
      kc: depth of a packed block of B (and A), in elements of K. Only this field
        changes rounding, because blocks are summed one after another.
      nc: width of a packed block of B, in columns.
      tasks: independent pieces of the output for each thread.
    """

    kc: int
    nc: int
    tasks: int

    def __str__(self) -> str:
        return f"kc {self.kc} nc {self.nc} tasks {self.tasks}"


_RANGES = {"kc": (1, 8192), "nc": (1, 8192), "tasks": (1, 64)}
_MOST_NC = 4096  # the widest block; wider ones are cut to this
# Rows of A, or columns of B, up to which vector kernels stream the other operand.
_SKINNY = 16
_TILE_ROWS = 5  # rows of A from which tiles of bfloat16 are worth using
_TILE_COLUMNS = 5  # columns of B from which tiles are worth transposing many rows of A
# Rows of A, by the layout of B, and columns of B from which pairs in vectors are worth
# using.
_PAIR_ROWS = {"n": 12, "t": 9}
_PAIR_COLUMNS = 9
# Rows of A up to which packing B is much of the work: of bfloat16, and in vectors.
_FEW_ROWS = 128
_FEW_VECTOR_ROWS = 512
_PAIRS = "avx512_bf16"  # the ISA that multiplies bfloat16 in pairs
_AMX_TILE = 32  # rows of A that AMX multiplies at a time
_NEAR_DEPTH = 512  # elements of each of those rows that L1 holds
_WIDE_COLUMNS = 1024  # columns of B from which it pays to keep those rows in L1
_THIN = 64  # rows or columns up to which reading the large operand takes most time
# Columns of B with which XLA reads A from memory faster, by ISA and dtype.
_NARROW = {
    (_PAIRS, "float32"): range(1, 65),
    ("amx", "float32"): range(1, _SKINNY + 1),
    ("amx", "bfloat16"): range(2, 9),
    # With 4 on some versions of JAX: 0.87 of our time there, 1.4 on others.
    ("avx2", "float32"): (4, 6, 7),
}
# The same wherever A lies: columns that XLA's registers hold exactly, and a vector,
# also where that is A, and B stored by columns.
_NEAR_NARROW = {("avx2", "float32"): (1, 8, 16)}
_NEAR_ELEMENTS = 1 << 18  # of the operand that is read once; smaller ones are untried
# Of bfloat16 on AVX2 XLA widens all of a large operand, which our kernel reads once: it
# takes 1.2 to 20 times as long. By the layout of A the most columns of B for which this
# is so, and the least size of the large operand on either side; with more columns XLA's
# own loop is as fast.
_STREAMED_COLUMNS = {"n": 4, "t": _SKINNY}
_STREAMED_SIZE = 256
_FEW_AVX2_ROWS = 32  # of A, with which XLA's products are slow on AVX2
_FAR_BYTES = 32 << 20  # larger caches are hardly faster than memory
_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_TILE_DEPTH = {"amx": 32, "bfmmla": 4}  # of ISAs that multiply tiles of bfloat16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocking:
    """Default blocking and values worth measuring, for one kind of kernel.

    Attributes:
      itemsize: bytes of a packed element.
      unit: the depth of packed blocks is a multiple of this.
      kc: default depth: deep enough to amortise the partial sums, shallow enough for
        L1.
      panel_share: part of L2 for the packed block of B; A and C pass through the rest.
      depths, widths, tasks: values of kc, nc and tasks worth measuring. They are so few
        that all their combinations, with the heuristic's own width, can be measured.
      most_share: largest part of L2 that a packed block worth measuring takes.
    """

    itemsize: int
    unit: int
    kc: int
    panel_share: float
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    tasks: tuple[int, ...]
    most_share: float = float("inf")


_VECTORS = Blocking(
    itemsize=4,
    unit=8,
    kc=512,
    panel_share=0.5,
    depths=(128, 192, 256, 384, 512, 768),
    widths=(128, 256, 384, 512, 768, 1024),
    tasks=(1, 2, 4, 8),
)
# The packed block of B in use and the next one, on its way, stay in L2 together.
_FEW_VECTORS = dataclasses.replace(_VECTORS, kc=256, panel_share=0.25)
# A transposed A is packed from short pieces that lie far apart in memory. If the pieces
# are few, the data beside them is still in the cache when the next rows need it.
_TRANSPOSED_VECTORS = dataclasses.replace(_VECTORS, kc=192)
_TILES = Blocking(  # AMX may read A unpacked, so that deep blocks cost little
    itemsize=2,
    unit=32,
    kc=2048,
    panel_share=0.5,
    depths=(256, 512, 1024, 2048),
    widths=(128, 256, 512, 1024),
    tasks=(1, 2, 4),
    most_share=0.75,
)
_PACKING_TILES = dataclasses.replace(_TILES, kc=1024)  # A is packed: it lasts longer
# With many columns of B, rows of A are used so often that they should stay in L1.
_WIDE_TILES = dataclasses.replace(_TILES, kc=512, panel_share=0.25)
# See _TRANSPOSED_VECTORS.
_TRANSPOSED_TILES = dataclasses.replace(_TILES, kc=512, panel_share=0.125)
_LONG_TRANSPOSED_TILES = dataclasses.replace(_TRANSPOSED_TILES, kc=256)
_FEW_TILES = dataclasses.replace(_TILES, kc=1024, panel_share=0.125)
# With few rows of A, packing B is much of the work: B is read in long pieces of rows.
_ONE_TILE_BY_ROW = dataclasses.replace(
    _TILES, kc=128, panel_share=0.125, depths=(64, 128, 256, 512, 1024)
)
_FEW_TILES_BY_ROW = dataclasses.replace(_ONE_TILE_BY_ROW, kc=512, panel_share=0.25)
# A vector has a pair of bfloat16 in place of each f32. With few rows of A, a block is
# multiplied so soon that packing the next block takes most of the time.
_PAIRED = Blocking(
    itemsize=2,
    unit=16,
    kc=1024,
    panel_share=0.5,
    depths=(256, 384, 512, 768, 1024, 1536),
    widths=(128, 256, 384, 512, 768, 1024),
    tasks=(1, 2, 4, 8),
)
_FEW_PAIRED = dataclasses.replace(_PAIRED, kc=256, panel_share=0.125)
_SOME_PAIRED = dataclasses.replace(_PAIRED, kc=512, panel_share=0.25)


def blocking(problem: GemmProblem, device: CpuDevice) -> Blocking:
    """The blocking of the kernel that the problem runs on.

    That is the kernel of tiles or of pairs for bfloat16 with enough rows, if the ISA
    has one, else the kernel of float32 vectors.
    """
    vectors = _of_vectors(problem)
    if problem.lhs != "bfloat16":
        return vectors
    if device.isa == _PAIRS and _suits_pairs(problem):
        return _of_pairs(problem.m)
    unit = _TILE_DEPTH.get(device.isa)
    if unit is None or not _suits_tiles(problem, device):
        return vectors
    if problem.m <= _FEW_ROWS:
        return _of_few_tiles(problem, device, unit)
    if device.isa == "amx":
        return _of_tiles(problem)
    return dataclasses.replace(_PACKING_TILES, unit=unit)


def _tasks(problem: GemmProblem, device: CpuDevice) -> int:
    """Tasks for each thread; two for thin products, which wait for memory."""
    if min(problem.m, problem.n) <= _THIN:
        return 2
    return tasks_of_thread(problem.flops, device)


def _suits_tiles(problem: GemmProblem, device: CpuDevice) -> bool:
    transposes = problem.layout[0] == "t" and problem.m > _FEW_ROWS
    if device.isa == "amx" and transposes and problem.n < _TILE_COLUMNS:
        return False
    return problem.m >= _TILE_ROWS


def _of_vectors(problem: GemmProblem) -> Blocking:
    if problem.layout[0] == "t" and problem.m > _FEW_ROWS:
        return _TRANSPOSED_VECTORS
    return _FEW_VECTORS if problem.m <= _FEW_VECTOR_ROWS else _VECTORS


def _of_tiles(problem: GemmProblem) -> Blocking:
    if problem.layout[0] == "t":
        is_long = problem.k > _NEAR_DEPTH
        return _LONG_TRANSPOSED_TILES if is_long else _TRANSPOSED_TILES
    if problem.n >= _WIDE_COLUMNS and problem.k > 2 * _NEAR_DEPTH:
        return _WIDE_TILES
    return _TILES if problem.k % _TILES.unit == 0 else _PACKING_TILES


def _of_few_tiles(problem: GemmProblem, device: CpuDevice, unit: int) -> Blocking:
    if device.isa != "amx" or problem.layout[1] == "t":
        return dataclasses.replace(_FEW_TILES, unit=unit)
    return _ONE_TILE_BY_ROW if problem.m <= _AMX_TILE else _FEW_TILES_BY_ROW


def _suits_pairs(problem: GemmProblem) -> bool:
    """Returns whether both operands are large enough to be worth packing."""
    has_rows = problem.m >= _PAIR_ROWS[problem.layout[1]]
    return has_rows and problem.n >= _PAIR_COLUMNS


def _of_pairs(rows: int) -> Blocking:
    if rows <= _FEW_ROWS:
        return _FEW_PAIRED
    return _SOME_PAIRED if rows <= _FEW_VECTOR_ROWS else _PAIRED


def is_skinny(problem: GemmProblem, device: CpuDevice) -> bool:
    """Returns whether A or B is streamed, so that there are no blocks to choose."""
    has_few = min(problem.m, problem.n) <= _SKINNY
    return blocking(problem, device).itemsize == 4 and has_few


def _is_narrow(problem: GemmProblem, device: CpuDevice) -> bool:
    """Returns whether XLA reads A from memory faster than our kernel.

    With few columns of B, the product does little else. The cases in which XLA is
    faster were measured on the ISA of pairs, for 1 and 8 columns on AMX, and on AVX2.
    """
    kind = (device.isa, problem.lhs)
    is_tall = problem.layout[0] == "n" and problem.m > _SKINNY
    is_large = max(problem.m, problem.n) * problem.k >= _NEAR_ELEMENTS
    if is_large and (near := _NEAR_NARROW.get(kind)):
        is_row = problem.m == 1 and problem.layout[1] == "t"
        if is_row or (is_tall and problem.n in near):
            return True
    far = min(device.l3_bytes, _FAR_BYTES)
    is_far = _ITEMSIZE[problem.lhs] * problem.m * problem.k >= far
    return is_far and is_tall and problem.n in _NARROW.get(kind, ())


def _streams_bfloat16(problem: GemmProblem, device: CpuDevice) -> bool:
    """True if XLA's widening of a large operand costs more than our kernel, on AVX2.

    Measured of one product of few rows or columns, with programs of several in a row.
    For one row and B by columns, XLA has a faster loop in some versions.
    """
    p, large = problem, max(problem.m, problem.n)
    if device.isa != "avx2" or (p.lhs, p.rhs, p.batch) != ("bfloat16", "bfloat16", 1):
        return False
    if p.layout == "tt" or min(large, p.k) < _STREAMED_SIZE:
        return False
    if large * p.k < _NEAR_ELEMENTS:
        return False
    if p.m <= _SKINNY:
        return p.m > 1 or p.layout[1] == "n"
    return p.n <= _STREAMED_COLUMNS[p.layout[0]]


def _pays(problem: GemmProblem, device: CpuDevice) -> bool:
    """Returns whether our kernel saves more than its call costs; see ``cpu_calls``."""
    p = problem
    return cpu_calls.pays(
        widens=p.lhs == "bfloat16" and device.isa == _PAIRS,
        madds=p.flops // 2,
        elements=p.batch * p.k * (p.m + p.n),
        outputs=p.batch * p.m * p.n,
        activation=p.epilogue.activation,
        madd_ns=cpu_calls.AVX2_MADD_NS if _is_square_on_avx2(p, device) else None,
    )


def _is_square_on_avx2(problem: GemmProblem, device: CpuDevice) -> bool:
    """Tests whether XLA's own loops are good at the product: little is saved of it."""
    has_rows = problem.layout[0] == "n" and problem.m > _FEW_AVX2_ROWS
    return device.isa == "avx2" and has_rows


@dataclasses.dataclass(frozen=True, slots=True)
class GemmCpu:
    """The variant gemm_cpu; for its methods see ``variants.base.Variant``."""

    name: str = "gemm_cpu"
    config_type: type = GemmCpuConfig
    sources: tuple[str, ...] = ("cpu/gemm",)

    def why_not(self, problem: GemmProblem, device: Device) -> str | None:
        reason = refuses_product(problem, device)
        if reason is None and problem.epilogue.is_derivative:
            reason = "its epilogue computes no derivative of an activation"
        return reason

    def check(
        self, problem: GemmProblem, config: GemmCpuConfig, device: Device
    ) -> None:
        check_ranges(config, _RANGES)

    def space(self, problem: GemmProblem, device: Device) -> Space:
        assert isinstance(device, CpuDevice)
        hero = self.heuristic(problem, device)
        known = blocking(problem, device)
        columns = grid(
            kc=known.depths, nc=sorted({*known.widths, hero.nc}), tasks=known.tasks
        )
        too_large = panel_bytes(problem, device, columns) > (
            known.most_share * device.l2_bytes
        )
        alike = repeated(columns, hero, _effects(problem, device))
        alive, pruned = survivors([("panel", too_large), *alike])
        columns = {name: values[alive] for name, values in columns.items()}
        return dataclasses.replace(
            self.described(problem, columns, device), pruned=pruned
        )

    def described(
        self, problem: GemmProblem, columns: Columns, device: Device
    ) -> Space:
        assert isinstance(device, CpuDevice)
        return Space(
            config_type=GemmCpuConfig,
            columns=columns,
            derived=_derived(problem, device, columns),
        )

    def heuristic(self, problem: GemmProblem, device: Device) -> GemmCpuConfig:
        assert isinstance(device, CpuDevice)
        known = blocking(problem, device)
        depth = max(int(block_depth(problem, device, known.kc)), known.unit)
        columns = known.panel_share * device.l2_bytes / (known.itemsize * depth)
        nc = min(max(64, int(columns) // 32 * 32), _MOST_NC)
        return GemmCpuConfig(kc=known.kc, nc=nc, tasks=_tasks(problem, device))

    def expects_to_win(self, problem: GemmProblem, device: Device) -> bool:
        return self.doubt(problem, device) is None

    def doubt(self, problem: GemmProblem, device: Device) -> str | None:
        # Our kernel widens other 16-bit operands to f32, and BFMMLA was never timed:
        # XLA may be faster at these.
        assert isinstance(device, CpuDevice)
        if _streams_bfloat16(problem, device):
            return None
        is_known = problem.lhs == "float32" or (
            problem.lhs == "bfloat16" and device.isa in ("amx", _PAIRS)
        )
        if not is_known:
            return f"there are no timings of {problem.lhs} for {device.isa}"
        if not _pays(problem, device):
            return cpu_calls.REASON
        if _is_narrow(problem, device):
            return "XLA brings the large operand from memory sooner"
        return None

    def call(self, problem: GemmProblem, config: GemmCpuConfig, device: Device) -> Call:
        assert device.arch in CPU_ISAS
        epilogue = problem.epilogue
        return CpuCall(
            target=TARGET,
            attributes=(
                ("abi", ABI),
                ("trans_lhs", problem.layout[0] == "t"),
                ("trans_rhs", problem.layout[1] == "t"),
                ("bias", epilogue.bias),
                ("activation", epilogue.activation),
                ("residual", epilogue.residual_op if epilogue.residual else "none"),
                ("save_preactivation", epilogue.save_preactivation),
                ("isa", device.arch),
                ("kc", config.kc),
                ("nc", config.nc),
                ("tasks", config.tasks),
            ),
        )


def _effects(
    problem: GemmProblem, device: CpuDevice
) -> dict[str, Callable[[Any], Any]]:
    """For each field the effect of its values; configs of equal effects run alike."""
    return {
        "kc": lambda kc: block_depth(problem, device, kc),
        "nc": lambda nc: 0 if is_skinny(problem, device) else np.minimum(nc, problem.n),
        "tasks": lambda tasks: 0 if device.cores == 1 else tasks,
    }


def block_depth(problem: GemmProblem, device: CpuDevice, kc: Any) -> Any:
    """Depth of the packed blocks: k in equal steps of a multiple of the unit."""
    if is_skinny(problem, device):
        return 0 * kc
    unit = blocking(problem, device).unit
    blocks = np.maximum(ceil_div(problem.k, unit * ceil_div(kc, unit)), 1)
    return unit * ceil_div(ceil_div(problem.k, blocks), unit)


def panel_bytes(problem: GemmProblem, device: CpuDevice, columns: Columns) -> Any:
    """Bytes of the packed block of B that is multiplied with each row of A."""
    depth = np.maximum(block_depth(problem, device, columns["kc"]), 1)
    width = np.clip(columns["nc"], 1, max(problem.n, 1))
    return blocking(problem, device).itemsize * depth * width


def _derived(problem: GemmProblem, device: CpuDevice, columns: Columns) -> Columns:
    """Features that say how a blocking fits the problem and the caches."""
    depth = np.maximum(block_depth(problem, device, columns["kc"]), 1)
    width = np.clip(columns["nc"], 1, max(problem.n, 1))
    panel = panel_bytes(problem, device, columns)
    return blocking_features(
        device, depth=problem.k, width=problem.n, kc=depth, nc=width, panel_bytes=panel
    )


GEMM_CPU = GemmCpu()
