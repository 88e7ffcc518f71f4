"""Settings: from the environment, overridden by ``with tracea.options(...)``.

Options are part of JAX's trace context, so a jitted function is traced again where they
differ. The epoch is too: results of a tuning reach functions that are already traced.
Like all of that context, what ``with`` sets belongs to one thread; the environment is
for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypedDict, Unpack, get_args

import jax

from tracea_jax import catalogue, logs
from tracea_jax import device as devices
from tracea_jax.device import NAMED, Device
from tracea_jax.diagnosis import compiled_elsewhere
from tracea_jax.mistakes import shown, similar
from tracea_jax.runtime import trust, xla_flags
from tracea_jax.runtime.collect import LIMIT_BYTES
from tracea_jax.typing import Implementation, OnMiss

ON_MISS: tuple[OnMiss, ...] = get_args(OnMiss)
_FLAGS = {"1": True, "true": True, "0": False, "false": False}  # as variables say it
_DEVICES = (devices.CpuDevice.platform, *NAMED)


class Settings(TypedDict, total=False):
    """The keywords of ``options``: the fields of ``Options``, where they are told."""

    on_miss: OnMiss
    implementation: Implementation | str | None
    device: str | None
    cache_dir: str | os.PathLike[str] | None
    cache_path: str | os.PathLike[str] | None
    cubin_limit: int
    deterministic: bool | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings by which ops choose an implementation.

    Attributes:
      on_miss: what to do for a problem without a tuned answer: "heuristic" uses the
        policy's default, "tune" measures now (single-process programs only), "error"
        raises.
      implementation: default of the ops' own argument of that name.
      device: what programs are traced and planned for: "cpu", or a named GPU
        (``device.NAMED``), which need not be there; by default the device that JAX
        computes on.
      cache_dir: where tuned answers and compiled kernels are kept; a path from the
        working directory is made absolute, so that a program may go elsewhere.
      cache_path: more caches, only read, in this order, when that one has no answer or
        kernel; separated as in PATH. Naming one is trusting its owner.
      cubin_limit: bytes that compiled kernels may take there; after a tuning those that
        were not used for longest are removed.
      deterministic: True runs nothing whose bits may differ from run to run; False
        allows every algorithm; None allows one that may differ where it is more than
        3 % faster, as far as times are known. XLA's flags for determinism count as
        True, see ``determinism``.
    """

    on_miss: OnMiss = "heuristic"
    implementation: Implementation | str | None = None
    device: str | None = None
    cache_dir: str | None = None
    cache_path: str | None = None
    cubin_limit: int = LIMIT_BYTES
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        for name in ("cache_dir", "cache_path"):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike | None):
                raise TypeError(f"{name} must be a path, not {shown(value)}")
            if value is not None:
                object.__setattr__(self, name, _absolute(name, os.fspath(value)))
        if not isinstance(self.cubin_limit, int) or self.cubin_limit < 0:
            raise ValueError(
                f"cubin_limit={shown(self.cubin_limit)} must be a number of bytes, "
                "not negative"
            )
        if not isinstance(self.deterministic, bool | None):
            raise ValueError(
                f"deterministic={shown(self.deterministic)} must be True, False or None"
            )
        _check("on_miss", self.on_miss, ON_MISS)
        if self.device is not None:
            _check("device", self.device, _DEVICES)
        if self.implementation is not None:
            names = {v.name for op in catalogue.in_programs() for v in op.variants}
            _check("implementation", self.implementation, ("tracea", *sorted(names)))

    @property
    def directory(self) -> pathlib.Path:
        """Cache directory: the setting, else ./.tracea if there, else the user's.

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
    def determinism(self) -> bool | None:
        """``deterministic``, but True where a flag of XLA demands it."""
        return True if xla_flags.demand_determinism() else self.deterministic

    @property
    def shared(self) -> tuple[pathlib.Path, ...]:
        """The caches of ``cache_path``."""
        names = (self.cache_path or "").split(os.pathsep)
        return tuple(pathlib.Path(name) for name in names if name)


def from_environment(environ: Mapping[str, str] = os.environ) -> Options:
    """Options from ``TRACEA_ON_MISS``, ``TRACEA_IMPLEMENTATION``, ...

    Raises:
      ValueError: on a value that is not valid, naming its variable.

    Warns:
      RuntimeWarning: once, on an unknown ``TRACEA_`` variable, naming the nearest one.
    """
    names = {f"TRACEA_{f.name.upper()}": f.name for f in dataclasses.fields(Options)}
    known = {*names, "TRACEA_CPU_ISA", logs.VARIABLE}
    given = {name for name in environ if name.startswith("TRACEA_")}
    for unknown in sorted(given - known):
        _warn_of(unknown, tuple(sorted(known)))
    logs.level(environ)
    values: dict[str, Any] = {
        field: environ[env] for env, field in names.items() if environ.get(env)
    }
    for name in values.keys() & {"cache_dir", "cache_path"}:
        values[name] = _absolute_at_first(name, values[name])
    if (limit := values.get("cubin_limit", "")).isdecimal():
        values["cubin_limit"] = int(limit)
    if (flag := values.get("deterministic", "").lower()) in _FLAGS:
        values["deterministic"] = _FLAGS[flag]
    try:
        return Options(**values)
    except ValueError as e:
        field = str(e).partition("=")[0]
        raise ValueError(f"{e} (set by the variable TRACEA_{field.upper()})") from e


@functools.cache  # settings are asked for often
def _warn_of(unknown: str, known: tuple[str, ...]) -> None:
    trust.warn_once(
        f"the variable {unknown} is no setting of tracea_jax and is ignored; the "
        f"settings are {', '.join(known)}{similar(unknown, known, least=0.8)}"
    )


_context = jax.make_user_context(None)
_epoch = jax.make_user_context(0)


def current() -> Options:
    """The options in force here."""
    return _context.value or from_environment()


def options(**changes: Unpack[Settings]) -> contextlib.AbstractContextManager[Options]:
    """Changes settings inside a ``with`` block; see ``Options`` for their names.

        with tracea.options(implementation="xla") as settings:
            plain = step(params, batch)

    As with JAX's own contexts (``jax.default_matmul_precision``, ...) the block holds
    for the thread that entered it: a thread that is started inside has the settings of
    the environment. It takes over those of the block by entering a block of its own:

        with tracea.options(**dataclasses.asdict(settings)): ...

    Settings for all threads are variables: ``TRACEA_IMPLEMENTATION``, ...

    Raises:
      ValueError: at once, naming the valid values.
      TypeError: at once, on an unknown setting.
    """
    values: dict[str, Any] = {**changes}
    names = [f.name for f in dataclasses.fields(Options)]
    if unknown := [name for name in values if name not in names]:
        raise TypeError(
            f"there is no setting {unknown[0]!r}; the settings are {', '.join(names)}"
            + similar(unknown[0], names)
        )
    Options(**values)  # reports wrong values here, also where ``with`` is forgotten
    return _changed(values)


@contextlib.contextmanager
def _changed(changes: dict[str, Any]) -> Iterator[Options]:
    value = dataclasses.replace(current(), **changes)
    with _context(value):
        yield value


def publish_epoch() -> None:
    """Makes jitted functions trace again, in every thread, to see new results."""
    _epoch.set_global(_epoch.get_global() + 1)


def _check(name: str, value: Any, valid: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in valid:
        least = 1.0 if name == "device" else 0.6  # names of GPUs are all alike
        raise ValueError(
            f"{name}={shown(value)}; it must be one of {', '.join(valid)}"
            + similar(value, valid, least)
        )


def _absolute(name: str, value: str) -> str:
    """A setting's path, or paths, that mean the same in every working directory."""
    paths = value.split(os.pathsep) if name == "cache_path" else [value]
    return os.pathsep.join(_absolute_path(path) for path in paths)


