"""Compiles a program's kernels in processes, before JAX lowers their calls one by one.

``transform`` knows all calls of a program when it has traced it. The kernels that the
cache lacks are then compiled in parallel, and the lowering of a call waits for its own
(``runtime.cubins``). Where processes cannot be started, or a worker is lost, lowering
compiles as it would have done.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

from tracea_jax import serving, variants
from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit.kernel import Kernel
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.programs import calls_in
from tracea_jax.options import current
from tracea_jax.runtime import cubins, nvrtc
from tracea_jax.tuning.lab import compile_pool
from tracea_jax.tuning.lab.compile_pool import CompilePool

_FEWEST = 2  # processes, and kernels: one is compiled as soon by the lowering itself


def start(jaxpr: Any, device: Device) -> None:
    """Begins to compile the kernels that the calls of a jaxpr will need.

    Args:
      jaxpr: with calls of our ops, also in nested jaxprs.
      device: what the program is planned for; nothing happens unless it is a GPU of
        CUDA.
    """
    workers = compile_pool.default_workers()
    if not isinstance(device, CudaDevice) or workers < _FEWEST:
        return
    settings = current()
    with contextlib.suppress(Exception):  # lowering reports what is wrong
        missing = _missing(jaxpr, device, settings.directory)
        if len(missing) >= _FEWEST and cubins.is_trusted(settings.directory):
            _submit(missing, CompilePool(settings.directory, workers=workers))


def _missing(jaxpr: Any, device: Device, directory: pathlib.Path) -> dict[str, Kernel]:
    """The kernels that no cache has, by key."""
    places = (directory, *current().shared)
    found = {nvrtc.key(kernel): kernel for kernel in _kernels(jaxpr, device)}
    return {
        key: kernel
        for key, kernel in found.items()
        if not cubins.is_known(key)
        and not any(cubins.has(place, kernel) for place in places)
        and cubins.failure(directory, kernel.arch, key) is None
    }


def _kernels(jaxpr: Any, device: Device) -> Iterator[Kernel]:
    for call in calls_in(jaxpr):
        with contextlib.suppress(Exception):  # one call does not hold up the others
            request = lowering.request(*call)
            served = serving.serve(request, device)
            if served.error is None:
                yield from variants.kernels_in(served.call)


def _submit(missing: dict[str, Kernel], pool: CompilePool) -> None:
    """Submits kernels; the pool is closed when all of them are done."""
    futures = [pool.submit(kernel) for kernel in missing.values()]
    for key, future in zip(missing, futures, strict=True):
        cubins.expect(key, future)

    def close() -> None:
        concurrent.futures.wait(futures)
        pool.close()

    threading.Thread(target=close, daemon=True).start()
