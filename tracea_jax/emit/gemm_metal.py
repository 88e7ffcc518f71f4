"""gemm_metal as text: the portable GEMM in the Metal shading language.

The body is ``kernels/metal/gemm.metal``; before it come the constants, after it the
entry. What is derived of a problem and a config comes from ``emit.gemm_sm80``, of which
this is the sibling. Nothing compiles the text here: Metal's compiler runs on macOS.
"""

from __future__ import annotations

from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import SHORT, cxx
from tracea_jax.emit.gemm_sm80 import (
    GemmSm80Config,
    lhs_tiles,
    params,
    rhs_tiles,
    signature,
    tile_count,
)
from tracea_jax.emit.kernel import Kernel
from tracea_jax.emit.targets import Target, ring_bytes
from tracea_jax.problem import ACTIVATIONS, GemmProblem

_ELEMENT = {"bfloat16": "bfloat", "float16": "half", "float32": "float"}
_UNIT = {2: "ushort", 4: "uint", 8: "uint2", 16: "uint4"}  # by bytes
_ACTIVATION = {
    "none": "kNone",
    "relu": "kRelu",
    "gelu": "kGelu",
    "gelu_exact": "kGeluExact",
    "silu": "kSilu",
}


def kernel(problem: GemmProblem, config: GemmSm80Config, target: Target) -> Kernel:
    """The kernel that computes the problem with this config.

    Buffers are the operands and results of ``gemm_sm80.kernel``, in its order; the one
    after them holds m, n, k, and whether A and B are batched, as 32-bit integers.
    ``smem_bytes`` is the length of threadgroup memory 0.
    """
    return Kernel(
        entry=entry_name(problem, config),
        source=_source(problem, config, target),
        headers=(),
        arch=target.name,
        grid=(tile_count(problem, config), 1, 1),
        block=(target.threads(config), 1, 1),
        smem_bytes=ring_bytes(problem, config, target),
        params=params(problem),
    )


def entry_name(problem: GemmProblem, config: GemmSm80Config) -> str:
    """Name of the kernel; it does not depend on shapes."""
    left, right = lhs_tiles(problem, config), rhs_tiles(problem, config)
    aligned = f"v{left.align_bytes}x{right.align_bytes}"
    types = f"{SHORT[problem.lhs]}_{SHORT[problem.out]}_{problem.layout}"
    steps = epilogues.name_parts(problem.epilogue)
    choices = str(config).replace(" ", "_")
    return "_".join(("gemm_metal", types, *steps, aligned, choices))


def _source(problem: GemmProblem, config: GemmSm80Config, target: Target) -> str:
    types = f"{problem.lhs} -> {problem.out} {problem.layout}"
    return f"""\
// gemm_metal | {types}, epilogue {problem.epilogue} | {config}
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

using namespace metal;

{_constants(problem, config, target)}

struct Shape {{
  int m, n, k;
  int a_batched, b_batched;  // 0 if all batches share the operand
}};

{sources.text("gemm.metal", "metal")}
{_entry(problem, config)}"""


def _constants(problem: GemmProblem, config: GemmSm80Config, target: Target) -> str:
    """The types and constants that the body is written with, one to a line."""
    e = problem.epilogue
    left, right = lhs_tiles(problem, config), rhs_tiles(problem, config)
    types = {
        "Element": _ELEMENT[problem.lhs],
        "ElementOut": _ELEMENT[problem.out],
        "ElementBias": _ELEMENT[e.bias_dtype or problem.out],
        "ElementResidual": _ELEMENT[e.residual_dtype or problem.out],
        "UnitA": _UNIT[left.align_bytes],
        "UnitB": _UNIT[right.align_bytes],
    }
    numbers = {
        "kTileM": config.tile_m,
        "kTileN": config.tile_n,
        "kTileK": config.tile_k,
        "kWarpsM": config.warps_m,
        "kWarpsN": config.warps_n,
        "kStages": config.stages,
        "kRasterBand": config.raster_band,
        "kThreads": target.threads(config),
        "kAlignA": left.align_bytes,
        "kAlignB": right.align_bytes,
        **{_ACTIVATION[name]: i for i, name in enumerate(ACTIVATIONS)},
        "kActivation": _ACTIVATION[e.activation],
    }
    flags = {
        "kTransA": left.mn_major,
        "kTransB": not right.mn_major,
        "kHasBias": epilogues.has_bias(e),
        "kBiasIsBatched": e.bias == "batched_row",
        "kHasResidual": e.residual,
        "kMultipliesResidual": e.residual_op == "multiply",
        "kSavesPreactivation": e.save_preactivation,
    }
    lines = (
        *(f"using {name} = {text};" for name, text in types.items()),
        *(f"constant constexpr int {name} = {v};" for name, v in numbers.items()),
        *(f"constant constexpr bool {name} = {cxx(v)};" for name, v in flags.items()),
    )
    return "\n".join(lines)


_TYPES = {
    "a": "device const Element*",
    "b": "device const Element*",
    "bias": "device const ElementBias*",
    "residual": "device const ElementResidual*",
    "out": "device ElementOut*",
    "z": "device ElementOut*",
}


def _entry(problem: GemmProblem, config: GemmSm80Config) -> str:
    names = [text.split()[-1] for text in signature(problem)[0].split(", ")]
    buffers = [name for name in names if name in _TYPES]
    lines = [f"{_TYPES[name]} {name} [[buffer({i})]]" for i, name in enumerate(buffers)]
    lines += [
        f"constant const Shape& shape [[buffer({len(buffers)})]]",
        "threadgroup uchar* shared [[threadgroup(0)]]",
        "uint block [[threadgroup_position_in_grid]]",
        "uint thread_index [[thread_index_in_threadgroup]]",
    ]
    parameters = ",\n    ".join(lines)
    given = ", ".join(name if name in buffers else "nullptr" for name in _TYPES)
    return f"""\
kernel void {entry_name(problem, config)}(
    {parameters}) {{
  const Operands operands{{{given}}};
  gemm(operands, shape, shared, block, int(thread_index));
}}
"""