# What a variable means does not change where the program goes elsewhere.
_absolute_at_first = functools.cache(_absolute)


def _absolute_path(path: str) -> str:
    if not path:  # it names nothing
        return path
    with contextlib.suppress(RuntimeError):  # nobody knows the home
        path = os.path.expanduser(path)
    with contextlib.suppress(FileNotFoundError):  # the working directory was removed
        path = str(pathlib.Path(path).absolute())
    return path


def _user_cache() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME", "")  # which has to be absolute to count
    return pathlib.Path(base) if os.path.isabs(base) else _home() / ".cache"


def _home() -> pathlib.Path:
    try:
        return pathlib.Path.home()
    except RuntimeError:  # no HOME, and a user that the system does not know
        return pathlib.Path("/")  # as with an empty HOME; writing says what to set


# ---- the device ----------------------------------------------------------------------

# The device of an explicit argument, which goes before that of the settings.
_planned = jax.make_user_context(None)


def planned_device() -> Device:
    """The profile of the one device that programs are traced and planned for here.

    | given                       | the device                                     |
    |-----------------------------|------------------------------------------------|
    | ``planning(device)``        | that one                                       |
    | ``options(device=...)``     | the named one                                  |
    | nothing                     | the one that JAX computes on by default        |
    """
    wanted = _wanted_device()
    return local_device() if wanted is None else wanted


