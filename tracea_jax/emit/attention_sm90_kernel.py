"""The kernel of attention_sm90 as text: parameters, and the translation unit.

Sizes and the config are in ``emit.attention_sm90``. Caller:
``variants.attention_sm90``.
"""

from __future__ import annotations

import dataclasses
import math

from tracea_jax.device import CudaDevice
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as emit
from tracea_jax.emit import sources
from tracea_jax.emit.attention_sm90 import (
    DTYPES,
    ROWS,
    WARP_ROWS,
    AttentionSm90Config,
    Room,
    bias_map,
    draws,
    name_parts,
    operand_map,
    operands,
    packed_heads,
    slabs,
    smem_bytes,
)
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar, TensorMap
from tracea_jax.emit.wgmma import Wgmma
from tracea_jax.ir.pipeline import Ring
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import AttentionProblem

_MAP = "const __grid_constant__ tracea::TensorMap"  # the type of a parameter
_ALIBI = {None: "kNone", "linear": "kLinear", "distance": "kDistance"}
# Parameters behind the tensor maps and the log-sum-exp: pointers with their types, and
# numbers.
_POINTERS = {
    "counter": "unsigned*",
    "q_lengths": "const int*",
    "kv_lengths": "const int*",
    "q_segments": "const int*",
    "kv_segments": "const int*",
    "sinks": "const float*",
    "alibi_slopes": "const float*",
    "bias": "const void*",
    "map": "const unsigned*",
    "mask_words": "const unsigned*",
    "values": "const void*",
}
_INTEGERS = (
    *("batch", "q_len", "kv_len", "heads", "group", "left", "right", "ahead"),
    *("section", "map_example", "map_head", "bias_row", "mask_row"),
)
_LONG = ("bias_example", "bias_head", "mask_example", "mask_head")
_FACTORS = ("scale_log2", "unscale", "to_cap", "scale")
# setmaxnreg of the producer and of each consumer, by the number of consumers.
_REGISTERS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}
_REGISTERS_OF_WINDOWS = {**_REGISTERS, 3: (40, 152)}  # whose producer has more to keep


def kernel(
    problem: AttentionProblem, config: AttentionSm90Config, device: CudaDevice
) -> Kernel:
    """The kernel that computes a forward problem with this config.

    Operands are those of ``operands``; results are o, the log-sum-exp if it is saved,
    and the counter again. What only the launch needs stays out of the source: one cubin
    serves all lengths and numbers of heads.
    """
    t = problem.dtype
    scores = Wgmma(n=config.tile_kv, lhs=t, rhs=t)
    sums = Wgmma(n=problem.columns, lhs=t, rhs=t, lhs_in_registers=True)
    generated = {w.header_name: w.header for w in (scores, sums)}
    headers = (*sources.headers("attention_sm90.cuh"), *generated.items())
    limit = device.smem_per_block_bytes
    has = emit.room(problem, config, limit)
    return Kernel(
        entry=entry_name(problem, config),
        source=_source(problem, config, scores, sums, has),
        headers=tuple(sorted(headers)),
        arch=device.arch,
        grid=(emit.grid(problem, config, device.sm_count), 1, 1),
        block=(config.threads, 1, 1),
        smem_bytes=int(smem_bytes(problem, config, has)),
        params=_params(problem, config),
    )


def entry_name(problem: AttentionProblem, config: AttentionSm90Config) -> str:
    """Name of the kernel, readable in a profiler; it does not depend on lengths."""
    choices = str(config).replace(" ", "_")
    return "_".join(("attention_sm90", *name_parts(problem), choices))


