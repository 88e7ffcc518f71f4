"""Settings: from the environment, overridden by ``with tracea.options(...)``.

Options are part of JAX's trace context, so a jitted function is traced again where they
differ. The epoch is too: results of a tuning reach functions that are already traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict, Unpack, get_args

import jax

from tracea_jax import catalogue, logs
from tracea_jax import device as devices
from tracea_jax.device import NAMED, Device
from tracea_jax.runtime import trust
from tracea_jax.runtime.collect import LIMIT_BYTES
from tracea_jax.typing import Implementation, OnMiss

ON_MISS: tuple[OnMiss, ...] = get_args(OnMiss)


class Settings(TypedDict, total=False):
    """The keywords of ``options``: the fields of ``Options``, where they are told."""

    on_miss: OnMiss
    implementation: Implementation | str | None
    device: str | None
    cache_dir: str | None
    cache_path: str | None
    cubin_limit: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How ops choose an implementation.

    Attributes:
      on_miss: what to do for a problem without a tuned answer: "heuristic" uses the
        policy's default, "tune" measures now (single-process programs only), "error"
        raises.
      implementation: default of the ops' own argument of that name.
      device: a named GPU to lower for instead of the local one (``device.NAMED``).
      cache_dir: where tuned answers and compiled kernels are kept.
      cache_path: more caches, only read, in this order, when that one has no answer or
        kernel; separated as in PATH. Naming one is trusting its owner.
      cubin_limit: bytes that compiled kernels may take there; after a tuning those that
        were not used for longest are removed.
    """

    on_miss: OnMiss = "heuristic"
    implementation: Implementation | str | None = None
    device: str | None = None
    cache_dir: str | None = None
    cache_path: str | None = None
    cubin_limit: int = LIMIT_BYTES

    def __post_init__(self) -> None:
        if self.cubin_limit < 0:
            raise ValueError(f"cubin_limit={self.cubin_limit} must not be negative")
        _check("on_miss", self.on_miss, ON_MISS)
        if self.device is not None:
            _check("device", self.device, tuple(NAMED))
        if self.implementation is not None:
            names = {v.name for op in catalogue.ops() for v in op.variants}
            _check("implementation", self.implementation, ("tracea", *sorted(names)))

    @property
    def directory(self) -> pathlib.Path:
        """Where the cache is: the setting, else ./.tracea if there, else the user's.

        A ./.tracea that others own or can write came with the working directory; it is
        ignored with a warning.
        """
        if self.cache_dir:
            return pathlib.Path(self.cache_dir)
        if os.path.isdir(".tracea"):
            local = pathlib.Path(".tracea").absolute()
            try:
                trust.check(local)
                return local
            except trust.Untrusted as e:
                e.warn()
        return _user_cache() / "tracea_jax"

    @property
    def shared(self) -> tuple[pathlib.Path, ...]:
        """The caches of ``cache_path``."""
        names = (self.cache_path or "").split(os.pathsep)
        return tuple(pathlib.Path(name) for name in names if name)


def from_environment(environ: Mapping[str, str] = os.environ) -> Options:
    """Options from ``TRACEA_ON_MISS``, ``TRACEA_IMPLEMENTATION``, ...

    Raises:
      ValueError: on a value that is not valid, or an unknown ``TRACEA_`` variable.
    """
    names = {f"TRACEA_{f.name.upper()}": f.name for f in dataclasses.fields(Options)}
    known = {*names, "TRACEA_CPU_ISA", logs.VARIABLE}
    given = {name for name in environ if name.startswith("TRACEA_")}
    if unknown := sorted(given - known):
        raise ValueError(
            f"{', '.join(unknown)} is no setting; the settings are "
            + ", ".join(sorted(known))
        )
    logs.level(environ)
    values: dict[str, Any] = {
        field: environ[env] for env, field in names.items() if environ.get(env)
    }
    limit = values.pop("cubin_limit", None)
    if limit is None:
        return Options(**values)
    if not limit.isdecimal():
        raise ValueError(f"TRACEA_CUBIN_LIMIT={limit!r} must be a number of bytes")
    return Options(**values, cubin_limit=int(limit))


_context = jax.make_user_context(None)
_epoch = jax.make_user_context(0)


def current() -> Options:
    """The options in force here."""
    return _context.value or from_environment()


@contextlib.contextmanager
def options(**changes: Unpack[Settings]) -> Iterator[Options]:
    """Changes settings inside a ``with`` block; see ``Options`` for their names.

    Raises:
      ValueError: naming the valid values.
      TypeError: on an unknown setting.
    """
    value = dataclasses.replace(current(), **changes)
    with _context(value):
        yield value


def publish_epoch() -> None:
    """Makes jitted functions trace again, in every thread, to see new results."""
    _epoch.set_global(_epoch.get_global() + 1)


def _check(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{name}={value!r}; it must be one of {', '.join(valid)}")


def _user_cache() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return pathlib.Path(base) if base else _home() / ".cache"


def _home() -> pathlib.Path:
    try:
        return pathlib.Path.home()
    except RuntimeError:  # no HOME, and a user that the system does not know
        return pathlib.Path("/")  # as with an empty HOME; writing says what to set


def device_for(platform: str, settings: Options | None = None) -> Device:
    """The profile of the device that a lowering for this platform targets."""
    settings = settings or current()
    if platform == devices.CpuDevice.platform:
        return devices.local_cpu()
    if platform == devices.CudaDevice.platform:
        if settings.device:
            return devices.named(settings.device)
        try:
            return devices.local_cuda(_cuda_ordinal())
        except RuntimeError as e:
            return devices.OtherDevice(platform=platform, name=f"unknown GPU: {e}")
    return devices.OtherDevice(platform=platform, name=platform)


def local_device() -> Device:
    """The profile of the device that JAX computes on by default."""
    return device_for(devices.platform_of(jax.default_backend()))


def _cuda_ordinal() -> int:
    """The CUDA ordinal of the GPU that JAX puts this computation on."""
    backend = devices.backend_of(devices.CudaDevice.platform)
    default: Any = getattr(jax.config, "jax_default_device", None)
    if isinstance(default, jax.Device) and default.platform == backend:
        return default.local_hardware_id or 0
    gpus = [d for d in jax.local_devices() if d.platform == backend]
    return (gpus[0].local_hardware_id or 0) if gpus else 0