@contextlib.contextmanager
def planning(device: str | Device | None = None) -> Iterator[Device]:
    """Inside, programs are traced and planned for one device, which it yields.

    A device that is not here has a compiler of its own: none is missed for it.

    Args:
      device: by name or as a profile; ``planned_device()`` by default.

    Raises:
      ValueError: on an unknown name.
    """
    with contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(_planned(device_called(device)))
        target = planned_device()
        if target != device_here(target.platform):
            stack.enter_context(compiled_elsewhere())
        yield target


def planning_state() -> Hashable:
    """The state that plans depend on besides their problem: equal states plan alike."""
    return planned_device(), current(), _epoch.value


def device_for(platform: str) -> Device:
    """The profile of the device that a lowering for this platform targets."""
    wanted = _wanted_device()
    if wanted is not None and wanted.platform == platform:
        return wanted
    return device_here(platform)


def device_here(platform: str) -> Device:
    """The profile of this machine's device of a platform, whatever settings say."""
    if platform == devices.CpuDevice.platform:
        return devices.local_cpu()
    if platform == devices.CudaDevice.platform:
        try:
            return devices.local_cuda(_cuda_ordinal())
        except RuntimeError as e:
            return devices.OtherDevice(platform=platform, name=f"unknown GPU: {e}")
    return devices.OtherDevice(platform=platform, name=platform)


def device_called(name: str | Device) -> Device:
    """The profile of a device: of "cpu", or of a GPU that need not be here.

    Raises:
      ValueError: on another name, listing the known ones.
    """
    if isinstance(name, Device):
        return name
    if isinstance(name, str) and name in _DEVICES:
        return _named_device(name)
    raise ValueError(
        f"device={shown(name)} must be one of {', '.join(_DEVICES)}, or None for the "
        f"one that JAX computes on{similar(name, _DEVICES, least=1.0)}"
    )


def local_device() -> Device:
    """The profile of the device that JAX computes on by default."""
    return device_here(devices.platform_of(jax.default_backend()))


def _wanted_device() -> Device | None:
    """The device of an explicit argument or of the settings."""
    if _planned.value is not None:
        return _planned.value
    name = current().device
    return None if name is None else _named_device(name)


def _named_device(name: str) -> Device:
    is_cpu = name == devices.CpuDevice.platform
    return devices.local_cpu() if is_cpu else devices.named(name)


def _cuda_ordinal() -> int:
    """The CUDA ordinal of the GPU that JAX puts this computation on."""
    backend = devices.backend_of(devices.CudaDevice.platform)
    default: Any = getattr(jax.config, "jax_default_device", None)
    if isinstance(default, jax.Device) and default.platform == backend:
        return default.local_hardware_id or 0
    gpus = [d for d in jax.local_devices() if d.platform == backend]
    return (gpus[0].local_hardware_id or 0) if gpus else 0