def _params(
    problem: AttentionProblem, config: AttentionSm90Config
) -> tuple[Param, ...]:
    """The arguments of the entry point, in the order of ``_source``."""
    p = problem
    number = {name: i for i, name in enumerate(operands(p, config))}
    out = len(number)
    left, right = rules.window(p)
    keys = (p.kv_len, p.kv_heads)
    numbers = {
        "batch": p.batch,
        "q_len": p.q_len,
        "kv_len": p.kv_len,
        "heads": p.heads,
        "group": p.heads // p.kv_heads,
        "left": left or 0,
        "right": right or 0,
        "ahead": p.kv_len - p.q_len if p.aligned_at_end else 0,
        "section": emit.section(p) // packed_heads(p, config),
        **emit.steps(p, config),
    }
    number["values"] = number["v"] if rules.is_mapped(p) else -1
    product = 1.0 if rules.biased_by_tiles(p) else p.scale  # what scores then lack
    cap = p.soft_cap or 1.0
    last = p.soft_cap or product
    factors = (last * math.log2(math.e), 1 / p.scale, product / cap, p.scale)
    return (
        _query_map(p, config, 0, config.tile_q, p.head_dim),
        operand_map(p, 1, keys, config.tile_kv, p.head_dim),
        operand_map(p, 2, keys, config.tile_kv, p.columns),
        _query_map(p, config, out, WARP_ROWS, p.columns),
        *(
            bias_map(p, number["bias"], config.tile_q)
            for _ in range(rules.biased_by_tiles(p))
        ),
        Pointer(operand=out + 1 if p.saves_lse else -1),
        *(Pointer(operand=number.get(name, -1)) for name in _POINTERS),
        *(Scalar(value=numbers[name]) for name in _INTEGERS),
        *(Scalar(value=numbers[name], dtype="int64") for name in _LONG),
        *(Scalar(value=value, dtype="float32") for value in factors),
    )


