"""The kernel of attention_backward_sm90 for a bias's gradient, as text and numbers.

It owns tiles of the gradient and computes their scores again, for all that share the
bias: memory for scores is needed nowhere. Where there are few tiles it deals out what
is summed in parts. Caller: ``variants.attention_backward_sm90``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tracea_jax.device import CudaDevice
from tracea_jax.emit import attention_backward_sm90 as sizes
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sides as sides
from tracea_jax.emit import attention_sm90 as forward
from tracea_jax.emit import sources
from tracea_jax.emit.attention_backward_halves import factors
from tracea_jax.emit.attention_gradient_scores import WORDS, GradientScores
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.emit.wgmma import Wgmma
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import AttentionProblem

TILE_Q = 128  # queries of a tile
_WIDE, _NARROW = 128, 64  # keys of a tile
_STAGES = {128: 5, 64: 6}  # pairs of slabs in the ring, by the keys of a tile
_ROW_BYTES = 128  # of a slab
_BARRIERS = 1024
_THREADS = 3 * forward.WARPGROUP
_MOST_PARTS = 64
_BLOCKS = 2  # of threads, for each multiprocessor, that are enough
_ELEMENTS = {"float32": "float", "bfloat16": "tracea::bf16", "float16": "tracea::f16"}
_MAP = "const __grid_constant__ tracea::TensorMap"
_POINTERS = {
    "rows": "const float*",
    "q_lengths": "const int*",
    "kv_lengths": "const int*",
    "segments": "const int*",
    "gradient": "void*",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BiasGradient:
    """Method for the gradient of a problem's bias.

    Attributes:
      parts: what is summed is dealt out in.
      shape: of what the kernel writes: (parts, examples, heads, queries, keys), where a
        tile has an entry for each of its rows or columns even if they share the bias's.
      dtype: of that; the bias's, if nothing remains to be summed (is_whole).
    """

    parts: int
    shape: tuple[int, int, int, int, int]
    dtype: str
    is_whole: bool

    @property
    def writes(self) -> str:
        """The name of what the kernel writes."""
        return "dbias" if self.is_whole else "dbias_terms"


def tile_kv(problem: AttentionProblem) -> int:
    """Keys of a tile: what is done to scores one by one takes registers of many."""
    p = problem
    crowded = p.soft_cap is not None or p.alibi is not None or p.mask is not None
    return _NARROW if crowded or not rules.biased_by_tiles(p) else _WIDE


def of(problem: AttentionProblem, device: CudaDevice) -> BiasGradient:
    """Method for the gradient of the bias on a device."""
    p = problem
    examples, heads, queries, keys = p.bias or (1, 1, 1, 1)
    extents = (p.batch, p.heads, -(-p.q_len // TILE_Q), -(-p.kv_len // tile_kv(p)))
    owns = tuple(own > 1 for own in (examples, heads, queries, keys))
    tiles = math.prod(n for n, own in zip(extents, owns, strict=True) if own)
    terms = math.prod(n for n, own in zip(extents, owns, strict=True) if not own)
    parts = min(terms, _MOST_PARTS, -(-_BLOCKS * device.sm_count // tiles))
    is_whole = parts == 1 and queries > 1 and keys > 1
    shape = (queries if queries > 1 else TILE_Q, keys if keys > 1 else tile_kv(p))
    return BiasGradient(
        parts=parts,
        shape=(parts, examples, heads, *shape),
        dtype=(p.bias_dtype or p.dtype) if is_whole else "float32",
        is_whole=is_whole,
    )


def sum_of_terms(module: Any, terms: Any, *, shape: tuple[int, ...], dtype: str) -> Any:
    """The gradient of a bias from what the kernel left of it.

    Args:
      module: the array module.
      terms: float32 (parts, examples, heads, rows, columns).
      shape, dtype: the bias's.
    """
    shared = tuple(i for i in (2, 3) if shape[i] == 1)
    found = module.sum(module.sum(terms, 0), shared, keepdims=True)
    return found.astype(dtype)


def smem_bytes(problem: AttentionProblem) -> int:
    """Shared memory of a block: the ring, and two tiles of the bias."""
    keys = tile_kv(problem)
    bias = 2 * TILE_Q * keys * 2 * rules.biased_by_tiles(problem)
    return _STAGES[keys] * (TILE_Q + keys) * _ROW_BYTES + bias + _BARRIERS


def beside(problem: AttentionProblem) -> GradientScores:
    """Biases and masks of the kernel."""
    side = sides.of_queries(problem, TILE_Q, tile_kv(problem), "bias")
    return GradientScores(
        problem=problem, side=side, is_mapped=rules.is_mapped(problem)
    )


def reads(problem: AttentionProblem) -> tuple[str, ...]:
    """Operands of the kernel."""
    return (*sizes.common_reads(problem), *beside(problem).reads)


def kernel(problem: AttentionProblem, config: Any, device: CudaDevice) -> Kernel:
    """The kernel (q, k, v, do, rows, lengths, ids, bias, ...) -> dbias or its terms."""
    p, how, told = problem, of(problem, device), beside(problem)
    operands = (*reads(p), how.writes)
    queries, keys = (p.q_len, p.heads), (p.kv_len, p.kv_heads)
    maps = {
        "q": forward.operand_map(p, 0, queries, TILE_Q, p.head_dim),
        "k": forward.operand_map(p, 1, keys, tile_kv(p), p.head_dim),
        "v": forward.operand_map(p, 2, keys, tile_kv(p), p.columns),
        "d_out": forward.operand_map(p, 3, queries, TILE_Q, p.columns),
        "bias": told.bias_map(operands, TILE_Q),
    }
    names = {"segments": "ids_kv", "gradient": how.writes}
    numbers = _numbers(p, config, how)
    last = {k: v for k, v in factors(p).items() if k != "scale"}
    scores = Wgmma(n=tile_kv(p), lhs=p.dtype, rhs=p.dtype)
    parameters = {
        **{name: _MAP for name, m in maps.items() if m},
        **_POINTERS,
        **dict.fromkeys(numbers, "int"),
        **dict.fromkeys(last, "float"),
        **told.parameters,
    }
    arguments = [f"&{name}" if m else "nullptr" for name, m in maps.items()]
    arguments += [*_POINTERS, *numbers, *last, f"{{{', '.join(told.parameters)}}}"]
    entry = _entry_name(p, told, how)
    return Kernel(
        entry=entry,
        source=_source(p, told, how, scores, entry, parameters, arguments),
        headers=tuple(
            sorted(
                (
                    *sources.headers("attention_backward_bias_sm90.cuh"),
                    (scores.header_name, scores.header),
                )
            )
        ),
        arch=device.arch,
        grid=(min(pairs(p, how), device.sm_count), 1, 1),
        block=(_THREADS, 1, 1),
        smem_bytes=smem_bytes(p),
        params=(
            *(m for m in maps.values() if m),
            *(
                Pointer(operand=sizes.number(operands, names.get(name, name)))
                for name in _POINTERS
            ),
            *(Scalar(value=value) for value in numbers.values()),
            *(Scalar(value=value, dtype="float32") for value in last.values()),
            *told.params(operands),
        ),
    )


def _numbers(
    problem: AttentionProblem, config: Any, how: BiasGradient
) -> dict[str, int]:
    p = problem
    left, right = rules.window(p)
    return {
        **{"batch": p.batch, "q_len": p.q_len, "kv_len": p.kv_len, "heads": p.heads},
        "padded": sizes.padded(p, config),
        "padded_kv": sizes.padded_kv(p, config),
        "group": p.heads // p.kv_heads,
        **{"left": left or 0, "right": right or 0, "parts": how.parts},
        "pairs": pairs(p, how),
    }


def pairs(problem: AttentionProblem, how: BiasGradient) -> int:
    """Pairs of tiles that the kernel computes, of all parts."""
    parts, examples, heads, rows, columns = how.shape
    of_head = -(-rows // TILE_Q) * -(-columns // tile_kv(problem))
    return parts * examples * heads * -(-of_head // 2)


def _entry_name(
    problem: AttentionProblem, told: GradientScores, how: BiasGradient
) -> str:
    owns = "".join(
        name for name, n in zip("bhqk", problem.bias or (), strict=True) if n > 1
    )
    kind = [WORDS[f] for f, is_set in told.flags.items() if is_set and f in WORDS]
    parts = (
        "attention_backward_bias_sm90",
        forward.DTYPES[problem.dtype][1],
        f"d{problem.head_dim}" + (f"x{problem.value_dim}" if problem.value_dim else ""),
        *kind[1:],
        f"of_{owns or 'all'}",
        how.dtype,
    )
    return "_".join(parts)


def _source(
    problem: AttentionProblem,
    told: GradientScores,
    how: BiasGradient,
    scores: Wgmma,
    entry: str,
    parameters: dict[str, str],
    arguments: list[str],
) -> str:
    """The translation unit: Traits and one entry."""
    p = problem
    left, right = rules.window(p)
    flags = {
        "kHasLeft": left is not None,
        "kHasRight": right is not None,
        "kQLengths": p.q_lengths,
        "kKvLengths": p.kv_lengths,
        "kSegments": p.segments,
        "kSoftCap": p.soft_cap is not None,
        **told.flags,
        "kBiasQueries": (p.bias or (1, 1, 1, 1))[2] > 1,
        "kPairs": how.shape[-1] % 2 == 0,
        "kUnits": how.shape[-1] % 8 == 0 and how.dtype != "float32",
    }
    bools = ", ".join(f"{flag} = {cxx(is_set)}" for flag, is_set in flags.items())
    given = ", ".join(f"{cxx_type} {name}" for name, cxx_type in parameters.items())
    return f"""\
// attention_backward_bias_sm90 | {p.dtype} dim {p.head_dim} | {TILE_Q}x{tile_kv(p)}
#include "attention_backward_bias_sm90.cuh"
#include "{scores.header_name}"

namespace {{
struct Traits {{
  using Element = {forward.DTYPES[p.dtype][0]};
  using BiasElement = {told.element};
  using GradientElement = {_ELEMENTS[how.dtype]};
  using Scores = tracea::{scores.type_name}<0, 0>;
  using Swizzle = {SWIZZLE_128B.cxx()};
  static constexpr int kHeadDim = {p.head_dim}, kValueDim = {p.columns}, \
kTileQ = {TILE_Q}, kTileKv = {tile_kv(p)}, kStages = {_STAGES[tile_kv(p)]};
  static constexpr bool {bools};
  static constexpr int kThreads = {_THREADS}, kProducerRegisters = 40, \
kConsumerRegisters = 232;
  static constexpr int kSmemBytes = {smem_bytes(p)};
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({_THREADS}, 1)
{entry}({given}) {{
  tracea::attention_backward_bias_sm90<Traits>({{{", ".join(arguments)}}});
}}
"""
