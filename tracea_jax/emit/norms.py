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
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar
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
    """Launch of a kernel.

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormKernel:
    """One launch.

    Attributes:
      problem: what it computes.
      template: function of the forward header; that of gradients has "_backward" added.
      suffix: of the names of both headers, after those words.
      name: what tells this instance from others, beside the problem.
      traits: integers that Traits have.
      sizes: parameters of the kernel, and their values.
      launch: its shape.
    """

    problem: GroupNormProblem
    template: str
    suffix: str
    name: str
    traits: str
    sizes: dict[str, int]
    launch: Shape

    @property
    def function(self) -> str:
        """Name of the device function."""
        return self.template + "_backward" * (self.problem.direction == "gradients")

    @property
    def header(self) -> str:
        return f"{self.function}{self.suffix}.cuh"

    @property
    def entry(self) -> str:
        p = self.problem
        words = (
            f"{self.function}{self.suffix}_{SHORT[p.dtype]}_{SHORT[p.parameters]}",
            "" if p.activation == "none" else p.activation,
            self.name,
        )
        return "_".join(filter(None, words))

    @property
    def parameters(self) -> dict[str, str]:
        """The entry point's parameters, name to type, in the order of ``params``."""
        read, written = _OPERANDS[self.problem.direction]
        return {
            **{name: f"const {_type(name)}*" for name in read},
            **{name: f"{_type(name)}*" for name in written},
            **dict.fromkeys(self.sizes, "int"),
            **({"epsilon": "float"} if self.problem.direction == "forward" else {}),
        }

    @property
    def params(self) -> tuple[Param, ...]:
        """The launch's arguments."""
        p = self.problem
        read, written = _OPERANDS[p.direction]
        epsilon = Scalar(value=p.epsilon, dtype="float32")
        return (
            *(Pointer(operand=i) for i in range(len(read) + len(written))),
            *(Scalar(value=value) for value in self.sizes.values()),
            *((epsilon,) if p.direction == "forward" else ()),
        )

    @property
    def source(self) -> str:
        """The translation unit: Traits and one entry."""
        p, launch, function = self.problem, self.launch, self.function
        declared = ", ".join(f"{kind} {name}" for name, kind in self.parameters.items())
        smem = "extern __shared__ __align__(16) tracea::u8 smem[];\n"
        return f"""\
// {function}{self.suffix} | groups of {p.of_group}, {p.dtype} | {self.name}
#include "{self.header}"

namespace {{
struct Traits {{
  using Element = {CXX_TYPE[p.dtype]};
  using Parameter = {CXX_TYPE[p.parameters]};
  static constexpr int {self.traits};
  static constexpr auto kActivation = tracea::Activation::{ACTIVATION[p.activation]};
}};
}}  // namespace

{smem if launch.smem_bytes else ""}\
extern "C" __global__ void __launch_bounds__({launch.threads}, {launch.resident})
{self.entry}({declared}) {{
  tracea::{function}<Traits>({{{", ".join(self.parameters)}}}\
{", smem" if launch.smem_bytes else ""});
}}
"""

    def kernel(self, device: CudaDevice) -> Kernel:
        return Kernel(
            entry=self.entry,
            source=self.source,
            headers=sources.headers(self.header),
            arch=device.arch,
            grid=(self.launch.blocks, 1, 1),
            block=(self.launch.threads, 1, 1),
            cluster=(self.launch.cluster, 1, 1),
            smem_bytes=self.launch.smem_bytes,
            params=self.params,
        )


def _type(name: str) -> str:
    return "float" if name in _FLOATS else "void"