def _query_map(
    problem: AttentionProblem,
    config: AttentionSm90Config,
    operand: int,
    rows: int,
    columns: int,
) -> TensorMap:
    """Boxes of ``rows`` rows of a tile, of queries or results.

    Where heads are packed, the next row is that of the next head.
    """
    whole = operand_map(problem, operand, (problem.q_len, problem.heads), rows, columns)
    packed = packed_heads(problem, config)
    if packed == 1:
        return whole
    row, query, example = columns * emit.ITEMSIZE, *whole.strides[::2]
    return dataclasses.replace(
        whole,
        dims=(columns, problem.heads, problem.q_len, problem.batch),
        strides=(row, query, example),
        box=(ROWS, packed, rows // packed, 1),
    )


def _follows(problem: AttentionProblem, config: AttentionSm90Config, has: Room) -> bool:
    """Returns whether a tile is stored while the next, whose queries are there, begins.

    On an H100 this gained 1 % where two consumers had nothing but positions to look at,
    and on an H200 up to 0.8 % where they see whole blocks of a mask. With segments,
    masks of scores, caps or three consumers it lost 1 to 5 %.
    """
    is_plain = not rules.is_mapped(problem) or _sees_whole(problem, config)
    can = config.schedule != "grid" and has.stages_q > 1
    return can and is_plain and config.consumers == 2 and problem.soft_cap is None


def _sees_whole(problem: AttentionProblem, config: AttentionSm90Config) -> bool:
    """Returns whether no score of a block that a tile sees needs a look."""
    looks = problem.bias is not None or problem.alibi is not None
    return bool(rules.sees_whole(problem, config)) and not looks


def _source(
    problem: AttentionProblem,
    config: AttentionSm90Config,
    scores: Wgmma,
    sums: Wgmma,
    has: Room,
) -> str:
    """The translation unit: Traits and one entry."""
    left, right = rules.window(problem)
    bias, tiled = problem.bias or (1, 1, 1, 1), rules.biased_by_tiles(problem)
    registers = _REGISTERS if left is None else _REGISTERS_OF_WINDOWS
    producer, consumer = registers[config.consumers]
    ring = Ring(stages=config.stages)
    follows = _follows(problem, config, has)
    # Keys are then a block ahead of values from tile to tile, too. On an H200 that
    # gained 1 to 5 % where tiles see few blocks, and lost 1.5 % where they see half of
    # all. Elsewhere it made no difference.
    whole = follows and _sees_whole(problem, config)
    typed = {
        **dict.fromkeys((*"qkvo", *("bias_tiles",) * tiled), _MAP),
        "lse": "float*",
        **_POINTERS,
        **dict.fromkeys(_INTEGERS, "int"),
        **dict.fromkeys(_LONG, "long long"),
        **dict.fromkeys(_FACTORS, "float"),
    }
    parameters = ", ".join(f"{cxx_type} {name}" for name, cxx_type in typed.items())
    maps = ["&q, &k, &v, &o", "&bias_tiles" if tiled else "nullptr"]
    arguments = ", ".join([*maps, *(n for n, t in typed.items() if t != _MAP)])
    return f"""\
// attention_sm90 | {problem.dtype} dim {problem.head_dim} | {config}
#include "attention_sm90.cuh"
#include "{scores.header_name}"
#include "{sums.header_name}"

namespace {{
struct Traits {{
  using Element = {DTYPES[problem.dtype][0]};
  using Scores = tracea::{scores.type_name}<0, 0>;
  using Sums = tracea::{sums.type_name}<0, 1>;
  using Swizzle = {SWIZZLE_128B.cxx()};
  using BiasElement = {rules.bias_element(problem)};
  static constexpr int kHeadDim = {problem.head_dim}, \
kSlabs = {slabs(problem.head_dim)}, kValueDim = {problem.columns}, \
kValueSlabs = {slabs(problem.columns)};
  static constexpr int kTileQ = {config.tile_q}, kTileKv = {config.tile_kv}, \
kStages = {config.stages}, kStagesQ = {has.stages_q}, \
kPacked = {packed_heads(problem, config)}, \
kBiasSlabs = {slabs(config.tile_kv)};
  static constexpr bool kHasLeft = {cxx(left is not None)}, \
kHasRight = {cxx(right is not None)}, kQLengths = {cxx(problem.q_lengths)}, \
kKvLengths = {cxx(problem.kv_lengths)}, kFromEnd = {cxx(rules.shifts(problem))};
  static constexpr bool kMapped = {cxx(rules.is_mapped(problem))}, \
kWholeBlocks = {cxx(whole)}, kSegments = {cxx(problem.segments)}, \
kMaskBits = {cxx(bool(rules.reads_mask(problem, config)))};
  static constexpr bool kBiased = {cxx(problem.bias is not None)}, \
kBiasKeys = {cxx(bias[3] > 1)}, kBiasPairs = {cxx(bias[3] % 2 == 0)}, \
kBiasTiles = {cxx(tiled)}, kBiasHeads = {cxx(bias[1] > 1)}, \
kBiasExamples = {cxx(bias[0] > 1)}, \
kExamplesFirst = {cxx(tiled and bias[0] == 1 < problem.batch)}, \
kSoftCap = {cxx(problem.soft_cap is not None)}, kSinks = {cxx(problem.sinks)};
  static constexpr tracea::Alibi kAlibi = tracea::Alibi::{_ALIBI[problem.alibi]};
  static constexpr bool kSavesLse = {cxx(problem.saves_lse)}, \
kPingPong = {cxx(config.ping_pong)}, kOverlaps = {cxx(config.overlap)}, \
kDraws = {cxx(draws(config))}, \
kStagesInPlace = {cxx(has.in_place)}, kFollows = {cxx(follows)}, \
kStreams = {cxx(whole)};
  static constexpr unsigned kFirstEmptyParity = {ring.producer_parity(0)};
  static constexpr int kThreads = {config.threads}, kProducerRegisters = {producer}, \
kConsumerRegisters = {consumer};
  static constexpr int kSmemBytes = {int(smem_bytes(problem, config, has))};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{entry_name(problem, config)}({parameters}) {{
  tracea::attention_sm90<Traits>({{{arguments}}});
}}
"""
