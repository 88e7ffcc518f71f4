"""attention_sm80 as text and numbers: its config, and the kernel of a problem.

A config holds the free choices; shared memory, the grid and the order of tiles follow
from it and the problem, by the pure functions here and in ``attention_rules``. The
device code asserts that it arrives at the same numbers. Caller:
``variants.attention_sm80``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as hopper
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar
from tracea_jax.problem import AttentionProblem

DTYPES = hopper.DTYPES
WARP = 32
_BAND = 16  # queries that a warp multiplies at once
_ROW_BYTES = 128  # of a slab
UNITS = _ROW_BYTES // 16  # of such a row, that threads copy
# Parameters: pointers with their types, and numbers.
_POINTERS = {
    **dict.fromkeys("qkv", "const void*"),
    "o": "void*",
    "lse": "float*",
    **dict.fromkeys(("q_lengths", "kv_lengths"), "const int*"),
    **dict.fromkeys(("q_segments", "kv_segments"), "const int*"),
    "sinks": "const float*",
    "bias": "const void*",
    **dict.fromkeys(("map", "mask_words"), "const unsigned*"),
}
_INTEGERS = (
    *("batch", "q_len", "kv_len", "heads", "group", "left", "right", "section"),
    *("map_example", "map_head", "bias_row", "mask_row"),
)
_LONG = ("bias_example", "bias_head", "mask_example", "mask_head")
_FACTORS = ("scale_log2", "unscale", "to_cap")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSm80Config:
    """The free choices of attention_sm80.

    Attributes:
      tile_q: queries of a tile, which one block computes.
      tile_kv: keys of a block of keys.
      warps: of a block; each owns 16 or 32 queries.
      stages: blocks of keys or of values that shared memory holds.
    """

    tile_q: int
    tile_kv: int
    warps: int = 4
    stages: int = 2

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def schedule(self) -> str:
        """A block for each tile, see ``AttentionSm90Config``."""
        return "grid"

    @property
    def bands(self) -> Any:
        """Bands of 16 queries that a warp owns; 0 if it has no whole one."""
        whole = self.tile_q % (_BAND * self.warps) == 0
        return np.where(whole, self.tile_q // (_BAND * self.warps), 0)

    def __str__(self) -> str:
        return f"{self.tile_q}x{self.tile_kv} w{self.warps} s{self.stages}"


def smem_bytes(problem: AttentionProblem, config: AttentionSm80Config) -> Any:
    """Shared memory of one block: the queries, and a ring of keys and values."""
    keys, values = hopper.slabs(problem.head_dim), hopper.slabs(problem.columns)
    rows = keys * config.tile_q + config.stages * max(keys, values) * config.tile_kv
    return rows * _ROW_BYTES


def result_bytes(problem: AttentionProblem, config: AttentionSm80Config) -> Any:
    """Bytes of shared memory that results are staged in."""
    return hopper.slabs(problem.columns) * config.tile_q * _ROW_BYTES


def kernel(
    problem: AttentionProblem, config: AttentionSm80Config, device: CudaDevice
) -> Kernel:
    """The kernel that computes a forward problem with this config.

    Operands are those of ``operands``; results are o, and the log-sum-exp if it is
    saved. What only the launch needs stays out of the source: one cubin serves all
    lengths and numbers of heads.
    """
    return Kernel(
        entry=entry_name(problem, config),
        source=_source(problem, config),
        headers=sources.headers("attention_sm80.cuh"),
        arch=device.arch,
        grid=(hopper.tiles_q(problem, config) * problem.heads * problem.batch, 1, 1),
        block=(config.threads, 1, 1),
        smem_bytes=int(smem_bytes(problem, config)),
        params=_params(problem, config),
    )


def operands(problem: AttentionProblem, config: AttentionSm80Config) -> tuple[str, ...]:
    """Names of what the kernel reads: operands of the op, and buffers of the call."""
    return hopper.operands(problem, config)


def entry_name(problem: AttentionProblem, config: AttentionSm80Config) -> str:
    """Name of the kernel, readable in a profiler; it does not depend on lengths."""
    choices = str(config).replace(" ", "_")
    return "_".join(("attention_sm80", *hopper.name_parts(problem), choices))


def _params(
    problem: AttentionProblem, config: AttentionSm80Config
) -> tuple[Param, ...]:
    """The arguments of the entry point, in the order of ``_source``."""
    p = problem
    number = {name: i for i, name in enumerate(operands(p, config))}
    number["o"] = len(number)
    if p.saves_lse:
        number["lse"] = len(number)
    return (
        *(Pointer(operand=number.get(name, -1)) for name in _POINTERS),
        *_scalars(p, config),
    )


def _scalars(
    problem: AttentionProblem, config: AttentionSm80Config
) -> tuple[Scalar, ...]:
    p = problem
    left, right = rules.window(p)
    numbers = {
        **{"batch": p.batch, "q_len": p.q_len, "kv_len": p.kv_len, "heads": p.heads},
        "group": p.heads // p.kv_heads,
        **{"left": left or 0, "right": right or 0, "section": hopper.section(p)},
        **hopper.steps(p, config),
    }
    cap = p.soft_cap or 1.0
    scale_log2 = (p.soft_cap or p.scale) * math.log2(math.e)
    return scalars(numbers, _INTEGERS, _LONG, (scale_log2, 1 / p.scale, p.scale / cap))


def scalars(
    numbers: dict[str, int],
    integers: tuple[str, ...],
    long: tuple[str, ...],
    factors: tuple[float, ...],
) -> tuple[Scalar, ...]:
    """Numbers of a launch: those named, of 32 and of 64 bits, and factors."""
    return (
        *(Scalar(value=numbers[name]) for name in integers),
        *(Scalar(value=numbers[name], dtype="int64") for name in long),
        *(Scalar(value=value, dtype="float32") for value in factors),
    )


def rule_traits(
    problem: AttentionProblem,
    sides: tuple[int | None, int | None],
    reads_mask: Any,
) -> str:
    """The Traits that say which scores count; ``sides``: of the window."""
    left, right = sides
    return f"""\
  static constexpr bool kHasLeft = {cxx(left is not None)}, \
