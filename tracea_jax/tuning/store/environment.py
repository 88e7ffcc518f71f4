"""What a measured time depends on besides the problem, and the keys made from it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

from tracea_jax import device as devices
from tracea_jax import schema, variants
from tracea_jax.device import CpuDevice, CudaDevice, Device
from tracea_jax.emit import sources
from tracea_jax.runtime import nvrtc

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
        **dict.fromkeys(("device", "arch", "driver", "nvrtc", "sources"), schema.line),
    },
    required=frozenset({"device", "arch", "units"}),
)


def digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Times and failures are comparable within one environment and in no other.

    Attributes:
      schema: of the files that belong to it.
      device, arch: name and exact target, as the device reports them.
      units: streaming multiprocessors of a GPU, cores of a CPU.
      driver: major CUDA version of the driver; "" on a CPU.
      nvrtc: version of the kernel compiler; "" on a CPU.
      sources: hash of the kernel sources that can run on the device, so that a change
        of one kernel forgets what was measured with the old one. The version of the
        package is no part of it: a release that changes no kernel keeps every answer.
      unknown: what else a newer version says; part of the key, as it is there.
    """

    schema: int = SCHEMA
    device: str
    arch: str
    units: int
    driver: str = ""
    nvrtc: str = ""
    sources: str = ""
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
        """Whether both are GPUs that run the same kernels on as many multiprocessors.

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
def environment(op: str, device: Device) -> Environment:
    """The environment in which this process measures ``op`` on ``device``.

    Raises:
      FileNotFoundError: if the package lacks its own kernel sources.
    """
    is_gpu = isinstance(device, CudaDevice)
    units = device.sm_count if is_gpu else getattr(device, "cores", 0)
    compiler = (nvrtc.version() or "") if is_gpu else ""
    # A GPU that is not here is assumed to have a driver as old as the compiler.
    driver = (devices.cuda_driver_version() or compiler) if is_gpu else ""
    return Environment(
        device=device.name,
        arch=device.arch,
        units=units,
        driver=driver.partition(".")[0],
        nvrtc=compiler,
        sources=_source_hash(op, device),
    )


@functools.cache
def environment_key(op: str, device: Device) -> str:
    """``environment(op, device).key``, hashed once."""
    return environment(op, device).key


def problem_key(problem: dict[str, Any]) -> str:
    """16 hexadecimal digits from ``Problem.to_json()``: the name of its file."""
    return digest(canonical(problem), 16)


def _source_hash(op: str, device: Device) -> str:
    """Hash of the sources of the op's variants that are written for this platform.

    Sources of the other platform are left out: a change of a GPU kernel must not forget
    what was measured on CPUs.
    """
    if not isinstance(device, CpuDevice | CudaDevice):
        return ""
    prefix = f"{device.platform}/"
    names = {s for v in variants.of(op) for s in v.sources if s.startswith(prefix)}
    return digest(canonical([_content_hash(name) for name in sorted(names)]), 16)


def _content_hash(name: str) -> Any:
    """Hash of a file with all it includes, or of each file below a directory."""
    path = sources.directory().parent / name
    if path.suffix == ".cuh":
        return sources.source_hash(name.partition("/")[2])
    files = sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        raise FileNotFoundError(f"{path} has no kernel sources; install tracea_jax")
    return [(p.relative_to(path).as_posix(), _file_hash(p)) for p in files]


def _file_hash(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
