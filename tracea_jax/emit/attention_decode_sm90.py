"""attention_decode_sm90 as text and numbers: its config, and the kernels of a problem.

There are two kernels: one computes the parts that the keys of a sequence are dealt out
to, one puts them together; with a single part there is only the first. A config holds
the free choices; shared memory, slots and grids follow from it and the problem, by the
pure functions here. Caller: ``variants.attention_decode_sm90``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.attention_sm90 import DTYPES, ROWS
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
from tracea_jax.ir.pipeline import Ring
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import AttentionProblem

THREADS = 160  # a warpgroup that multiplies, a warp that copies
COMBINE_THREADS = 128  # no fewer than there may be parts
FEW_ROWS = 16  # keys of a box of a block that a sequence does not fill
FEWEST_SLOTS = 3
_ITEMSIZE = 2
_ROW_BYTES = 128  # of a slab
_BARRIER_BYTES = 1024
_MOST_SLOTS = 16
_MAP = "const __grid_constant__ tracea::TensorMap"  # the type of a parameter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionDecodeSm90Config:
    """The free choices of attention_decode_sm90.

    Attributes:
      tile_kv: keys of a block.
      blocks_per_sm: thread blocks that share a multiprocessor, and its shared memory.
      splits: parts that the keys of a sequence are dealt out to, at most.
      persistent: whether there are no more thread blocks than run at a time, each of
        which computes several parts; else there is one for each part.
    """

    tile_kv: int
    blocks_per_sm: int = 2
    splits: int = 1
    persistent: bool = False

    def __str__(self) -> str:
        stays = " persistent" * self.persistent
        return f"{self.tile_kv} x{self.blocks_per_sm} split {self.splits}{stays}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Layout of keys in pages: (kv_heads, count, size, head_dim).

    Attributes:
      size: keys of a page.
      count: pages in all.
    """

    size: int
    count: int


