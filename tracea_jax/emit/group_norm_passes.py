"""group_norm_passes in numbers: its config, what follows from it, and its two kernels.

See ``kernels/cuda/group_norm_sums.cuh`` and ``group_norm_apply.cuh``. Callers: the
variant of the same name, tests.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import group_norm_sm90, norms
from tracea_jax.emit.group_norm_sm90 import GroupNormConfig
from tracea_jax.emit.kernel import Kernel
from tracea_jax.emit.norms import SM_REGISTERS, SM_THREADS, pack
from tracea_jax.problem import GroupNormProblem

_SUMS_REGISTERS, _APPLY_REGISTERS = 64, 64  # that a thread can do with
_SM_BYTES = 233472  # shared memory
PARTS = (("x",), ("means", "squares"))
_APPLIED = (("x", "scale", "bias", "means", "squares"), ("y", "mean", "inverse"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupNormPassesConfig:
    """How an image is cut.

    Attributes:
      parts: of an image, of as many pixels; blocks of the first pass.
      blocks: of an image, of the second pass.
      threads: of a block.
    """

    parts: int
    blocks: int
    threads: int

    def __str__(self) -> str:
        return f"{self.parts} parts, {self.blocks} x {self.threads}"


def lanes(problem: GroupNormProblem) -> int:
    return problem.channels // pack(problem)


def _slab(problem: GroupNormProblem, config: GroupNormPassesConfig) -> GroupNormConfig:
    """A block of the first pass, to tile/slab.cuh."""
    return GroupNormConfig(
        slab=problem.channels, cluster=1, threads=config.threads, keeps=False
    )


def smem_bytes(problem: GroupNormProblem, config: GroupNormPassesConfig) -> int:
    """Bytes of a block of the first pass."""
    return group_norm_sm90.smem_bytes(problem, _slab(problem, config))


def sums(
    problem: GroupNormProblem, config: GroupNormPassesConfig, device: CudaDevice
) -> Kernel:
    """x to means and squared distances, (images * parts, groups) of float32 each."""
    p, c = problem, config
    used = smem_bytes(p, c)
    resident = min(SM_REGISTERS // (_SUMS_REGISTERS * c.threads), _SM_BYTES // used)
    return norms.kernel(
        p,
        device,
        template="group_norm_sums",
        suffix="",
        name=f"g{p.of_group}_c{p.channels}_t{c.threads}",
        traits=(
            f"kGroup = {p.of_group}, kLanes = {lanes(p)}, kThreads = {c.threads}, "
            f"kCluster = 1, kArrays = 1, kSharedBytes = {used}, kKeeps = false"
        ),
        sizes=(("pixels", p.pixels // c.parts), ("channels", p.channels)),
        launch=norms.Shape(
            blocks=p.images * c.parts,
            threads=c.threads,
            resident=max(1, resident),
            smem_bytes=used,
        ),
        operands=PARTS,
    )


def apply(
    problem: GroupNormProblem, config: GroupNormPassesConfig, device: CudaDevice
) -> Kernel:
    """The result, of x and what the first pass has left."""
    p, c = problem, config
    resident = min(SM_REGISTERS // _APPLY_REGISTERS, SM_THREADS) // c.threads
    return norms.kernel(
        p,
        device,
        template="group_norm_apply",
        suffix="",
        name=f"g{p.of_group}_c{p.channels}_t{c.threads}",
        traits=f"kGroup = {p.of_group}, kLanes = {lanes(p)}, kThreads = {c.threads}",
        sizes=(
            ("pixels", p.pixels),
            ("channels", p.channels),
            ("parts", c.parts),
            ("blocks", c.blocks),
            ("block_pixels", -(-p.pixels // c.blocks)),
        ),
        launch=norms.Shape(
            blocks=p.images * c.blocks, threads=c.threads, resident=max(1, resident)
        ),
        operands=_APPLIED,
    )
