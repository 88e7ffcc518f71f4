"""Where the cubin store keeps kernels and failures."""

from __future__ import annotations

import dataclasses
import pathlib

import sample_kernels

from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import cubins, nvrtc


def image_path(directory) -> pathlib.Path:
    kernel = sample_kernels.scale()
    return cubins.path(directory, kernel.arch, nvrtc.key(kernel))


def broken() -> Kernel:
    return dataclasses.replace(sample_kernels.scale(), source="int broken = ;")


def failure_path(directory) -> pathlib.Path:
    kernel = broken()
    file = cubins.path(directory, kernel.arch, nvrtc.key(kernel))
    return file.with_suffix(".failed.json")
