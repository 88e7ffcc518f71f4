"""Which GPUs kernels refuse, whatever they compute.

Callers: the variants of kernels for all GPUs since Ampere.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracea_jax.device import CudaDevice, Device


def refused_device(device: Device) -> Iterator[str]:
    """Why no kernel of ours runs there: it is no NVIDIA GPU, or older than Ampere."""
    if not isinstance(device, CudaDevice):
        yield f"it runs on NVIDIA GPUs; the device is {device.platform}"
    elif device.capability < (8, 0):
        yield f"it needs compute capability 8.0; {device.name} has {device.capability}"
