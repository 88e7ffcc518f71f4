"""Kernels of norms as text: their operands, and what their Traits have in common.

Forward they read x, scale and bias, and write y, mean and inverse. Of gradients they
read all of these but y, and dy, and write dx and sums: those of dscale and dbias that
their blocks, or images, have. Callers: ``group_norm_sm90``, ``layer_norm``.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import ACTIVATION, CXX_TYPE, SHORT
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.problem import ITEMSIZE, GroupNormProblem

PACK_BYTES = 16
SM_THREADS, SM_REGISTERS = 2048, 65536

_READ = ("x", "scale", "bias")
_OPERANDS = {
    "forward": (_READ, ("y", "mean", "inverse")),
    "gradients": ((*_READ, "mean", "inverse", "dy"), ("dx", "sums")),
}
_FLOATS = ("mean", "inverse", "sums")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a kernel is launched.

    Attributes:
      blocks, threads: of the launch, and of a block.
      cluster: blocks of one.
      resident: blocks that a multiprocessor shall hold.
      smem_bytes: dynamic shared memory of a block.
    """

    blocks: int
    threads: int
    cluster: int = 1
    resident: int
    smem_bytes: int = 0


def pack(problem: GroupNormProblem) -> int:
    """Channels of 16 bytes."""
    return PACK_BYTES // ITEMSIZE[problem.dtype]


def kernel(
    problem: GroupNormProblem,
    device: CudaDevice,
    *,
    template: str,
    suffix: str,
    name: str,
    traits: str,
    sizes: tuple[tuple[str, int], ...],
    launch: Shape,
) -> Kernel:
    """One launch.

    Args:
      problem, device: what, and where.
      template: function of the forward header; that of gradients has "_backward" added.
      suffix: of the names of both headers, after those words.
      name: what tells this instance from others, beside the problem.
      traits: integers that Traits have.
      sizes: parameters of the kernel, and their values.
      launch: its shape.
    """
    p = problem
    function = template + "_backward" * (p.direction == "gradients")
    header = f"{function}{suffix}.cuh"
    words = (
        f"{function}{suffix}_{SHORT[p.dtype]}_{SHORT[p.parameters]}",
        "" if p.activation == "none" else p.activation,
        name,
    )
    entry = "_".join(filter(None, words))
    read, written = _OPERANDS[p.direction]
    scalars = [Scalar(value=value) for _, value in sizes]
    arguments = [f"const {_type(v)}* {v}" for v in read]
    arguments += [f"{_type(v)}* {v}" for v in written]
    arguments += [f"int {v}" for v, _ in sizes]
    if p.direction == "forward":
        scalars.append(Scalar(value=p.epsilon, dtype="float32"))
        arguments.append("float epsilon")
    names = ", ".join(argument.split()[-1] for argument in arguments)
    smem = "extern __shared__ __align__(16) tracea::u8 smem[];\n"
    source = f"""\
// {function}{suffix} | groups of {p.of_group}, {p.dtype} | {name}
#include "{header}"

namespace {{
struct Traits {{
  using Element = {CXX_TYPE[p.dtype]};
  using Parameter = {CXX_TYPE[p.parameters]};
  static constexpr int {traits};
  static constexpr auto kActivation = tracea::Activation::{ACTIVATION[p.activation]};
}};
}}  // namespace

{smem if launch.smem_bytes else ""}\
extern "C" __global__ void __launch_bounds__({launch.threads}, {launch.resident})
{entry}({", ".join(arguments)}) {{
  tracea::{function}<Traits>({{{names}}}{", smem" if launch.smem_bytes else ""});
}}
"""
    return Kernel(
        entry=entry,
        source=source,
        headers=sources.headers(header),
        arch=device.arch,
        grid=(launch.blocks, 1, 1),
        block=(launch.threads, 1, 1),
        cluster=(launch.cluster, 1, 1),
        smem_bytes=launch.smem_bytes,
        params=(
            *(Pointer(operand=i) for i in range(len(read) + len(written))),
            *scalars,
        ),
    )


def _type(name: str) -> str:
    return "float" if name in _FLOATS else "void"
