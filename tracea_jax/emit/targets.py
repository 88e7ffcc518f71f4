"""GPUs that kernels are written for without a runtime to launch them.

The package launches nothing on them: a kernel for one is a text, which for AMD GPUs
clang compiles. Their tiles, the order of these, the ring of stages and the parameters
are those of ``gemm_sm80``, computed by the same functions.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.emit.gemm_sm80 import GemmSm80Config, smem_bytes
from tracea_jax.emit.sources import Dialect
from tracea_jax.mistakes import similar
from tracea_jax.problem import GemmProblem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU as the compiler knows it.

    Attributes:
      name: of the target, as the compiler of the dialect names it.
      gpus: which GPUs that is.
      dialect: the language of the kernel's text.
      instruction: what multiplies matrices.
      wave: threads that multiply together: a warp, a wave, a SIMD group.
      dtypes: of operands that the instruction takes.
      shared_bytes: most shared memory of a block.
    """

    name: str
    gpus: str
    dialect: Dialect
    instruction: str
    wave: int
    dtypes: tuple[str, ...]
    shared_bytes: int

    def threads(self, config: GemmSm80Config) -> int:
        """Threads of one block."""
        return self.wave * config.warps_m * config.warps_n

    def __str__(self) -> str:
        return f"{self.name} ({self.gpus})"


_MFMA = {
    "dialect": "hip",
    "instruction": "MFMA",
    "wave": 64,
    "dtypes": ("bfloat16", "float16", "float32"),
    "shared_bytes": 64 << 10,
}
_TARGETS = (
    Target(name="gfx90a", gpus="AMD Instinct MI200", **_MFMA),
    Target(name="gfx942", gpus="AMD Instinct MI300", **_MFMA),
    Target(
        name="gfx1100",
        gpus="AMD Radeon RX 7900",
        dialect="hip",
        instruction="WMMA",
        wave=32,
        dtypes=("bfloat16", "float16"),
        shared_bytes=64 << 10,
    ),
    Target(
        name="metal",
        gpus="Apple GPUs, Metal 3.1",
        dialect="metal",
        instruction="simdgroup_matrix",
        wave=32,
        dtypes=("bfloat16", "float16", "float32"),
        shared_bytes=32 << 10,
    ),
)
TARGETS = {target.name: target for target in _TARGETS}


def named(name: str) -> Target:
    """The target of this name.

    Raises:
      ValueError: on an unknown name, listing the known ones.
    """
    if name not in TARGETS:
        raise ValueError(
            f"target {name!r} is unknown; it must be one of {', '.join(TARGETS)}"
            f"{similar(name, TARGETS)}"
        )
    return TARGETS[name]


def ring_bytes(problem: GemmProblem, config: GemmSm80Config, target: Target) -> int:
    """Shared memory of one block: the ring, and where Metal's results pass through."""
    results = _BLOCK_BYTES * config.warps_m * config.warps_n
    ring = smem_bytes(problem, config)
    return ring + results * (target.dialect == "metal")


_BLOCK_BYTES = 8 * 8 * 4  # of a block of results in f32, for each SIMD group
