"""The environment that measured times depend on, and the keys made from it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import Any

from tracea_jax import device as devices
from tracea_jax import schema
from tracea_jax.device import CudaDevice, Device
from tracea_jax.runtime import nvrtc

_SHIPPED_NVRTC = "13.0"  # of data/tuned
SCHEMA = 1  # of the files; raised when an older reader would misunderstand a newer one


def canonical(data: Any) -> str:
    """JSON that is equal for equal data; the text that identities are hashes of."""
    return _ENCODER.encode(data)


# Made once: most of what ``json.dumps`` would take for a config.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


_COUNT = schema.integer(0, 1 << 31)
TABLE = schema.Table(
    name="environment",
    fields={
        "schema": _COUNT,
        "units": _COUNT,
        **dict.fromkeys(("device", "arch", "driver", "nvrtc"), schema.line),
    },
    required=frozenset({"device", "arch", "units"}),
)


def digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Times and failures are comparable within one environment and in no other.

    The kernels are no part of it: each record tells what it compiled (``store.code``),
    so that a change of one kernel forgets what was measured with that kernel alone.

    Attributes:
      schema: of the files that belong to it.
      device, arch: name and exact target, as the device reports them.
      units: streaming multiprocessors of a GPU, cores of a CPU.
      driver: major CUDA version of the driver; "" on a CPU.
      nvrtc: version of the kernel compiler; "" on a CPU.
      unknown: what else another version says; part of the key, as it is there.
    """

    schema: int = SCHEMA
    device: str
    arch: str
    units: int
    driver: str = ""
    nvrtc: str = ""
    unknown: dict[str, Any] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    def to_json(self) -> dict[str, Any]:
        """The environment as plain data."""
        known = {name: getattr(self, name) for name in _FIELDS}
        return {**known, **self.unknown}

    @classmethod
    def from_json(cls, data: Any) -> Environment:
        """The inverse of ``to_json``.

        Raises:
          schema.Mistyped: if it is no environment.
        """
        known, unknown = TABLE.split(data)
        return cls(**known, unknown=unknown)

    @property
    def key(self) -> str:
        """12 hexadecimal digits: the name of the environment's directory."""
        return digest(canonical(self.to_json()), 12)

    def is_kindred(self, other: Environment) -> bool:
        """True if both are GPUs that run the same kernels on as many multiprocessors.

        The name may differ, and with it clocks and memory; so may driver and compiler.
        """
        alike = {"device": "", "driver": "", "nvrtc": ""}
        mine, theirs = (dataclasses.replace(e, **alike) for e in (self, other))
        are_gpus = bool(self.driver and other.driver)
        return are_gpus and mine == theirs and self.unknown == other.unknown

    def __str__(self) -> str:
        toolchain = f", CUDA {self.driver}, NVRTC {self.nvrtc}" if self.driver else ""
        return f"{self.device}, {self.arch}, {self.units} units{toolchain}"


_FIELDS = tuple(f.name for f in dataclasses.fields(Environment) if f.compare)


@functools.cache
def environment(device: Device) -> Environment:
    """The environment in which this process measures on ``device``."""
    is_gpu = isinstance(device, CudaDevice)
    units = device.sm_count if is_gpu else getattr(device, "cores", 0)
    compiler = (nvrtc.version() or "") if is_gpu else ""
    driver = (devices.cuda_driver_version() or "") if is_gpu else ""
    # A GPU that is not here is assumed to have a driver as old as the compiler; without
    # a compiler, to have what the answers that ship were measured with.
    if is_gpu and not driver:
        driver = compiler = compiler or _SHIPPED_NVRTC
    return Environment(
        device=device.name,
        arch=device.arch,
        units=units,
        driver=driver.partition(".")[0],
        nvrtc=compiler,
    )


@functools.cache
def environment_key(device: Device) -> str:
    """``environment(device).key``, hashed once."""
    return environment(device).key


def problem_key(problem: dict[str, Any]) -> str:
    """16 hexadecimal digits from ``Problem.to_json()``: the name of its file."""
    return digest(canonical(problem), 16)
