"""The least time that a problem can take on a device.

    floor = max(flops / peak, bytes / bandwidth)

A lower bound for setting priorities and for comparing problems of different sizes; the
models that rank configs of one variant are in ``variants`` (``gemm_sm90_model`` ...).
Callers: model, campaign/run, search/history, answers/interpolate, ops/common/bench.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CpuDevice, CudaDevice, Device
from tracea_jax.problem import ITEMSIZE, Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The highest rates of a device.

    Attributes:
      flops: floating-point operations a second on 16-bit operands.
      wide_flops: floating-point operations a second on float32 operands, which may be
        rounded as far as JAX's default precision allows.
      bytes: bytes of memory a second; infinite where caches hide the memory.
    """

    flops: float
    wide_flops: float
    bytes: float


# From the vendor's data sheets, the rates for dense matrices.
_GPUS = {
    "NVIDIA H200": Peak(flops=989e12, wide_flops=494e12, bytes=4.8e12),
    "NVIDIA H100 80GB HBM3": Peak(flops=989e12, wide_flops=494e12, bytes=3.35e12),
    "NVIDIA A100-SXM4-80GB": Peak(flops=312e12, wide_flops=156e12, bytes=2.0e12),
}

# Operations of one core in one cycle by instruction set, on (float32, 16-bit) operands:
# two fused multiply-adds on full vectors, but four in cores of Arm that have BFMMLA.
# XLA may use matrix units that our kernels were told to leave alone, so AVX-512 has the
# bound of AMX.
_CORE_FLOPS = {
    "baseline": (16, 16),
    "avx2": (32, 32),
    "avx512": (64, 1024),
    "avx512_bf16": (64, 1024),
    "amx": (64, 1024),
    "bfmmla": (32, 128),
}
_CPU_HZ = 4e9  # no profile has the clock rate; a high one keeps the bound a lower bound


def peak(device: Device) -> Peak | None:
    """The device's peak; None if it is unknown."""
    if isinstance(device, CudaDevice):
        return _GPUS.get(device.name)
    if isinstance(device, CpuDevice) and device.isa in _CORE_FLOPS:
        wide, narrow = (x * device.cores * _CPU_HZ for x in _CORE_FLOPS[device.isa])
        return Peak(flops=narrow, wide_flops=wide, bytes=float("inf"))
    return None


def floor_us(problem: Problem, device: Device) -> float | None:
    """Microseconds that no implementation can be expected to beat; None if unknown."""
    found = peak(device)
    if found is None:
        return None
    is_wide = ITEMSIZE.get(problem.operand_dtypes[0], 4) >= 4
    flops = found.wide_flops if is_wide else found.flops
    return 1e6 * max(problem.flops / flops, problem.bytes / found.bytes)
