"""max_pool_cuda: maxima of overlapping windows, and their gradient, without scattering.

XLA pools in float32 and rounds in a pass of its own; it differentiates by adding to the
pixels of maxima with atomic operations, after it filled the image with zeros.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import max_pool as emit
from tracea_jax.emit.epilogue import CXX_TYPE
from tracea_jax.problem import ITEMSIZE, MaxPoolProblem
from tracea_jax.variants.base import Call
from tracea_jax.variants.gpus import refused_device
from tracea_jax.variants.space import Space

_THREADS = (64, 128, 256)
_MOST_KERNEL = 3  # what all windows of a patch see stays in registers
_MOST_BLOCKS = 2**31 - 1
# Of windows and strides: bytes of the smallest problem whose maxima were faster.
_FEWEST_BYTES = {((3, 3), (2, 2)): 15 << 20, ((3, 3), (1, 1)): 3 << 20}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MaxPoolConfig:
    """Threads of a block."""

    threads: int

    def __str__(self) -> str:
        return str(self.threads)


@dataclasses.dataclass(frozen=True, slots=True)
class MaxPoolCuda:
    """The variant max_pool_cuda; see ``variants.base.Variant``."""

    name: str = "max_pool_cuda"
    config_type: type = MaxPoolConfig
    sources: tuple[str, ...] = ("cuda/max_pool.cuh",)

    def why_not(self, problem: MaxPoolProblem, device: Device) -> str | None:
        p = problem
        if why := next(refused_device(device), None):
            return why
        if p.dtype not in CXX_TYPE:
            return f"entries of dtype {p.dtype}; it takes {', '.join(CXX_TYPE)}"
        if p.channels % emit.pack(p.dtype):
            return f"{p.channels} channels; they must be a multiple of 16 bytes"
        if 0 in (p.batch, p.height, p.width, p.channels, *p.out_size):
            return "the arrays are empty"
        if max(p.kernel) > _MOST_KERNEL:
            size = "x".join(map(str, p.kernel))
            return f"windows of {size}; it takes up to {_MOST_KERNEL}x{_MOST_KERNEL}"
        if any(s > k for s, k in zip(p.strides, p.kernel, strict=True)):
            return "windows with gaps between them"
        if any(n < 0 for pad in p.padding for n in pad):
            return "padding that crops"
        count = p.batch * p.height * p.width * p.channels
        if count // emit.pack(p.dtype) > _MOST_BLOCKS * min(_THREADS):
            return "more blocks than a launch has"
        return None

    def check(
        self, problem: MaxPoolProblem, config: MaxPoolConfig, device: Device
    ) -> None:
        if config.threads not in _THREADS:
            words = ", ".join(map(str, _THREADS))
            raise ValueError(f"threads={config.threads!r} must be one of {words}")

    def space(self, problem: MaxPoolProblem, device: Device) -> Space:
        return Space.of(*(MaxPoolConfig(threads=n) for n in _THREADS))

    def heuristic(self, problem: MaxPoolProblem, device: Device) -> MaxPoolConfig:
        return MaxPoolConfig(threads=128)

    def expects_to_win(self, problem: MaxPoolProblem, device: Device) -> bool:
        """Returns whether the kernel was measured to beat XLA on such problems.

        On an H200 XLA was slower for gradients, which it scatters, but for float32 and
        windows that overlap by more than half; and for maxima of overlapping windows of
        16-bit entries, not for others. No results are kept of pools alone.
        """
        p = problem
        if not isinstance(device, CudaDevice) or device.capability != (9, 0):
            return False
        if p.direction == "gradient":
            axes = zip(p.kernel, p.strides, strict=True)
            return ITEMSIZE[p.dtype] == 2 or all(k <= 2 * s for k, s in axes)
        fewest = _FEWEST_BYTES.get((p.kernel, p.strides))
        return ITEMSIZE[p.dtype] == 2 and fewest is not None and p.bytes >= fewest

    def doubt(self, problem: MaxPoolProblem, device: Device) -> str | None:
        return "XLA's own kernel was as fast on windows apart and on few images"

    def call(
        self, problem: MaxPoolProblem, config: MaxPoolConfig, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        return emit.kernel(problem, device, threads=config.threads)


MAX_POOL_CUDA = MaxPoolCuda()
