"""Versions of the libraries that times depend on.

Callers: ``survey.measure``, whose rows have them, and ``model``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata

from tracea_jax.device import cuda_driver_version


@functools.cache
def installed(*, is_cuda: bool) -> dict[str, str]:
    """By name: JAX, and the libraries of NVIDIA's GPUs as far as they are here."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if is_cuda:
        if driver := cuda_driver_version():
            found["driver"] = driver
        for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault("cudnn", importlib.metadata.version(name))
    return found
