"""GPUs that kernels for all since Ampere are built for; none of them is needed."""

from __future__ import annotations

import dataclasses

from tracea_jax.device import NAMED, CudaDevice

A100, H200 = NAMED["A100"], NAMED["H200"]


def small_gpu(*capability: int) -> CudaDevice:
    """A GPU with 99 KiB of shared memory for a block, as all of 8.6, 8.9 and 12.0."""
    return dataclasses.replace(
        A100, name="GPU", capability=capability, smem_per_block_bytes=101376
    )


DEVICES = (A100, small_gpu(8, 6), small_gpu(8, 9), H200, small_gpu(12, 0))
