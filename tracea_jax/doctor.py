"""doctor(): what this machine can do, and what each kernel says about it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import platform

import jax

from tracea_jax import catalogue
from tracea_jax.catalogue import Op
from tracea_jax.device import Device, cuda_driver_version, platform_of
from tracea_jax.knowledge import known
from tracea_jax.options import current, device_for
from tracea_jax.runtime import cubins, nvrtc, trust
from tracea_jax.runtime.launch import cpu_isa
from tracea_jax.runtime.trust import Trust

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled part of a report, one line an item."""

    title: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {line}" for line in self.lines)])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The sections of a report; ``print`` it."""

    sections: tuple[Section, ...]

    def __str__(self) -> str:
        return "\n\n".join(str(s) for s in self.sections)


def doctor() -> Report:
    """Devices, toolchain, variants with their reasons, and caches of this machine.

    That the cache can be written, a file shows that is written there and removed.
    """
    devices = _devices()
    return Report(
        sections=(
            Section(title="versions", lines=tuple(_versions())),
            Section(title="devices", lines=tuple(str(d) for d in devices)),
            Section(title="toolchain", lines=tuple(_toolchain())),
            *(
                Section(title=f"{op.name} on {d.name}", lines=tuple(_variants(op, d)))
                for op in catalogue.ops()
                for d in devices
            ),
            Section(title="caches", lines=tuple(_caches())),
        )
    )


def _devices() -> list[Device]:
    platforms = dict.fromkeys(["cpu", *(d.platform for d in jax.local_devices())])
    return [device_for(platform_of(p)) for p in platforms]


def _versions() -> list[str]:
    names = ("tracea_jax", "jax", "jaxlib", "numpy")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return [
        ", ".join(found),
        f"Python {platform.python_version()}, {platform.platform()}",
    ]


def _toolchain() -> list[str]:
    missing = nvrtc.why_unavailable()
    driver = cuda_driver_version()
    return [
        f"CPU kernels: prebuilt; this processor runs {cpu_isa()}",
        f"NVRTC: {missing or nvrtc.version()}",
        f"CUDA driver: {driver or 'none found'}",
    ]


def _variants(op: Op, device: Device) -> list[str]:
    """For each variant the dtypes it takes, and its reasons against the others."""
    lines = []
    for variant in op.variants:
        takes: dict[str, list[str]] = {}
        refused: dict[str, None] = {}
        for dtype in _DTYPES:
            for kind, problem in op.problem.examples(dtype).items():
                reason = variant.why_not(problem, device)
                takes.setdefault(kind, [])
                if reason is None:
                    takes[kind].append(dtype)
                else:
                    refused[reason] = None
        lines.append(f"{variant.name}: " + "; ".join([_taken(takes), *refused]))
    return lines


def _taken(takes: dict[str, list[str]]) -> str:
    """ "runs float32", or what runs of each kind where they differ."""
    if not any(takes.values()):
        return "cannot run"
    first, *others = takes.values()
    if all(other == first for other in others):
        return f"runs {', '.join(first)}"
    texts = (f"{name} runs {', '.join(t) or 'nothing'}" for name, t in takes.items())
    return ", ".join(texts)


def _caches() -> list[str]:
    settings = current()
    directory = settings.directory
    return [
        f"directory: {directory} ({_state(directory)})",
        *(f"shared: {p} ({_state(p, Trust.SHARED)})" for p in settings.shared),
        f"tuned problems: {sum(1 for _ in known(settings).own.entries())}",
        f"compiled kernels: {cubins.count(directory)}",
        f"on a miss: {settings.on_miss}",
    ]


def _state(directory: pathlib.Path, whose: Trust = Trust.USER) -> str:
    try:
        trust.check(directory, trust=whose)
    except trust.Untrusted as e:
        return f"ignored: {e}"
    except OSError as e:
        return f"cannot be read: {e}"
    if whose is Trust.SHARED:
        return "only read" if os.path.exists(directory) else "missing"
    try:
        trust.try_writing(directory)
    except OSError as e:
        return f"cannot be written: {e}; set TRACEA_CACHE_DIR to another directory"
    return "writable, as a test file showed"
