"""group_norm_sm90 in numbers: its config, what follows from it, and its kernels.

See ``kernels/cuda/group_norm_sm90.cuh`` and ``group_norm_backward_sm90.cuh``. Callers:
the variant of the same name, tests.
"""

from __future__ import annotations

import dataclasses
import math

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import ACTIVATION, CXX_TYPE, SHORT, cxx
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.problem import ITEMSIZE, GroupNormProblem

PACK_BYTES = 16
_SM_BYTES, _BLOCK_BYTES = 233472, 1024  # shared memory; what each block takes beside
_SM_THREADS, _SM_REGISTERS = 2048, 65536
_REGISTERS = {"forward": 80, "gradients": 120}  # that a thread can do with


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupNormConfig:
    """How an image is cut, and what stays in shared memory.

    Attributes:
      slab: channels of a cluster, whole groups of them.
      cluster: blocks that share a slab, by pixels.
      threads: of a block.
      keeps: whether a block keeps what it has read until the sums are known; else it is
        read twice.
    """

    slab: int
    cluster: int
    threads: int
    keeps: bool

    def __str__(self) -> str:
        keeps = " keeps" * self.keeps
        return f"slab {self.slab}, {self.cluster} x {self.threads}{keeps}"


def pack(problem: GroupNormProblem) -> int:
    """Channels of 16 bytes."""
    return PACK_BYTES // ITEMSIZE[problem.dtype]


def least_slab(problem: GroupNormProblem) -> int:
    """The fewest channels that are whole groups and whole packs."""
    return math.lcm(problem.of_group, pack(problem))


def lanes(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    return config.slab // pack(problem)


def rows(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    """Pixels that a block has at a time."""
    return config.threads // lanes(problem, config)


def shared_bytes(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    """Bytes of the sums."""
    numbers = 2 * pack(problem) * (config.threads + 4) + 4 * config.slab
    groups = 2 * (config.slab // problem.of_group)
    return -(-4 * (numbers + groups) // PACK_BYTES) * PACK_BYTES


def smem_bytes(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    """Bytes of a block: the sums, and what stays."""
    if not config.keeps:
        return shared_bytes(problem, config)
    of_block = -(-problem.pixels // config.cluster)
    of_thread = -(-of_block // rows(problem, config)) * arrays(problem)
    return shared_bytes(problem, config) + of_thread * config.threads * PACK_BYTES


def arrays(problem: GroupNormProblem) -> int:
    """Arrays that are read: x, and dy."""
    return 1 if problem.direction == "forward" else 2


def slabs(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    return -(-problem.channels // config.slab)


def blocks(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    return problem.images * slabs(problem, config) * config.cluster


def resident_blocks(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    """Blocks that a multiprocessor holds."""
    of_smem = _SM_BYTES // (smem_bytes(problem, config) + _BLOCK_BYTES)
    of_registers = _SM_REGISTERS // (_REGISTERS[problem.direction] * config.threads)
    return max(1, min(of_smem, of_registers, _SM_THREADS // config.threads))


def kernel(
    problem: GroupNormProblem, config: GroupNormConfig, device: CudaDevice
) -> Kernel:
    """One launch.

    Forward it reads x, scale and bias, and writes y, mean and inverse. Of gradients it
    reads all of these but y, and dy, and writes dx and the sums of each image.
    """
    p, c = problem, config
    backward = "_backward" * (p.direction == "gradients")
    header = f"group_norm{backward}_sm90.cuh"
    words = (
        f"group_norm{backward}_{SHORT[p.dtype]}_{SHORT[p.parameters]}",
        "" if p.activation == "none" else p.activation,
        f"g{p.of_group}_s{c.slab}_c{c.cluster}_t{c.threads}",
        "keeps" * c.keeps,
    )
    entry = "_".join(filter(None, words))
    operands = 6 if p.direction == "forward" else 8
    scalars = [Scalar(value=p.pixels), Scalar(value=p.channels)]
    if p.direction == "forward":
        scalars.append(Scalar(value=p.epsilon, dtype="float32"))
    return Kernel(
        entry=entry,
        source=_source(p, c, entry, header),
        headers=sources.headers(header),
        arch=device.arch,
        grid=(blocks(p, c), 1, 1),
        block=(c.threads, 1, 1),
        cluster=(c.cluster, 1, 1),
        smem_bytes=smem_bytes(p, c),
        params=(*(Pointer(operand=i) for i in range(operands)), *scalars),
    )


def _source(p: GroupNormProblem, c: GroupNormConfig, entry: str, header: str) -> str:
    if p.direction == "forward":
        function, params = "group_norm", "GroupNormParams"
        pointers = ("x", "scale", "bias", "*y", "*mean", "*inverse")
        scalars = ("int pixels", "int channels", "float epsilon")
    else:
        function, params = "group_norm_backward", "GroupNormBackwardParams"
        pointers = ("x", "scale", "bias", "mean", "inverse", "dy", "*dx", "*sums")
        scalars = ("int pixels", "int channels")
    floats = ("mean", "inverse", "sums")
    arguments = [
        f"{'' if '*' in name else 'const '}"
        f"{'float' if name.strip('*') in floats else 'void'}* {name.strip('*')}"
        for name in pointers
    ]
    names = [a.split()[-1] for a in (*arguments, *scalars)]
    launched = f"{c.threads}, {resident_blocks(p, c)}"
    return f"""\
// group_norm_sm90 | {p.direction}, groups of {p.of_group} {p.dtype} | {c}
#include "{header}"

namespace {{
struct Traits {{
  using Element = {CXX_TYPE[p.dtype]};
  using Parameter = {CXX_TYPE[p.parameters]};
  static constexpr int kGroup = {p.of_group}, kLanes = {lanes(p, c)}, \
kThreads = {c.threads}, kCluster = {c.cluster}, kArrays = {arrays(p)};
  static constexpr bool kKeeps = {cxx(c.keeps)};
  static constexpr int kSharedBytes = {shared_bytes(p, c)};
  static constexpr auto kActivation = tracea::Activation::{ACTIVATION[p.activation]};
}};
}}  // namespace

extern __shared__ __align__(16) tracea::u8 smem[];
extern "C" __global__ void __launch_bounds__({launched})
{entry}({", ".join((*arguments, *scalars))}) {{
  tracea::{function}<Traits>(tracea::{params}{{{", ".join(names)}}}, smem);
}}
"""