kHasRight = {cxx(right is not None)}, kFromEnd = {cxx(rules.shifts(problem))};
  static constexpr bool kMapped = {cxx(rules.is_mapped(problem))}, \
kSegments = {cxx(problem.segments)}, kMaskBits = {cxx(bool(reads_mask))}, \
kSoftCap = {cxx(problem.soft_cap is not None)};"""


def _source(problem: AttentionProblem, config: AttentionSm80Config) -> str:
    """The translation unit: Traits and one entry."""
    typed = {
        **_POINTERS,
        **dict.fromkeys(_INTEGERS, "int"),
        **dict.fromkeys(_LONG, "long long"),
        **dict.fromkeys(_FACTORS, "float"),
    }
    bias = problem.bias or (1, 1, 1, 1)
    reads_mask = rules.reads_mask(problem, config)
    parameters = ", ".join(f"{cxx_type} {name}" for name, cxx_type in typed.items())
    return f"""\
// attention_sm80 | {problem.dtype} dim {problem.head_dim} | {config}
#include "attention_sm80.cuh"

namespace {{
struct Traits {{
  using Element = {DTYPES[problem.dtype][0]};
  using BiasElement = {rules.bias_element(problem)};
  static constexpr int kHeadDim = {problem.head_dim}, kValueDim = {problem.columns};
  static constexpr int kTileQ = {config.tile_q}, kTileKv = {config.tile_kv}, \
kWarps = {config.warps}, kStages = {config.stages};
{rule_traits(problem, rules.window(problem), reads_mask)}
  static constexpr bool kQLengths = {cxx(problem.q_lengths)}, \
kKvLengths = {cxx(problem.kv_lengths)}, kSinks = {cxx(problem.sinks)}, \
kSavesLse = {cxx(problem.saves_lse)};
  static constexpr bool kBiased = {cxx(problem.bias is not None)}, \
kBiasKeys = {cxx(bias[3] > 1)}, kBiasPairs = {cxx(bias[3] % 2 == 0)};
  static constexpr int kThreads = {config.threads}, \
kSmemBytes = {int(smem_bytes(problem, config))};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{entry_name(problem, config)}({parameters}) {{
  tracea::attention_sm80<Traits>({{{", ".join(typed)}}});
}}
"""
