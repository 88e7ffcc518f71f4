"""The models in the package, and the one that serves a device.

A device of a surveyed kind is served by the model of its kind. Any other GPU is served
by the model of the nearest GPU of the same compute capability, whose kernels it runs
too: features have the device's own numbers. That model decides less, and only where it
is more certain, see ``OpModel.elsewhere``; ``benchmarks/survey/elsewhere.py`` judges it
by tuned answers.
"""

from __future__ import annotations

import functools
import pathlib

from tracea_jax.device import NAMED, CudaDevice, Device
from tracea_jax.model import features
from tracea_jax.model.model import Model, device_kind
from tracea_jax.problem import Problem
from tracea_jax.runtime import versions
from tracea_jax.runtime.trust import warn_once

DATA = pathlib.Path(__file__).parents[1] / "data" / "models"
_OF_PEERS = ("jax", "jaxlib", "cudnn", "driver")


def covering(problem: Problem, device: Device) -> Model | None:
    """The model that covers a problem on a device, or None."""
    if not features.knows(problem.op):
        return None
    model = serving(device)
    return model if model is not None and model.covers(problem, device) else None


@functools.lru_cache(maxsize=64)
def serving(device: Device) -> Model | None:
    """The model that serves a device, as certain as it is there, or None."""
    surveyed = surveyed_for(device)
    if surveyed is None or (model := of_kind(device_kind(surveyed))) is None:
        return None
    if surveyed is not device:
        return model.on(device)
    return model.with_versions(installed_versions(device))


def surveyed_for(device: Device) -> Device | None:
    """The device whose survey serves this one: itself, a GPU like it, or None."""
    if of_kind(device_kind(device)) is not None:
        return device
    if not isinstance(device, CudaDevice):
        return None
    alike = [
        other
        for other in NAMED.values()
        if other.capability == device.capability
        and of_kind(device_kind(other)) is not None
    ]
    return min(alike, key=lambda other: _distance(device, other), default=None)


def _distance(device: CudaDevice, other: CudaDevice) -> float:
    """How far the numbers of two GPUs are apart."""
    numbers, others = features.of_gpu(device), features.of_gpu(other)
    return sum(abs(numbers[name] - others[name]) for name in features.OF_GPUS)


@functools.cache
def of_kind(kind: str) -> Model | None:
    """The model in the package for a kind of device, or None.

    A file that cannot be read is a warning.
    """
    path = DATA / f"{kind}.npz"
    if not path.exists():
        return None
    try:
        return Model.from_bytes(path.read_bytes())
    except Exception as e:  # whatever is wrong with a file, programs run without it
        warn_once(f"the model {path} cannot be read, and is not used: {e}")
        return None


def installed_versions(device: Device) -> dict[str, str]:
    """Versions that the times of peers depend on, those that are known here."""
    known = versions.installed(is_cuda=isinstance(device, CudaDevice))
    return {name: of for name, of in known.items() if name in _OF_PEERS}


def forget() -> None:
    """Files are read again; for tests."""
    of_kind.cache_clear()
    serving.cache_clear()
