"""The variants of a user's CUDA kernel: the kernel, and the reference beside it.

    cuda_kernel  the user's kernel, with one value of each field of its space
    xla          what the user gave as ``reference=``, compiled by XLA

What they say and launch, they ask the problem's launcher, which has the user's
functions; see ``ops.cuda_kernel``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tracea_jax.device import CudaDevice, Device
from tracea_jax.problem.cuda_kernel import CudaKernelProblem
from tracea_jax.variants.base import Call, Inline, XlaConfig
from tracea_jax.variants.space import Space

_MOST_CONFIGS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """A value for each field of the space that the user gave.

    Attributes:
      values: (name, value), in the order of the space.
    """

    values: tuple[tuple[str, int | float | str], ...] = ()

    def __post_init__(self) -> None:
        # JSON has lists where this has tuples.
        pairs = tuple((name, value) for name, value in self.values)
        object.__setattr__(self, "values", pairs)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values) or "-"


@dataclasses.dataclass(frozen=True, slots=True)
class CudaKernel:
    """A kernel that a user wrote; the methods are ``variants.base.Variant``'s."""

    name: str = "cuda_kernel"
    config_type: type = KernelConfig
    # What such a kernel may include; its own text is in the problem's launcher.
    sources: tuple[str, ...] = ("cuda/tile/common.cuh",)
    insists: bool = True  # see ``base.Insisting``

    def why_not(self, problem: CudaKernelProblem, device: Device) -> str | None:
        if not isinstance(device, CudaDevice):
            return f"it is a CUDA kernel; the device is {device.platform}"
        if (
            problem.launcher is None
            and problem != problem.examples(problem.operand_dtypes[0])[""]
        ):
            return f"no tracea.cuda_kernel of this process is {problem.kernel!r}"
        return None

    def check(
        self, problem: CudaKernelProblem, config: KernelConfig, device: Device
    ) -> None:
        choices: tuple[tuple[str, tuple[Any, ...]], ...] = problem.launcher.space
        names, given = (
            [name for name, _ in choices],
            [name for name, _ in config.values],
        )
        if names != given:
            raise ValueError(
                f"config has {', '.join(given) or 'no fields'}; those of "
                f"{problem.kernel} are {', '.join(names) or 'none'}"
            )
        for (name, allowed), (_, value) in zip(choices, config.values, strict=True):
            if value not in allowed:
                listed = ", ".join(map(str, allowed))
                raise ValueError(f"{name}={value!r} must be one of {listed}")

    def space(self, problem: CudaKernelProblem, device: Device) -> Space:
        found = problem.launcher.configs
        return Space.of(*(KernelConfig(values=values) for values in found))

    def heuristic(self, problem: CudaKernelProblem, device: Device) -> KernelConfig:
        return KernelConfig(values=problem.launcher.configs[0])

    def expects_to_win(self, problem: CudaKernelProblem, device: Device) -> bool:
        return True  # why else would it have been written

    def call(
        self, problem: CudaKernelProblem, config: KernelConfig, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        return problem.launcher.call(config.values, device.arch)


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """The user's function in jnp, as "xla"; the methods are those of a variant."""

    name: str = "xla"
    config_type: type = XlaConfig
    sources: tuple[str, ...] = ()

    def why_not(self, problem: CudaKernelProblem, device: Device) -> str | None:
        if problem.launcher is None or problem.launcher.has_reference:
            return None
        return f"tracea.cuda_kernel {problem.kernel!r} was given no reference="

    def check(
        self, problem: CudaKernelProblem, config: XlaConfig, device: Device
    ) -> None:
        return None

    def space(self, problem: CudaKernelProblem, device: Device) -> Space:
        return Space.of(XlaConfig())

    def heuristic(self, problem: CudaKernelProblem, device: Device) -> XlaConfig:
        return XlaConfig()

    def expects_to_win(self, problem: CudaKernelProblem, device: Device) -> bool:
        return False

    def call(
        self, problem: CudaKernelProblem, config: XlaConfig, device: Device
    ) -> Call:
        return Inline()


CUDA_KERNEL = CudaKernel()
REFERENCE = Reference()


def check_size(space: tuple[tuple[str, tuple[Any, ...]], ...]) -> None:
    """Raises ValueError if a space has more configs than can be told apart at once."""
    if (count := math.prod(len(values) for _, values in space)) > _MOST_CONFIGS:
        raise ValueError(
            f"the space has {count} configs; at most {_MOST_CONFIGS} are allowed"
        )
