"""elementwise_cpu and elementwise_cuda: a function of each element, as one kernel.

Neither runs unless it was asked for, or measured to be faster: XLA computes such a
function in the same loop as what is before and after it, so that arrays in between are
never in memory. A kernel of its own reads and writes them. Where a program computes
nothing else of its arrays, all are bound by the memory.
"""

from __future__ import annotations

import dataclasses
import itertools

from tracea_jax.device import CpuDevice, CudaDevice, Device
from tracea_jax.emit import elementwise as emit
from tracea_jax.problem import ElementwiseProblem
from tracea_jax.problem.elementwise import ELEMENTS
from tracea_jax.variants.base import Call, CpuCall
from tracea_jax.variants.cpu import refuses_device
from tracea_jax.variants.space import Space

TARGET = "tracea_cpu_elementwise_v1"
_ABI = 2  # of the attributes; kernels/cpu/calls has the same number
_TASKS = (1, 2, 4)
_THREADS = (128, 256, 512)
_PACKS = (1, 2, 4)
_MOST_BLOCKS = 2**31 - 1

_DOUBT = (
    "XLA fuses it with the operations before and after it; a kernel of its own can pay "
    "only where there are none, or where the bits of complex results matter"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseCpuConfig:
    """Partition of the elements, and the destination of the results.

    Attributes:
      tasks: of each thread.
      past_caches: whether results are written to memory past the caches, which pays
        where they would not stay there.
    """

    tasks: int
    past_caches: bool = False

    def __str__(self) -> str:
        return f"tasks {self.tasks}{' past caches' * self.past_caches}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseCudaConfig:
    """Threads of a block, and packs of 16 bytes of each operand that one thread has."""

    threads: int
    packs: int

    def __str__(self) -> str:
        return f"{self.threads}x{self.packs}"


def _refuses(problem: ElementwiseProblem) -> str | None:
    """Why no kernel computes the problem, or None."""
    if problem.dtype not in ELEMENTS:
        return f"elements of dtype {problem.dtype}; it takes {', '.join(ELEMENTS)}"
    return "the arrays are empty" if problem.size == 0 else None


@dataclasses.dataclass(frozen=True, slots=True)
class ElementwiseCpu:
    """The variant elementwise_cpu; see ``variants.base.Variant``."""

    name: str = "elementwise_cpu"
    config_type: type = ElementwiseCpuConfig
    sources: tuple[str, ...] = ("cpu/elementwise",)

    def why_not(self, problem: ElementwiseProblem, device: Device) -> str | None:
        return refuses_device(device) or _refuses(problem)

    def check(
        self, problem: ElementwiseProblem, config: ElementwiseCpuConfig, device: Device
    ) -> None:
        if config.tasks not in range(1, 65):
            raise ValueError(f"tasks={config.tasks!r} must be from 1 to 64")

    def space(self, problem: ElementwiseProblem, device: Device) -> Space:
        choices = itertools.product(_TASKS, (False, True))
        return Space.of(
            *(ElementwiseCpuConfig(tasks=n, past_caches=past) for n, past in choices)
        )

    def heuristic(
        self, problem: ElementwiseProblem, device: Device
    ) -> ElementwiseCpuConfig:
        assert isinstance(device, CpuDevice)
        return ElementwiseCpuConfig(
            tasks=_TASKS[0], past_caches=problem.bytes > device.l3_bytes
        )

    def expects_to_win(self, problem: ElementwiseProblem, device: Device) -> bool:
        return False

    def doubt(self, problem: ElementwiseProblem, device: Device) -> str | None:
        return _DOUBT

    def call(
        self, problem: ElementwiseProblem, config: ElementwiseCpuConfig, device: Device
    ) -> Call:
        return CpuCall(
            target=TARGET,
            attributes=(
                ("abi", _ABI),
                ("function", problem.function),
                ("scalar", problem.scalar),
                ("isa", device.arch),
                ("tasks", config.tasks),
                ("past_caches", config.past_caches),
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ElementwiseCuda:
    """The variant elementwise_cuda; see ``variants.base.Variant``."""

    name: str = "elementwise_cuda"
    config_type: type = ElementwiseCudaConfig
    sources: tuple[str, ...] = ("cuda/elementwise.cuh",)

    def why_not(self, problem: ElementwiseProblem, device: Device) -> str | None:
        if not isinstance(device, CudaDevice):
            return f"it runs on NVIDIA GPUs; the device is {device.platform}"
        if reason := _refuses(problem):
            return reason
        least = min(_THREADS) * emit.PACK_BYTES // ELEMENTS[problem.dtype][0]
        if problem.size > _MOST_BLOCKS * least:
            return f"{problem.size} elements are more blocks than a launch has"
        return None

    def check(
        self, problem: ElementwiseProblem, config: ElementwiseCudaConfig, device: Device
    ) -> None:
        for name, allowed in (("threads", _THREADS), ("packs", _PACKS)):
            if (value := getattr(config, name)) not in allowed:
                raise ValueError(
                    f"{name}={value!r} must be one of {', '.join(map(str, allowed))}"
                )

    def space(self, problem: ElementwiseProblem, device: Device) -> Space:
        return Space.of(
            *(
                ElementwiseCudaConfig(threads=threads, packs=packs)
                for threads in _THREADS
                for packs in _PACKS
            )
        )

    def heuristic(
        self, problem: ElementwiseProblem, device: Device
    ) -> ElementwiseCudaConfig:
        return ElementwiseCudaConfig(threads=256, packs=2)

    def expects_to_win(self, problem: ElementwiseProblem, device: Device) -> bool:
        return False

    def doubt(self, problem: ElementwiseProblem, device: Device) -> str | None:
        return _DOUBT

    def call(
        self, problem: ElementwiseProblem, config: ElementwiseCudaConfig, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        return emit.kernel(problem, device, threads=config.threads, packs=config.packs)


ELEMENTWISE_CPU = ElementwiseCpu()
ELEMENTWISE_CUDA = ElementwiseCuda()