def slabs(problem: AttentionProblem) -> int:
    """Slabs of 64 columns that a head is stored in."""
    return -(-problem.head_dim // ROWS)


def sides(problem: AttentionProblem) -> tuple[int | None, int | None]:
    """(left, right): a query sees keys from so far before it to so far behind it.

    None for no limit. Where queries stand may be known on the device alone, so that no
    side is known to exclude nothing.
    """
    left, right = problem.window or (None, None)
    if problem.is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def queries(problem: AttentionProblem) -> int:
    """Queries of a tile: with all heads that share keys, 64 rows at most."""
    group = problem.heads // problem.kv_heads
    return max(1, min(problem.q_len, ROWS // group))


def tiles(problem: AttentionProblem) -> int:
    """Tiles of rows over all key heads of all sequences."""
    of_sequence = -(-problem.q_len // queries(problem))
    return of_sequence * problem.kv_heads * problem.batch


def slots(
    problem: AttentionProblem, config: AttentionDecodeSm90Config, device: CudaDevice
) -> Any:
    """Blocks of keys or of values that shared memory holds."""
    whole = device.smem_of_each(config.blocks_per_sm)
    room = whole - _BARRIER_BYTES - slabs(problem) * ROWS * _ROW_BYTES
    return room // (slabs(problem) * config.tile_kv * _ROW_BYTES)


def kernels(
    problem: AttentionProblem,
    config: AttentionDecodeSm90Config,
    device: CudaDevice,
    pages: Pages | None = None,
) -> tuple[Kernel, ...]:
    """The kernels for a forward problem with this config.

    The first kernel's operands are q, k, v, the lengths, if there are any, and with
    pages the table of them. If it is the only one its results are o and the
    log-sum-exp, if that is saved; else they are the sums and totals, which are the
    operands of the second.
    """
    t = problem.dtype
    scores = Wgmma(n=config.tile_kv, lhs=t, rhs=t)
    sums = Wgmma(n=problem.head_dim, lhs=t, rhs=t, lhs_in_registers=True)
    generated = {w.header_name: w.header for w in (scores, sums)}
    headers = (*sources.headers("attention_decode_sm90.cuh"), *generated.items())
    count = _slots(problem, config, device)
    parts = Kernel(
        entry=entry_name(problem, config, pages),
        source=_source(problem, config, pages, scores, sums, count),
        headers=tuple(sorted(headers)),
        arch=device.arch,
        grid=(_blocks(problem, config, device), 1, 1),
        block=(THREADS, 1, 1),
        smem_bytes=_smem_bytes(problem, config, count),
        params=_params(problem, config, pages),
    )
    if config.splits == 1:
        return (parts,)
    return parts, _combine(problem, config, device)


def _blocks(
    problem: AttentionProblem, config: AttentionDecodeSm90Config, device: CudaDevice
) -> int:
    """Thread blocks of the first launch."""
    items = tiles(problem) * config.splits
    at_once = device.sm_count * config.blocks_per_sm
    return min(items, at_once) if config.persistent else items


def _slots(
    problem: AttentionProblem, config: AttentionDecodeSm90Config, device: CudaDevice
) -> int:
    return min(_MOST_SLOTS, int(slots(problem, config, device)))


def _smem_bytes(
    problem: AttentionProblem, config: AttentionDecodeSm90Config, count: int
) -> int:
    rows = ROWS + count * config.tile_kv
    return slabs(problem) * rows * _ROW_BYTES + _BARRIER_BYTES


def _boxes(config: AttentionDecodeSm90Config, pages: Pages | None) -> tuple[int, int]:
    """Keys of a box of a whole block, and of one that a sequence does not fill."""
    whole = min(config.tile_kv, pages.size) if pages else config.tile_kv
    return whole, min(FEW_ROWS, whole)


def entry_name(
    problem: AttentionProblem,
    config: AttentionDecodeSm90Config,
    pages: Pages | None = None,
) -> str:
    """Name of the kernel, readable in a profiler; it does not depend on lengths."""
    left, right = sides(problem)
    parts = (
        DTYPES[problem.dtype][1],
        f"d{problem.head_dim}",
        "left" if left is not None else "",
        "right" if right is not None else "",
        "from_end" if problem.aligned_at_end else "",
        "kvlen" if problem.kv_lengths else "",
        "lse" if _saves_lse(problem, config) else "",
        f"pages_of_{_boxes(config, pages)[0]}" if pages else "",
        f"{config.tile_kv}x{config.blocks_per_sm}",
        "parts" if config.splits > 1 else "",
    )
    return "_".join(("attention_decode_sm90", *filter(None, parts)))


def _saves_lse(problem: AttentionProblem, config: AttentionDecodeSm90Config) -> bool:
    """Returns whether the first kernel does."""
    return problem.saves_lse and config.splits == 1


def _params(
    problem: AttentionProblem, config: AttentionDecodeSm90Config, pages: Pages | None
) -> tuple[Param, ...]:
    """The arguments of the first kernel's entry point, in the order of ``_source``."""
    p, is_whole = problem, config.splits == 1
    table = 3 + p.kv_lengths
    out = table + (pages is not None)
    left, right = sides(p)
    results = {
        "o": out if is_whole else -1,
        "lse": out + 1 if _saves_lse(p, config) else -1,
        "sums": -1 if is_whole else out,
        "totals": -1 if is_whole else out + 1,
        "kv_lengths": 3 if p.kv_lengths else -1,
        "pages": table if pages else -1,
    }
    numbers = (
        *(p.q_len, p.kv_len, p.heads, p.heads // p.kv_heads, left or 0, right or 0),
        *(tiles(p) * config.splits, config.splits, queries(p)),
        *((pages.size, p.kv_len // pages.size) if pages else (1, 1)),
    )
    boxes = _boxes(config, pages)
    return (
        _map_of_queries(p),
        *(_map_of_keys(p, pages, side, rows) for rows in boxes for side in (1, 2)),
        *(Pointer(operand=number) for number in results.values()),
        *(Scalar(value=value) for value in numbers),
        _scale(p),
    )


def _scale(problem: AttentionProblem) -> Scalar:
    return Scalar(value=problem.scale * math.log2(math.e), dtype="float32")


def _map_of_queries(problem: AttentionProblem) -> TensorMap:
    """Boxes of the heads that share keys, of the queries of a tile."""
    p = problem
    row = p.head_dim * _ITEMSIZE
    return TensorMap(
        operand=0,
        dtype=p.dtype,
        dims=(p.head_dim, p.heads, p.q_len, p.batch),
        strides=(row, p.heads * row, p.q_len * p.heads * row),
        box=(ROWS, p.heads // p.kv_heads, queries(p), 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )


def _map_of_keys(
    problem: AttentionProblem, pages: Pages | None, operand: int, rows: int
) -> TensorMap:
    """Boxes of ``rows`` keys of a slab of one head of one sequence, or of one page."""
    p = problem
    row = p.head_dim * _ITEMSIZE
    dims = (p.head_dim, p.kv_len, p.kv_heads, p.batch)
    strides = (p.kv_heads * row, row, p.kv_len * p.kv_heads * row)
    if pages:
        page = pages.size * row
        dims = (p.head_dim, pages.size, p.kv_heads, pages.count)
        strides = (row, pages.count * page, page)
    return TensorMap(
        operand=operand,
        dtype=p.dtype,
        dims=dims,
        strides=strides,
        box=(ROWS, rows, 1, 1),
        swizzle=TensorMapSwizzle(SWIZZLE_128B.tensor_map_mode()),
    )


def _source(
    problem: AttentionProblem,
    config: AttentionDecodeSm90Config,
    pages: Pages | None,
    scores: Wgmma,
    sums: Wgmma,
    count: int,
) -> str:
    """The translation unit of the first kernel: Traits and one entry."""
    left, right = sides(problem)
    whole, few = _boxes(config, pages)
    scalars = "q_len kv_len heads group left right items splits queries"
    names = [*scalars.split(), "page_rows", "page_count"]
    parameters = [f"{_MAP} {name}" for name in ("q", "k", "v", "k_few", "v_few")]
    parameters += ["void* o", "float* lse", "float* sums", "float* totals"]
    parameters += ["const int* kv_lengths", "const int* pages"]
    parameters += [*(f"int {name}" for name in names), "float scale_log2"]
    arguments = "&q, &k, &v, &k_few, &v_few, o, lse, sums, totals, kv_lengths, pages"
    return f"""\
// attention_decode_sm90 | {problem.dtype} dim {problem.head_dim} | {config.tile_kv} \
x{config.blocks_per_sm}
#include "attention_decode_sm90.cuh"
#include "{scores.header_name}"
#include "{sums.header_name}"

namespace {{
struct Traits {{
  using Element = {DTYPES[problem.dtype][0]};
  using Scores = tracea::{scores.type_name}<0, 0>;
  using Sums = tracea::{sums.type_name}<0, 1>;
  using Swizzle = {SWIZZLE_128B.cxx()};
  static constexpr int kHeadDim = {problem.head_dim}, kSlabs = {slabs(problem)};
  static constexpr int kTileKv = {config.tile_kv}, kSlots = {count};
  static constexpr int kBoxRows = {whole}, kFewRows = {few};
  static constexpr bool kHasLeft = {cxx(left is not None)}, \
kHasRight = {cxx(right is not None)}, kKvLengths = {cxx(problem.kv_lengths)}, \
kFromEnd = {cxx(problem.aligned_at_end)};
  static constexpr bool kPaged = {cxx(pages is not None)}, \
kSplits = {cxx(config.splits > 1)}, \
kSavesLse = {cxx(_saves_lse(problem, config))};
  static constexpr unsigned kFirstEmptyParity = {Ring(stages=count).producer_parity(0)};
  static constexpr int kThreads = {THREADS};
  static constexpr int kSmemBytes = {_smem_bytes(problem, config, count)};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({THREADS}, {config.blocks_per_sm})
{entry_name(problem, config, pages)}({", ".join(parameters)}) {{
  tracea::attention_decode_sm90<Traits>(
      {{{arguments}, {", ".join(names)}, scale_log2}});
}}
"""


def _combine(
    problem: AttentionProblem, config: AttentionDecodeSm90Config, device: CudaDevice
) -> Kernel:
    """Sums and totals to o, and the log-sum-exp if it is saved."""
    p = problem
    rows = p.batch * p.q_len * p.heads
    lse = "_lse" * p.saves_lse
    entry = f"attention_combine_{DTYPES[p.dtype][1]}_d{p.head_dim}{lse}"
    names = ["splits", "heads", "q_len"]
    parameters = ["const float* sums", "const float* totals", "void* o", "float* lse"]
    parameters += [*(f"int {name}" for name in names), "float scale_log2"]
    source = f"""\
#include "attention_combine.cuh"

namespace {{
struct Traits {{
  using Element = {DTYPES[p.dtype][0]};
  static constexpr int kHeadDim = {p.head_dim}, kThreads = {COMBINE_THREADS};
  static constexpr bool kSavesLse = {cxx(p.saves_lse)};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({COMBINE_THREADS})
{entry}({", ".join(parameters)}) {{
  tracea::attention_combine<Traits>(
      {{sums, totals, o, lse, {", ".join(names)}, scale_log2}});
}}
"""
    return Kernel(
        entry=entry,
        source=source,
        headers=sources.headers("attention_combine.cuh"),
        arch=device.arch,
        grid=(rows, 1, 1),
        block=(COMBINE_THREADS, 1, 1),
        smem_bytes=0,
        params=(
            *(Pointer(operand=i) for i in (0, 1, 2, 3 if p.saves_lse else -1)),
            *(Scalar(value=v) for v in (config.splits, p.heads, p.q_len)),
            _scale(p),
        ),
    )
