"""doctor(): what this machine can do, and what each kernel says about it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import platform

import jax

from tracea_jax import variants
from tracea_jax.device import Device, cuda_driver_version
from tracea_jax.dispatch import database, device_for
from tracea_jax.options import current
from tracea_jax.problem import GemmProblem
from tracea_jax.runtime import nvrtc
from tracea_jax.runtime.launch import cpu_isa

# One typical problem of each kind: what the variants say of it describes them.
_EXAMPLES = tuple(
    GemmProblem(m=4096, n=4096, k=4096, lhs=dtype, rhs=dtype, out=dtype)
    for dtype in ("float32", "bfloat16", "float16")
)


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
    """Devices, toolchain, variants with their reasons, and caches of this machine."""
    devices = _devices()
    return Report(
        sections=(
            Section(title="versions", lines=tuple(_versions())),
            Section(title="devices", lines=tuple(str(d) for d in devices)),
            Section(title="toolchain", lines=tuple(_toolchain())),
            *(
                Section(title=f"matmul on {d.name}", lines=tuple(_variants(d)))
                for d in devices
            ),
            Section(title="caches", lines=tuple(_caches())),
        )
    )


def _devices() -> list[Device]:
    platforms = dict.fromkeys(["cpu", *(d.platform for d in jax.local_devices())])
    return [device_for({"gpu": "cuda"}.get(p, p)) for p in platforms]


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


def _variants(device: Device) -> list[str]:
    """For each variant the dtypes it takes, and its reasons against the others."""
    lines = []
    for variant in variants.of("matmul"):
        reasons = {p.lhs: variant.why_not(p, device) for p in _EXAMPLES}
        takes = [dtype for dtype, reason in reasons.items() if reason is None]
        refused = dict.fromkeys(r for r in reasons.values() if r is not None)
        text = f"runs {', '.join(takes)}" if takes else "cannot run"
        lines.append(f"{variant.name}: " + "; ".join([text, *refused]))
    return lines


def _caches() -> list[str]:
    settings = current()
    directory = settings.directory
    return [
        f"directory: {directory} ({_state(directory)})",
        f"tuned problems: {sum(1 for _ in database(settings).entries())}",
        f"compiled kernels: {sum(1 for _ in directory.glob('cubin/*/*.cubin'))}",
        f"on a miss: {settings.on_miss}",
    ]


def _state(directory: pathlib.Path) -> str:
    if not directory.exists():
        return "made by the first write"
    return "writable" if os.access(directory, os.W_OK) else "read-only"
