"""Texts of HIP and Metal kernels, run by the host in place of a GPU.

The text that is emitted is compiled by clang for the host, over the shims in
``host_gpu``, which emulate threads, barriers, shared memory and matrix instructions.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
import subprocess
from typing import Any

import jax.numpy as jnp
import numpy as np

from tracea_jax.emit.epilogue import has_bias
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.emit.targets import Target
from tracea_jax.problem import GemmProblem
from tracea_jax.runtime import clang

SHIMS = pathlib.Path(__file__).parent / "host_gpu"
_OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-attributes", "-w")


def run(
    problem: GemmProblem, kernel: Kernel, target: Target, directory: pathlib.Path
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The results of a kernel on random operands, each with what float64 makes of them.

    Raises:
      AssertionError: the host ended the kernel; the message says why.
    """
    operands = _operands(problem, np.random.default_rng(0))
    results = _results(problem)
    library = ctypes.CDLL(str(_build(kernel, target, directory)))
    library.guarded.restype = ctypes.c_void_p
    places = [_placed(library, a) for a in (*operands.values(), *results.values())]
    library.tracea_run((ctypes.c_void_p * len(places))(*places))
    for place, result in zip(places[len(operands) :], results.values(), strict=True):
        ctypes.memmove(result.ctypes.data, place, result.nbytes)
    expected = _expected(problem, operands)
    return {name: (result, expected[name]) for name, result in results.items()}


def _placed(library: Any, array: np.ndarray) -> int:
    place = library.guarded(ctypes.c_size_t(array.nbytes))
    ctypes.memmove(place, np.ascontiguousarray(array).ctypes.data, array.nbytes)
    return place


def _build(kernel: Kernel, target: Target, directory: pathlib.Path) -> pathlib.Path:
    source = clang.write(kernel, directory)
    metal = target.dialect == "metal"
    shim = "metal_stdlib" if metal else "gfx.hpp"
    if metal:  # a host knows none of the attributes
        source.write_text(re.sub(r"\[\[.*?\]\]", "", kernel.source))
    launcher = directory / "launcher.cc"
    launcher.write_text(
        f'#include "{shim}"\n#include "{source.name}"\n'
        + (_metal_launch if metal else _hip_launch)(kernel, target)
    )
    library = directory / "kernel.so"
    command = [clang.program(), *_OPTIONS, "-I", str(SHIMS), "-I", str(directory)]
    command += ["-x", "c++", str(launcher), "-o", str(library)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return library


def _hip_launch(kernel: Kernel, target: Target) -> str:
    arguments = [
        str(p.value) if isinstance(p, Scalar) else f"p[{p.operand}]"
        for p in kernel.params
        if isinstance(p, Scalar | Pointer)
    ]
    return f"""
extern "C" void tracea_run(void** p) {{
  host::run_grid({kernel.grid[0]}, {kernel.block[0]}, {target.wave},
                 host::poison_shared,
                 [=] {{ {kernel.entry}({", ".join(arguments)}); }});
}}
"""


def _metal_launch(kernel: Kernel, target: Target) -> str:
    head = kernel.source.rpartition(f"kernel void {kernel.entry}(")[2]
    types = re.findall(r"(\w+\*) \w+ \[\[buffer", head)  # of a pointer each
    pointers = [p.operand for p in kernel.params if isinstance(p, Pointer)]
    scalars = [str(p.value) for p in kernel.params if isinstance(p, Scalar)]
    arguments = [f"({t})p[{i}]" for t, i in zip(types, pointers, strict=True)]
    return f"""
#undef kernel
extern "C" void tracea_run(void** p) {{
  static Shape shape{{{", ".join(scalars)}}};
  char* shared = static_cast<char*>(guarded({kernel.smem_bytes}));
  host::run_grid(
      {kernel.grid[0]}, {kernel.block[0]}, {target.wave},
      [=] {{ std::memset(shared, 0xFF, {kernel.smem_bytes}); }},
      [=] {{
        {kernel.entry}({", ".join(arguments)}, shape, (uchar*)shared,
                       host::block_index, host::thread_index);
      }});
}}
"""


def _operands(problem: GemmProblem, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """lhs, rhs, bias and residual, as the kernel takes them."""
    p, e = problem, problem.epilogue
    left = (p.k, p.m) if p.layout[0] == "t" else (p.m, p.k)
    right = (p.n, p.k) if p.layout[1] == "t" else (p.k, p.n)
    shapes = {
        "lhs": (p.lhs, (p.batch if p.lhs_batched else 1, *left)),
        "rhs": (p.rhs, (p.batch if p.rhs_batched else 1, *right)),
    }
    if has_bias(e):
        rows = p.batch if e.bias == "batched_row" else 1
        shapes["bias"] = e.bias_dtype or p.out, (rows, 1, p.n)
    if e.residual:
        shapes["residual"] = e.residual_dtype or p.out, (p.batch, p.m, p.n)
    return {
        name: rng.standard_normal(shape).astype(jnp.dtype(dtype))
        for name, (dtype, shape) in shapes.items()
    }


def _results(problem: GemmProblem) -> dict[str, np.ndarray]:
    """Poisoned: what the kernel does not write stays NaN."""
    shape = (problem.batch, problem.m, problem.n)
    names = ("out", "z")[: 1 + problem.epilogue.save_preactivation]
    return {n: np.full(shape, np.nan, jnp.dtype(problem.out)) for n in names}


def _expected(
    problem: GemmProblem, operands: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    wide = {name: array.astype(np.float64) for name, array in operands.items()}
    lhs, rhs = (
        wide[name].swapaxes(1, 2) if side == "t" else wide[name]
        for name, side in zip(("lhs", "rhs"), problem.layout, strict=True)
    )
    z = lhs @ rhs + wide.get("bias", 0.0)
    y = _ACTIVATIONS[problem.epilogue.activation](z)
    if problem.epilogue.residual:
        multiplies = problem.epilogue.residual_op == "multiply"
        y = y * wide["residual"] if multiplies else y + wide["residual"]
    return {"out": y, "z": z}


def _gelu_exact(z: np.ndarray) -> np.ndarray:
    from scipy.special import ndtr

    return z * ndtr(z)


_ACTIVATIONS: dict[str, Any] = {
    "none": lambda z: z,
    "relu": lambda z: np.maximum(z, 0.0),
    "gelu": lambda z: 0.5 * z * (1 + np.tanh(0.7978845608 * (z + 0.044715 * z**3))),
    "gelu_exact": _gelu_exact,
    "silu": lambda z: z / (1 + np.exp(-z)),
}
