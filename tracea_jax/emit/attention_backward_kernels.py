"""The kernels of attention_backward_sm90 as text.

    keys      dk and dv, a tile of keys after the other
    queries   dq, a tile of queries after the other

The small kernels before and after them are in ``attention_backward_rows``. Grids and
the orders of tiles follow from config and problem. Caller:
``variants.attention_backward_sm90``.
"""

from __future__ import annotations

import math

from tracea_jax.device import CudaDevice
from tracea_jax.emit import attention_backward_sm90 as sizes
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as forward
from tracea_jax.emit import sources
from tracea_jax.emit.attention_backward_sm90 import PART, AttentionBackwardSm90Config
from tracea_jax.emit.attention_gradient_scores import WORDS, GradientScores, moves
from tracea_jax.emit.attention_sm90 import (
    DTYPES,
    ROWS,
    WARP_ROWS,
    WARPGROUP,
    operand_map,
)
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import (
    Kernel,
    Param,
    Pointer,
    Scalar,
    TensorMap,
    TensorMapSwizzle,
)
from tracea_jax.emit.wgmma import Wgmma
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import AttentionProblem

_ITEMSIZE = 2
_SECTION_BYTES = 32 << 20  # of queries that stay in L2 beside all else
_SPAN = "const tracea::SegmentSpan*"
_MAP = "const __grid_constant__ tracea::TensorMap"  # the type of a parameter
# setmaxnreg of the producer and of each consumer, by the number of consumers; and where
# two of them need more.
_REGISTERS = {2: (40, 232), 3: (32, 160)}
_ALL_REGISTERS = (24, 240)
_FEW = 192  # registers for sums and scores


