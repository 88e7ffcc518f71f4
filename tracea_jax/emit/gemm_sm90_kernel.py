"""gemm_sm90 as text: the kernel of a problem and a config, and its parameters.

Its numbers are those of ``gemm_sm90``; the generated Traits carry them to the device
code, which asserts that it arrives at the same.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import relayout, sources
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.gemm_sm90 import (
    ROW_BYTES,
    ROW_UNIT_BYTES,
    SLAB,
    WARP,
    WARPGROUP,
    GemmSm90Config,
    Storage,
    box_rows_a,
    box_rows_b,
    computed,
    element_bytes,
    grid,
    is_swapped,
    loaded_rows,
    maps_residual,
    maps_results,
    parts,
    registers,
    storage,
    stored_columns,
    tail_columns,
    takes_fragments,
)
from tracea_jax.emit.kernel import (
    Kernel,
    Param,
    Pointer,
    Scalar,
    TensorMap,
    TensorMapSwizzle,
)
from tracea_jax.emit.wgmma import Wgmma
from tracea_jax.ir.pipeline import Ring
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import ITEMSIZE, GemmProblem

_SHORT = epilogues.SHORT | {
    "bfloat16x3": "bf16x3",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
DTYPES = tuple(_SHORT)
OUT_DTYPES = tuple(epilogues.CXX_TYPE)
# What the tensor cores multiply of an operand: f32 as TF32, its parts as they are.
_MULTIPLIED = {"float32": "tfloat32", "bfloat16x3": "bfloat16"}
_MAP = "const __grid_constant__ tracea::TensorMap"  # the type of a parameter


def kernel(
    problem: GemmProblem,
    config: GemmSm90Config,
    device: CudaDevice,
    *,
    gated: bool = False,
) -> Kernel:
    """The kernel that computes the problem with this config.

    Operands are lhs, rhs, then bias and residual if the epilogue has them; the results
    are the output, then the preactivation if it is saved, or partial column sums, in
    ``sum_rows`` rows. Rows of lhs and rhs that are not multiples of 16 bytes, and
    parts, are as ``relayout`` writes them. Everything that only the launch needs (m, n,
    k, batch, which operands are batched) stays out of the source: one cubin serves all
    shapes with more than 32 rows.

    Args:
      problem: lhs and rhs may be "bfloat16x3": f32 operands of three parts, arrays of
        (3, [batch,] rows, columns).
      gated: y = activation(lhs @ gate) * (lhs @ up): operands are lhs, gate and up,
        results y, then both products if the preactivation is saved. ``problem`` is the
        product with [gate, up]: n counts the columns of both, as tile_n does.
    """
    wgmma = Wgmma(
        n=config.tile_n,
        lhs=_MULTIPLIED.get(problem.lhs, problem.lhs),
        rhs=_MULTIPLIED.get(problem.rhs, problem.rhs),
        lhs_in_registers=takes_fragments(problem),
    )
    headers = sources.headers("gemm_sm90.cuh")
    layout = storage(problem, config, device.smem_per_block_bytes, gated=gated)
    return Kernel(
        entry=entry_name(problem, config, gated=gated),
        source=_source(problem, config, layout, wgmma, gated),
        headers=tuple(sorted((*headers, (wgmma.header_name, wgmma.header)))),
        arch=device.arch,
        grid=(grid(problem, config, device.sm_count), 1, 1),
        block=(config.threads, 1, 1),
        cluster=(config.cluster_size, 1, 1),
        smem_bytes=layout.smem_bytes,
        params=_gated_params(problem, config) if gated else _params(problem, config),
    )


def entry_name(
    problem: GemmProblem, config: GemmSm90Config, *, gated: bool = False
) -> str:
    """Name of the kernel, readable in a profiler; it does not depend on shapes."""
    rows = int(loaded_rows(problem, config))
    one = dataclasses.replace(problem, n=problem.n // (1 + gated))
    steps = (
        *epilogues.name_parts(problem.epilogue),
        "" if rows == config.tile_m else f"rows{rows}",
        "" if maps_results(one) else "anyn",
    )
    choices = str(config).replace(" ", "_")
    operands = "".join(_SHORT[t] for t in dict.fromkeys((problem.lhs, problem.rhs)))
    types = f"{operands}_{_SHORT[problem.out]}_{problem.layout}"
    name = "gemm_sm90_gated" if gated else "gemm_sm90"
    return "_".join((name, types, *filter(None, steps), choices))


def _params(problem: GemmProblem, config: GemmSm90Config) -> tuple[Param, ...]:
    """The arguments of the entry point, in the order of ``_signature``."""
    epilogue = problem.epilogue
    bias, residual = 2, 2 + epilogues.has_bias(problem.epilogue)
    out = residual + epilogue.residual
    results = (out, out + 1) if epilogue.save_preactivation else (out,)
    product = computed(problem)
    lhs, rhs = (1, 0) if is_swapped(problem) else (0, 1)
    right = _rhs_map(product, config, operand=rhs)
    params: list[Param] = [_lhs_map(product, config, operand=lhs), right]
    if tail := tail_columns(problem, config):
        box = (tail, *right.box[1:])
        params.append(dataclasses.replace(right, box=box))
    mapped = maps_results(problem)
    params += [_finished(problem, operand, problem.out, mapped) for operand in results]
    if epilogues.has_bias(problem.epilogue):
        params.append(Pointer(operand=bias))
    if epilogue.residual:
        mapped = bool(maps_residual(problem, config))
        dtype = epilogue.residual_dtype or problem.out
        params.append(_finished(problem, residual, dtype, mapped))
    if epilogue.column_sums:
        params.append(Pointer(operand=out + 1))
    return (*params, *_sizes(product))


def _gated_params(problem: GemmProblem, config: GemmSm90Config) -> tuple[Param, ...]:
    """The arguments of a gated product's entry, in the order of ``_signature``."""
    one = dataclasses.replace(problem, n=problem.n // 2)
    results = (3, 4, 5) if problem.epilogue.save_preactivation else (3,)
    rhs = _rhs_map(one, dataclasses.replace(config, tile_n=config.tile_n // 2))
    return (
        _lhs_map(one, config),
        rhs,
        dataclasses.replace(rhs, operand=2),
        *(_finished(one, operand, one.out, maps_results(one)) for operand in results),
        *_sizes(one),
    )


def _sizes(problem: GemmProblem) -> tuple[Scalar, ...]:
    sizes = (problem.m, problem.n, problem.k, problem.batch)
    batched = (int(problem.lhs_batched), int(problem.rhs_batched))
    return tuple(Scalar(value=v) for v in (*sizes, *batched))


def _lhs_map(
    problem: GemmProblem, config: GemmSm90Config, operand: int = 0
) -> TensorMap:
    return _operand_map(
        operand,
        _MULTIPLIED.get(problem.lhs, problem.lhs),
        (problem.m, problem.k) if problem.layout[0] == "t" else (problem.k, problem.m),
        parts(problem) * (problem.batch if problem.lhs_batched else 1),
        box_rows_a(problem, config),
        is_part=parts(problem) > 1,
    )


def _rhs_map(
    problem: GemmProblem, config: GemmSm90Config, operand: int = 1
) -> TensorMap:
    return _operand_map(
        operand,
        _MULTIPLIED.get(problem.rhs, problem.rhs),
        (problem.k, problem.n) if problem.layout[1] == "t" else (problem.n, problem.k),
        parts(problem) * (problem.batch if problem.rhs_batched else 1),
        box_rows_b(problem, config.tile_n, config),
        is_part=parts(problem) > 1,
    )


def _finished(problem: GemmProblem, operand: int, dtype: str, mapped: bool) -> Param:
    """A result, or a residual: a matrix of the epilogue."""
    if not mapped:
        return Pointer(operand=operand)
    matrix = (problem.n, problem.m)
    rows = ROW_BYTES // ITEMSIZE[dtype] if is_swapped(problem) else SLAB
    return _operand_map(operand, dtype, matrix, problem.batch, rows)


def _operand_map(
    operand: int,
    dtype: str,
    matrix: tuple[int, int],
    batch: int,
    rows: int,
    is_part: bool = False,
) -> TensorMap:
    """Boxes of ``rows`` rows of 128 bytes of a batch of row-major matrices.

    Rows that tensor maps cannot have are those that relayout writes; what is behind the
    columns is never read. The batch is a dimension of its own: a box that leaves its
    matrix meets zeros and not the next matrix.
    """
    memory = "float32" if dtype == "tfloat32" else dtype
    itemsize = ITEMSIZE[memory]
    columns, height = matrix
    is_relaid = is_part or columns * itemsize % ROW_UNIT_BYTES != 0
    row = itemsize * (relayout.stride(columns, memory) if is_relaid else columns)
    return TensorMap(
        operand=operand,
        dtype=dtype,
        dims=(columns, height, batch),
        strides=(row, row * height),
        box=(ROW_BYTES // itemsize, rows, 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )


def _source(
    problem: GemmProblem,
    config: GemmSm90Config,
    layout: Storage,
    wgmma: Wgmma,
    gated: bool,
) -> str:
    """The translation unit: Traits and one entry."""
    product, fragments = computed(problem), takes_fragments(problem)
    trans_a, trans_b = (side == "t" for side in product.layout)
    major_a = int(trans_a and not fragments)
    epilogue = problem.epilogue
    producer, consumer = registers(config)
    ring = Ring(stages=config.stages)
    readers = config.tile_consumers * (WARPGROUP // WARP if fragments else 1)
    arrivals = ring.empty_arrivals(consumers=readers, cluster=config.sharers)
    one = dataclasses.replace(problem, n=problem.n // (1 + gated))
    rows = int(loaded_rows(problem, config))
    columns = int(stored_columns(problem, config))
    has_tail = bool(tail_columns(problem, config))
    rows_a = box_rows_a(product, config)
    rows_b = box_rows_b(product, config.tile_n // (1 + gated), config)
    types = f"{problem.lhs}, {problem.rhs} -> {problem.out} {problem.layout}"
    maps_rest = bool(maps_residual(problem, config))
    signature, arguments = (
        _gated_signature(problem) if gated else _signature(problem, has_tail, maps_rest)
    )
    return f"""\
// gemm_sm90 | {types}, epilogue {epilogue}{" gated" * gated} | {config}
#include "gemm_sm90.cuh"
#include "{wgmma.header_name}"

namespace {{
struct Traits {{
  using Mma = tracea::{wgmma.type_name}<{major_a}, {int(not trans_b)}>;
  using Swizzle = {SWIZZLE_128B.cxx()};
  static constexpr bool kTransA = {cxx(trans_a)}, kTransB = {cxx(trans_b)}, \
kFragmentsA = {cxx(fragments)}, kHasTailB = {cxx(has_tail)};
  static constexpr bool kGated = {cxx(gated)}, \
kTransposed = {cxx(is_swapped(problem))}, \
kMapsResults = {cxx(maps_results(one))}, kMapsResidual = {cxx(maps_rest)};
  static constexpr int kElementBytes = {element_bytes(problem)}, \
kParts = {parts(problem)}, kRowsA = {rows}, kRowsB = {columns};
  static constexpr int kTileM = {config.tile_m}, kTileN = {config.tile_n}, \
kSlabs = {config.slabs}, kSummedSlabs = {config.summed_slabs}, \
kConsumers = {config.consumers};
  static constexpr bool kPingPong = {cxx(config.ping_pong)};
  static constexpr int kStages = {config.stages}, kWaitDepth = {config.wait_depth}, \
kRasterBand = {config.raster_band};
  static constexpr int kClusterM = {config.cluster_m}, kClusterN = {config.cluster_n}, \
kClusterK = {config.cluster_k}, kBoxRowsA = {rows_a}, kBoxRowsB = {rows_b};
  static constexpr unsigned kFirstEmptyParity = {ring.producer_parity(0)}, \
kEmptyArrivals = {arrivals};
  static constexpr int kThreads = {config.threads}, kProducerRegisters = {producer}, \
kConsumerRegisters = {consumer};
  static constexpr int kEpilogueBuffers = {layout.epilogue_buffers}, \
kSmemBytes = {layout.smem_bytes};
{epilogues.traits(problem)}
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{entry_name(problem, config, gated=gated)}({signature}) {{
  tracea::gemm_sm90<Traits>({{{arguments}}});
}}
"""


def _signature(
    problem: GemmProblem, has_tail: bool, maps_rest: bool
) -> tuple[str, str]:
    """Parameters of the entry, and the fields of ``GemmSm90Params`` made of them."""
    epilogue = problem.epilogue
    maps = ["a", "b"] + ["b_tail"] * has_tail
    results = ["out"] + ["z"] * epilogue.save_preactivation
    bias = ["bias"] * epilogues.has_bias(problem.epilogue)
    rest = ["residual"] * epilogue.residual
    scalars = ["m", "n", "k", "batch", "a_batched", "b_batched"]
    of = "&" if maps_results(problem) else ""
    parameters = _parameters(maps, results, maps_results(problem))
    parameters += [f"const void* {name}" for name in bias]
    parameters += [f"{_MAP if maps_rest else 'const void*'} {name}" for name in rest]
    parameters += ["float* sums"] * epilogue.column_sums
    parameters += [f"int {name}" for name in scalars]
    z = f"{of}z" if epilogue.save_preactivation else "nullptr"
    added = ", ".join(bias or ["nullptr"])
    joined = ("&" * maps_rest + "residual") if rest else "nullptr"
    shape = "n, m" if is_swapped(problem) else "m, n"
    sums = ", sums" * epilogue.column_sums
    finish = f"{{{of}out, {z}, nullptr, {added}, {joined}, {shape}{sums}}}"
    tail = "&b_tail" if has_tail else "nullptr"
    operands = f"&a, &b, {tail}, nullptr"
    return ", ".join(parameters), f"{operands}, {finish}, {', '.join(scalars)}"


def _parameters(maps: list[str], results: list[str], mapped: bool) -> list[str]:
    """Operands and results of an entry; results that are not mapped by address."""
    maps = [*maps, *results] if mapped else maps
    texts = [f"{_MAP} {name}" for name in maps]
    return texts if mapped else texts + [f"void* {name}" for name in results]


def _gated_signature(problem: GemmProblem) -> tuple[str, str]:
    """The same of a gated product."""
    saves = problem.epilogue.save_preactivation
    mapped = maps_results(dataclasses.replace(problem, n=problem.n // 2))
    results = ["out"] + ["g", "u"] * saves
    scalars = ["m", "n", "k", "batch", "a_batched", "b_batched"]
    parameters = _parameters(["a", "gate", "up"], results, mapped)
    parameters += [f"int {name}" for name in scalars]
    of = "&" if mapped else ""
    saved = f"{of}g, {of}u" if saves else "nullptr, nullptr"
    finish = f"{{{of}out, {saved}, nullptr, nullptr, m, n}}"
    operands = "&a, &gate, nullptr, &up"
    return ", ".join(parameters), f"{operands}, {finish}, {', '.join(scalars)}"
