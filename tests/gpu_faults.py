"""A bench for the child of ``test_gpu_child``: some configs do real harm to the GPU.

A config of 2 stages stores to address 16, one of 3 stages never ends. The op's own
bench measures the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tracea_jax.knowledge import bench_of as sound_bench_of
from tracea_jax.policy import Choice
from tracea_jax.tuning.measure import Run, Verification

driver: Any = importlib.import_module("cuda.bindings.driver")
nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")

SOURCES = {
    2: b'extern "C" __global__ void fault() { *(volatile int*)16 = 1; }',
    3: b'extern "C" __global__ void fault() { for (volatile int i = 0;; ++i) {} }',
}


class Bench:
    def __init__(self, problem, device):
        self._sound = sound_bench_of(problem, device)

    def prepare(self, choice: Choice) -> Run:
        run = self._sound.prepare(choice)
        source = SOURCES.get(getattr(choice.config, "stages", 0))
        if source is None:
            return run

        def harm(count: int) -> None:
            launch(source)
            run(count)

        return harm

    def verify(self, choice: Choice) -> Verification:
        return self._sound.verify(choice)

    def flush(self) -> None:
        self._sound.flush()

    def kernel_times(
        self, runs: Mapping[Choice, Run], rounds: int
    ) -> Mapping[Choice, list[float]]:
        return self._sound.kernel_times(runs, rounds)


def bench_of(problem, device):
    return Bench(problem, device)


def launch(source: bytes) -> None:
    """Runs the kernel in the context that JAX uses, and waits for it."""
    checked(driver.cuInit(0))
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(0))))
    checked(driver.cuCtxSetCurrent(context))
    module = checked(driver.cuModuleLoadData(cubin(source)))
    function = checked(driver.cuModuleGetFunction(module, b"fault"))
    checked(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    checked(driver.cuCtxSynchronize())


def cubin(source: bytes) -> bytes:
    program = checked(nvrtc.nvrtcCreateProgram(source, b"fault.cu", 0, [], []))
    checked(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90a"]))
    image = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, image))
    return image


def checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise RuntimeError(f"{type(status).__name__} {status.name}")
    return values[0] if values else None