def keys_kernel(
    problem: AttentionProblem,
    config: AttentionBackwardSm90Config,
    device: CudaDevice,
    has_blind: bool,
) -> Kernel:
    """The kernel (q, k, v, do, rows, lengths, everywhere) -> dk, dv."""
    p, c = problem, config
    beside = sizes.beside_keys(p, c)
    reads = sizes.keys_reads(p, c, has_blind)
    written = (*reads, *sizes.keys_writes(c))
    queries, keys = (p.q_len, p.heads), (p.kv_len, p.kv_heads)
    out = len(reads)
    left, right = rules.window(p)
    smem = int(sizes.keys_smem_bytes(p, c))
    consumers = sizes.consumers_of_keys(p, c)
    numbers = {
        **{"batch": p.batch, "q_len": p.q_len, "kv_len": p.kv_len},
        **{"kv_heads": p.kv_heads, "padded_kv": sizes.padded_kv(p, c)},
        "group": p.heads // p.kv_heads,
        **{"left": left or 0, "right": right or 0, "section": _keys_section(p)},
    }
    return _kernel(
        "keys",
        p,
        device,
        beside=beside,
        tile=(c.tile_kv, c.block_q, c.stages_q),
        flags={
            "kEverywhere": has_blind,
            "kAdds": bool(c.adds),
            "kOrdered": c.dq == "ordered",
            "kSplits": sizes.splits(p),
        },
        columns=(sizes.HALF, sizes.HALF)
        if sizes.splits(p)
        else (p.head_dim, p.columns),
        names=("TileKv", "BlockQ"),
        maps={
            "q": operand_map(p, 0, queries, c.block_q, p.head_dim),
            "k": operand_map(p, 1, keys, c.tile_kv, p.head_dim),
            "v": operand_map(p, 2, keys, c.tile_kv, p.columns),
            "d_out": operand_map(p, 3, queries, c.block_q, p.columns),
            "rows": _rows_map(p, c),
            "dk": operand_map(p, out, keys, WARP_ROWS, p.head_dim),
            "dv": operand_map(p, out + 1, keys, WARP_ROWS, p.columns),
            "bias": beside.bias_map(reads, c.block_q),
        },
        operands=written,
        pointers={
            "const float* everywhere": sizes.number(reads, "everywhere"),
            "const int* q_lengths": sizes.number(reads, "q_lengths"),
            "const int* kv_lengths": sizes.number(reads, "kv_lengths"),
            "const int* segments": sizes.number(reads, "ids_kv"),
            f"{_SPAN} spans_kv": sizes.number(reads, "spans_tile_kv"),
            f"{_SPAN} spans_q": sizes.number(reads, "spans_block_q"),
            "float* sums": sizes.number(written, "sums"),
            "int* turns": sizes.number(written, "turns"),
        },
        numbers=numbers,
        tiles=-(-p.kv_len // c.tile_kv) * p.kv_heads * p.batch,
        consumers=consumers,
        registers=sizes.keys_registers(p, c),
        smem=smem,
    )


def queries_kernel(
    problem: AttentionProblem, config: AttentionBackwardSm90Config, device: CudaDevice
) -> Kernel:
    """The kernel (q, k, v, do, rows, lengths) -> dq."""
    p, c = problem, config
    beside = sizes.beside_queries(p, c)
    reads = sizes.queries_reads(p, c)
    queries, keys = (p.q_len, p.heads), (p.kv_len, p.kv_heads)
    left, right = rules.window(p)
    numbers = {
        **{"batch": p.batch, "q_len": p.q_len, "kv_len": p.kv_len, "heads": p.heads},
        **{"padded": sizes.padded(p, c), "group": p.heads // p.kv_heads},
        **{"left": left or 0, "right": right or 0, "section": forward.section(p)},
    }
    return _kernel(
        "queries",
        p,
        device,
        beside=beside,
        tile=(c.tile_q, c.block_kv, c.stages_kv),
        flags={},
        columns=(p.head_dim, p.columns),
        names=("TileQ", "BlockKv"),
        maps={
            "q": operand_map(p, 0, queries, c.tile_q, p.head_dim),
            "k": operand_map(p, 1, keys, c.block_kv, p.head_dim),
            "v": operand_map(p, 2, keys, c.block_kv, p.columns),
            "d_out": operand_map(p, 3, queries, c.tile_q, p.columns),
            "dq": operand_map(p, len(reads), queries, WARP_ROWS, p.head_dim),
            "bias": beside.bias_map(reads, c.tile_q),
            "segments": _ids_map(p, c, reads) if p.segments else None,
        },
        operands=reads,
        pointers={
            "const float* rows": sizes.number(reads, "rows"),
            "const int* q_lengths": sizes.number(reads, "q_lengths"),
            "const int* kv_lengths": sizes.number(reads, "kv_lengths"),
            f"{_SPAN} spans_q": sizes.number(reads, "spans_tile_q"),
            f"{_SPAN} spans_kv": sizes.number(reads, "spans_block_kv"),
        },
        numbers=numbers,
        tiles=-(-p.q_len // c.tile_q) * p.heads * p.batch,
        consumers=c.tile_q // ROWS,
        registers=sizes.queries_registers(p, c),
        smem=int(sizes.queries_smem_bytes(p, c)),
    )


def factors(problem: AttentionProblem) -> dict[str, float]:
    """What the kernels multiply scores with."""
    p = problem
    product = 1.0 if moves(p) else p.scale  # what scores then lack
    bounds = product if p.soft_cap is None else p.soft_cap
    return {
        "scale": p.scale,
        "scale_log2": bounds * math.log2(math.e),
        "to_cap": product / bounds if p.soft_cap else 0.0,
    }


def _keys_section(problem: AttentionProblem) -> int:
    """Heads of keys whose tiles are neighbours: their queries stay in L2."""
    group = problem.heads // problem.kv_heads
    columns = problem.head_dim + problem.columns
    bytes_of_queries = problem.q_len * columns * _ITEMSIZE * group
    fitting = max(1, _SECTION_BYTES // bytes_of_queries)
    return min(fitting, problem.kv_heads * problem.batch)


def _rows_map(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> TensorMap:
    """Boxes of the numbers of a block of queries."""
    length, planes = sizes.padded(problem, config), sizes.planes(problem)
    head = 4 * length * planes
    return TensorMap(
        operand=4,
        dtype="float32",
        dims=(length, planes, problem.heads, problem.batch),
        strides=(4 * length, head, head * problem.heads),
        box=(config.block_q, planes, 1, 1),
        swizzle=TensorMapSwizzle.NONE,
    )


def _ids_map(
    problem: AttentionProblem,
    config: AttentionBackwardSm90Config,
    reads: tuple[str, ...],
) -> TensorMap:
    """Boxes of the ids of a block of keys."""
    length = sizes.padded_kv(problem, config)
    row = 4 * length
    return TensorMap(
        operand=sizes.number(reads, "ids_kv"),
        dtype="int32",
        dims=(length, problem.batch, 1, 1),
        strides=(row, row * problem.batch, row * problem.batch),
        box=(config.block_kv, 1, 1, 1),
        swizzle=TensorMapSwizzle.NONE,
    )


def _kernel(
    name: str,
    problem: AttentionProblem,
    device: CudaDevice,
    *,
    beside: GradientScores,
    tile: tuple[int, int, int],
    flags: dict[str, bool],
    columns: tuple[int, int],
    names: tuple[str, str],
    maps: dict[str, TensorMap | None],
    operands: tuple[str, ...],
    pointers: dict[str, int],
    numbers: dict[str, int],
    tiles: int,
    consumers: int,
    registers: int,
    smem: int,
) -> Kernel:
    """The translation unit, Traits and one entry, and its launch."""
    p = problem
    own, other, stages = tile
    element, short = DTYPES[p.dtype]
    scores = Wgmma(n=other, lhs=p.dtype, rhs=p.dtype)
    sums, of_values = (
        Wgmma(n=n, lhs=p.dtype, rhs=p.dtype, lhs_in_registers=True) for n in columns
    )
    part = Wgmma(n=PART, lhs=p.dtype, rhs=p.dtype)
    left, right = rules.window(p)
    flags = {
        "kHasLeft": left is not None,
        "kHasRight": right is not None,
        "kQLengths": p.q_lengths,
        "kKvLengths": p.kv_lengths,
        "kSegments": p.segments,
        "kSoftCap": p.soft_cap is not None,
        **beside.flags,
        **flags,
    }
    words = {"kHasLeft": "left", "kHasRight": "right", "kQLengths": "qlen"}
    words |= {"kKvLengths": "kvlen", "kSegments": "segments", "kSoftCap": "cap"}
    words |= WORDS | {
        "kEverywhere": "everywhere",
        "kAdds": "adds",
        "kOrdered": "ordered",
    }
    kind = [words[f] for f, is_set in flags.items() if is_set and f in words]
    base = f"attention_backward_{name}_sm90"
    dims = f"d{p.head_dim}" + (f"x{p.value_dim}" if p.value_dim else "")
    parts = (base, short, dims, *kind, f"{own}x{other}_s{stages}")
    entry = "_".join(parts)
    threads = WARPGROUP * (1 + consumers)
    producer, consumer = _REGISTERS[consumers]
    if consumers == 2 and registers > _FEW:
        producer, consumer = _ALL_REGISTERS
    parameters = [f"{_MAP} {name}" for name, m in maps.items() if m] + list(pointers)
    floats = factors(p)
    parameters += [f"int {n}" for n in numbers] + [f"float {n}" for n in floats]
    arguments = [f"&{name}" if m else "nullptr" for name, m in maps.items()]
    arguments += [x.split()[-1] for x in pointers]
    arguments += [*numbers, *floats, f"{{{', '.join(beside.parameters)}}}"]
    parameters += [f"{kind} {name}" for name, kind in beside.parameters.items()]
    headers = dict(sources.headers(f"{base}.cuh"))
    headers |= {w.header_name: w.header for w in (scores, sums, of_values, part)}
    bools = ", ".join(f"{flag} = {cxx(is_set)}" for flag, is_set in flags.items())
    source = f"""\
// {base} | {p.dtype} {dims} | {own}x{other} s{stages}
#include "{base}.cuh"
#include "{scores.header_name}"
#include "{sums.header_name}"
#include "{of_values.header_name}"
#include "{part.header_name}"

namespace {{
struct Traits {{
  using Element = {element};
  using Scores = tracea::{scores.type_name}<0, 0>;
  using Sums = tracea::{sums.type_name}<0, 1>;
  using ValueSums = tracea::{of_values.type_name}<0, 1>;
  using Dq = tracea::{part.type_name}<1, 1>;
  using Swizzle = {SWIZZLE_128B.cxx()};
  using BiasElement = {beside.element};
  static constexpr int kHeadDim = {p.head_dim}, kSlabs = {forward.slabs(p.head_dim)};
  static constexpr int kValueDim = {p.columns}, \
kValueSlabs = {forward.slabs(p.columns)};
  static constexpr int k{names[0]} = {own}, k{names[1]} = {other}, kStages = {stages}, \
kMostBlocks = {sizes.MOST_BLOCKS};
  static constexpr bool {bools};
  static constexpr int kThreads = {threads}, kProducerRegisters = {producer}, \
kConsumerRegisters = {consumer};
  static constexpr int kSmemBytes = {smem};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({threads}, 1)
{entry}({", ".join(parameters)}) {{
  tracea::{base}<Traits>({{{", ".join(arguments)}}});
}}
"""
    params: tuple[Param, ...] = (
        *(m for m in maps.values() if m),
        *(Pointer(operand=operand) for operand in pointers.values()),
        *(Scalar(value=value) for value in numbers.values()),
        *(Scalar(value=value, dtype="float32") for value in floats.values()),
        *beside.params(operands),
    )
    return Kernel(
        entry=entry,
        source=source,
        headers=tuple(sorted(headers.items())),
        arch=device.arch,
        grid=(tiles, 1, 1),
        block=(threads, 1, 1),
        smem_bytes=smem,
        params=params,
    )
