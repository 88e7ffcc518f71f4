"""The small kernels of attention_backward_sm90 as text, around the large ones.

    spans     the least and the largest segment id of tiles and blocks
    rows      exponent and delta of each query, from o, do and the log-sum-exp
    dq        dq from what the kernel for dk and dv added up

Caller: ``variants.attention_backward_sm90``.
"""

from __future__ import annotations

from tracea_jax.device import CudaDevice
from tracea_jax.emit import attention_backward_sm90 as sizes
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as forward
from tracea_jax.emit import sources
from tracea_jax.emit.attention_backward_sm90 import PART, AttentionBackwardSm90Config
from tracea_jax.emit.attention_map import MASK_INTEGERS, MASK_LONG, mask_steps
from tracea_jax.emit.attention_sm90 import DTYPES, WARP_ROWS, WARPGROUP, operand_map
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import AttentionProblem

_MAP = "const __grid_constant__ tracea::TensorMap"  # the type of a parameter


def rows_kernel(
    problem: AttentionProblem,
    config: AttentionBackwardSm90Config,
    device: CudaDevice,
    has_blind: bool,
) -> Kernel:
    """The first kernel: (o, do, lse, lengths, ids) -> rows (, blind)."""
    p = problem
    element, short = DTYPES[p.dtype]
    lanes = max(2, 1 << (-(-p.columns // 8) - 1).bit_length())
    length = sizes.padded(p, config)
    reads = sizes.rows_reads(p)
    entry = f"attention_rows_{short}_d{p.columns}" + "_qlen" * p.q_lengths
    entry += "_segments" * p.segments + "_blind" * has_blind
    entry += "_bias" * (p.bias is not None) + f"_{config.dq}" * config.adds
    writes = ("rows", *("blind",) * has_blind, *sizes.begun(config))
    low, of_low = _low_scores(p, reads)
    left, right = rules.window(p)
    columns = PART * forward.slabs(p.head_dim) * config.adds
    source = f"""\
// attention_rows | {p.dtype} dim {p.columns}
#include "attention_rows.cuh"

namespace {{
struct Traits {{
  using Element = {element};
  using BiasElement = {rules.bias_element(p)};
  static constexpr int kColumns = {p.columns}, kLanes = {lanes}, \
kThreads = {WARPGROUP}, kRows = {sizes.ROWS_TILE};
  static constexpr bool kQLengths = {cxx(p.q_lengths)}, \
kSegments = {cxx(p.segments)}, kBlind = {cxx(has_blind)}, \
kBiased = {cxx(p.bias is not None)}, kHasLeft = {cxx(left is not None)}, \
kHasRight = {cxx(right is not None)};
  static constexpr int kSumColumns = {columns}, kBlockQ = {config.block_q};
  static constexpr bool kOrdered = {cxx(config.dq == "ordered")};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({WARPGROUP})
{entry}(const void* o, const void* d_out, const float* lse, const int* q_lengths, \
const int* segments, float* rows, float* blind, float* sums, int* turns, int q_len, \
int padded, int heads{"".join(f", {kind} {name}" for name, kind in low.items())}) {{
  tracea::attention_rows<Traits>({{o, d_out, lse, q_lengths, segments, rows, blind, \
sums, turns, q_len, padded, heads, {{{", ".join(low)}}}}});
}}
"""
    return Kernel(
        entry=entry,
        source=source,
        headers=sources.headers("attention_rows.cuh"),
        arch=device.arch,
        grid=(-(-length // sizes.ROWS_TILE) * p.heads * p.batch, 1, 1),
        block=(WARPGROUP, 1, 1),
        smem_bytes=0,
        params=(
            *(Pointer(operand=i) for i in range(3)),
            Pointer(operand=sizes.number(reads, "q_lengths")),
            Pointer(operand=sizes.number(reads, "q_segments")),
            *(
                Pointer(operand=sizes.number((*reads, *writes), name))
                for name in ("rows", "blind", "sums", "turns")
            ),
            *(Scalar(value=value) for value in (p.q_len, length, p.heads)),
            *of_low,
        ),
    )


def _low_scores(
    problem: AttentionProblem, reads: tuple[str, ...]
) -> tuple[dict[str, str], list[Param]]:
    """Names and types of what tile/low_scores.cuh is told, and the launch's values."""
    p = problem
    if p.bias is None:
        return {}, []
    left, right = rules.window(p)
    of_mask = mask_steps(p)
    pointers = {"bias": "const void*", "mask": "const unsigned char*"}
    pointers |= {"kv_lengths": "const int*", "kv_segments": "const int*"}
    examples, heads, queries, keys = p.bias
    integers = {"kv_len": p.kv_len, "left": left or 0, "right": right or 0}
    integers |= {"bias_row": keys * (queries > 1), "bias_key": int(keys > 1)}
    integers |= {name: of_mask[name] for name in MASK_INTEGERS}
    long = {
        "bias_example": heads * queries * keys * (examples > 1),
        "bias_head": queries * keys * (heads > 1),
        **{name: of_mask[name] for name in MASK_LONG},
    }
    types = {**dict.fromkeys(integers, "int"), **dict.fromkeys(long, "long long")}
    params: list[Param] = [Pointer(operand=sizes.number(reads, n)) for n in pointers]
    params += [Scalar(value=value) for value in integers.values()]
    params += [Scalar(value=value, dtype="int64") for value in long.values()]
    return {**pointers, **types}, params


def spans_kernel(
    problem: AttentionProblem, config: AttentionBackwardSm90Config, device: CudaDevice
) -> Kernel:
    """The kernel (ids of queries, of keys) -> ids of keys in whole blocks, spans."""
    p = problem
    operands = (*sizes.SPANS_READ, "ids_kv", *sizes.SPANS)
    lists: list[str] = []
    params: list[Param] = []
    tiles = 0
    for i, (name, (ids, field)) in enumerate(sizes.SPANS.items()):
        size = getattr(config, field)
        length = p.q_len if ids == "q_segments" else p.kv_len
        copies = operands.index("ids_kv") if name == "spans_block_kv" else -1
        pointers = (operands.index(ids), operands.index(name), copies)
        params += [Pointer(operand=operand) for operand in pointers]
        params += [Scalar(value=length), Scalar(value=size)]
        lists.append(
            f"const int* ids{i}, tracea::SegmentSpan* spans{i}, "
            f"int* copies{i}, int length{i}, int size{i}"
        )
        tiles += -(-length // size)
    given = ", ".join(
        f"{{ids{i}, spans{i}, copies{i}, length{i}, size{i}}}"
        for i in range(len(lists))
    )
    source = f"""\
// attention_spans
#include "attention_spans.cuh"

extern "C" __global__ void __launch_bounds__({WARPGROUP})
attention_spans({", ".join(lists)}, int batch) {{
  const tracea::AttentionSpanList lists[] = {{{given}}};
  tracea::attention_spans<{WARPGROUP}>(lists, batch);
}}
"""
    return Kernel(
        entry="attention_spans",
        source=source,
        headers=sources.headers("attention_spans.cuh"),
        arch=device.arch,
        grid=(tiles * p.batch, 1, 1),
        block=(WARPGROUP, 1, 1),
        smem_bytes=0,
        params=(*params, Scalar(value=p.batch)),
    )


def dq_kernel(
    problem: AttentionProblem, config: AttentionBackwardSm90Config, device: CudaDevice
) -> Kernel:
    """The kernel (sums, turns) -> dq."""
    p, c = problem, config
    element, short = DTYPES[p.dtype]
    is_ordered = c.dq == "ordered"
    reads = sizes.dq_reads(c)
    of_rows = forward.slabs(p.head_dim) == 1
    base = "attention_backward_dq_sm90"
    entry = f"{base}_{short}" + "_ordered" * is_ordered + "_rows" * of_rows
    source = f"""\
// {base} | {p.dtype}
#include "{base}.cuh"

namespace {{
struct Traits {{
  using Element = {element};
  using Swizzle = {SWIZZLE_128B.cxx()};
  static constexpr bool kOrdered = {cxx(is_ordered)}, kPartsAreRows = {cxx(of_rows)};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({WARPGROUP})
{entry}({_MAP} dq, const float* sums, const int* turns, int parts, int heads, \
float scale) {{
  tracea::{base}<Traits>({{&dq, sums, turns, parts, heads, scale}});
}}
"""
    batch, heads, parts, _ = sizes.sums_shape(p, c)
    return Kernel(
        entry=entry,
        source=source,
        headers=sources.headers(f"{base}.cuh"),
        arch=device.arch,
        grid=(parts * heads * batch, 1, 1),
        block=(WARPGROUP, 1, 1),
        smem_bytes=0,
        params=(
            operand_map(p, len(reads), (p.q_len, heads), WARP_ROWS, p.head_dim),
            Pointer(operand=sizes.number(reads, "sums")),
            Pointer(operand=sizes.number(reads, "turns")),
            Scalar(value=parts),
            Scalar(value=heads),
            Scalar(value=p.scale, dtype="float32"),
        ),
    )
