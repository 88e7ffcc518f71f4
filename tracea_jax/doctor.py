"""doctor(): what this machine can do, and what each kernel says about it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import jax

from tracea_jax import catalogue
from tracea_jax import device as devices
from tracea_jax.catalogue import Op
from tracea_jax.device import Device, cuda_driver_version, platform_of
from tracea_jax.diagnosis import why_default_varies, why_forbidden
from tracea_jax.emit import targets
from tracea_jax.knowledge import known
from tracea_jax.model import shipped
from tracea_jax.options import current, device_for
from tracea_jax.page import Column, Page, Printable, Row, Table
from tracea_jax.runtime import clang, cubins, nvrtc, trust
from tracea_jax.runtime.launch import cpu_isa
from tracea_jax.runtime.trust import Trust
from tracea_jax.variants.base import Doubting

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """The compilers and libraries that kernels are made with.

    Attributes:
      cpu_isa: the instruction set that the CPU kernels use.
      nvrtc: version of the CUDA compiler; None without one.
      nvrtc_missing: why there is none; None if there is one.
      cuda_driver: the CUDA version of the driver; None without one.
    """

    cpu_isa: str
    nvrtc: str | None
    nvrtc_missing: str | None
    cuda_driver: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A variant's answer for typical problems.

    Attributes:
      op, device, variant: names of what is asked about.
      runs: for each kind of problem the dtypes that it runs; an op of one kind calls
        it "".
      reasons: against the others, against running those unmeasured, and why bits of
        their results may differ from run to run.
    """

    op: str
    device: str
    variant: str
    runs: dict[str, list[str]]
    reasons: list[str]

    @property
    def taken(self) -> str:
        """ "runs float32", or what runs of each kind where they differ."""
        if not any(self.runs.values()):
            return "cannot run"
        first, *others = self.runs.values()
        if all(other == first for other in others):
            return f"runs {', '.join(first)}"
        texts = (f"{k} runs {', '.join(t) or 'nothing'}" for k, t in self.runs.items())
        return ", ".join(texts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInUse:
    """A model that chooses the defaults of an op on a device.

    Attributes:
      op, device: names of what it is for.
      problems: how many the survey measured.
      kinds: of problem that the model decides; see ``model.features.kind``.
      geomean: of the best peer's time over that of the model's choice, on held-out
        problems of all kinds.
      under: share of these with a ratio under 0.97.
      same_versions: whether the libraries are those of the survey; where not, peers
        must be beaten by more.
      surveyed: name of the device of the survey, which may be one like it.
    """

    op: str
    device: str
    problems: int
    kinds: list[str]
    geomean: float
    under: float
    same_versions: bool
    surveyed: str

    def __str__(self) -> str:
        of = "" if self.same_versions else "; other versions than surveyed"
        if self.surveyed != self.device:
            of = f"; surveyed on {self.surveyed}{of}"
        return (
            f"{len(self.kinds)} kinds of problem, {self.problems} problems surveyed; "
            f"held out, {self.geomean:.2f} times as fast as the best peer, "
            f"{self.under:.1%} under 0.97{of}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A GPU that kernels are written for, and that programs do not run on here.

    Attributes:
      target, gpus: as ``emit.targets.Target`` names them.
      state: "compile-only" or "text only".
      kernel: what there is.
      missing: why it cannot be compiled here; None if it can, or nowhere.
    """

    target: str
    gpus: str
    state: str
    kernel: str
    missing: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """A directory of a cache, and whether it can be used, in words."""

    directory: str
    state: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """Directories of answers and kernels.

    Attributes:
      own, shared: the user's directory, and those that are only read.
      tuned_problems, compiled_kernels: how many the user's has.
      on_miss: what happens to a problem that was not tuned.
    """

    own: Directory
    shared: list[Directory]
    tuned_problems: int
    compiled_kernels: int
    on_miss: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Printable):
    """The report of ``doctor``; a shell and a notebook show it.

    Attributes:
      versions: of packages, of Python and of the platform, by name.
      devices: that JAX computes on.
      toolchain: what kernels are made with.
      variants: what each variant says on each device.
      models: that choose defaults on these devices.
      elsewhere: what kernels are written for without being launched.
      caches: where answers and kernels are kept.
    """

    versions: dict[str, str]
    devices: tuple[Device, ...]
    toolchain: Toolchain
    variants: tuple[Said, ...]
    models: tuple[ModelInUse, ...]
    elsewhere: tuple[Elsewhere, ...]
    caches: Caches

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for ``json.dumps``; docs/json.md has the keys."""
        return {
            "versions": self.versions,
            "devices": [devices.to_json(device) for device in self.devices],
            "toolchain": dataclasses.asdict(self.toolchain),
            "variants": [dataclasses.asdict(said) for said in self.variants],
            "models": [dataclasses.asdict(model) for model in self.models],
            "elsewhere": [dataclasses.asdict(other) for other in self.elsewhere],
            "caches": dataclasses.asdict(self.caches),
        }

    @property
    def page(self) -> Page:
        made, caches = self.toolchain, self.caches
        versions = dict(self.versions)
        where = ("Python", f"{versions.pop('python')}, {versions.pop('platform')}")
        packages = ", ".join(f"{name} {v}" for name, v in versions.items())
        return Page(
            (
                _pairs("versions", [("packages", packages), where]),
                _pairs("devices", [(d.platform, str(d)) for d in self.devices]),
                _pairs(
                    "toolchain",
                    [
                        (
                            "CPU kernels",
                            f"prebuilt; this processor runs {made.cpu_isa}",
                        ),
                        ("NVRTC", str(made.nvrtc_missing or made.nvrtc)),
                        ("CUDA driver", made.cuda_driver or "none found"),
                    ],
                ),
                *_by_op(self.variants),
                _pairs(
                    "models that choose unmeasured",
                    [(f"{m.op} on {m.device}", str(m)) for m in self.models]
                    or [("none", "variants say where they are expected to be faster")],
                ),
                _elsewhere_table(self.elsewhere),
                _pairs(
                    "caches",
                    [
                        ("directory", _described(caches.own)),
                        *(("shared", _described(d)) for d in caches.shared),
                        ("tuned problems", str(caches.tuned_problems)),
                        ("compiled kernels", str(caches.compiled_kernels)),
                        ("on a miss", caches.on_miss),
                    ],
                ),
            )
        )


@overload
def doctor(*, json: Literal[False] = False) -> Report: ...
@overload
def doctor(*, json: Literal[True]) -> dict[str, Any]: ...
def doctor(*, json: bool = False) -> Report | dict[str, Any]:
    """Devices, toolchain, variants with their reasons, and caches of this machine.

        tracea.doctor()
        tracea.doctor(json=True)["caches"]["tuned_problems"]

    Args:
      json: whether to return plain data for tools in place of a report: the same as
        ``doctor().to_json()``.
    """
    found = _devices()
    report = Report(
        versions=versions(),
        devices=tuple(found),
        toolchain=_toolchain(),
        variants=tuple(
            _said(op, variant, device)
            for op in catalogue.in_programs()
            for device in found
            for variant in op.variants
        ),
        models=tuple(m for device in found for m in _models(device)),
        elsewhere=tuple(map(_elsewhere, targets.TARGETS.values())),
        caches=_caches(),
    )
    return report.to_json() if json else report


# --- text -----------------------------------------------------------------------------


def _pairs(title: str, pairs: Sequence[tuple[str, str]]) -> Table:
    """One line an item, after its name."""
    columns = (Column(""), Column("", ": "))
    return Table(columns=columns, rows=tuple(map(Row, pairs)), title=title)


def _by_op(variants: Sequence[Said]) -> Iterator[Table]:
    for op, device in dict.fromkeys((said.op, said.device) for said in variants):
        own = [said for said in variants if (said.op, said.device) == (op, device)]
        yield Table(
            columns=(Column("variant"), Column("runs", ": "), Column("reasons", "; ")),
            rows=tuple(_alike(own)),
            title=f"{op} on {device}",
        )


def _alike(variants: Sequence[Said]) -> Iterator[Row]:
    """A row for each variant; one for all that cannot run for the same reasons."""
    names: dict[tuple[str, ...], list[str]] = {}
    for said in variants:
        what = said.taken, "; ".join(said.reasons)
        key = what if not any(said.runs.values()) else (*what, said.variant)
        names.setdefault(key, []).append(said.variant)
    for (taken, reasons, *_), own in names.items():
        yield Row((", ".join(own), taken, reasons))


def _elsewhere_table(others: Sequence[Elsewhere]) -> Table:
    rows = (
        Row(
            (
                f"{other.target} ({other.gpus})",
                other.state,
                other.kernel + (f"; {other.missing}" if other.missing else ""),
            )
        )
        for other in others
    )
    return Table(
        columns=(Column("target"), Column("state", ": "), Column("kernels", ", ")),
        rows=tuple(rows),
        title="kernels that nothing here runs (tracea emit)",
    )


def _described(directory: Directory) -> str:
    return f"{directory.directory} ({directory.state})"


# --- what there is --------------------------------------------------------------------


def _devices() -> list[Device]:
    platforms = dict.fromkeys(["cpu", *(d.platform for d in jax.local_devices())])
    return [device_for(platform_of(p)) for p in platforms]


def versions() -> dict[str, str]:
    """Versions of the packages, of Python and of the platform, by name."""
    names = ("tracea_jax", "jax", "jaxlib", "numpy")
    return {
        **{name: importlib.metadata.version(name) for name in names},
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _toolchain() -> Toolchain:
    missing = nvrtc.why_unavailable()
    return Toolchain(
        cpu_isa=cpu_isa(),
        nvrtc=None if missing else nvrtc.version(),
        nvrtc_missing=missing,
        cuda_driver=cuda_driver_version(),
    )


def _said(op: Op, variant: Any, device: Device) -> Said:
    """The dtypes that a variant takes of each kind of problem, and its reasons."""
    runs: dict[str, list[str]] = {}
    reasons: dict[str, None] = {}
    for dtype in _DTYPES:
        for kind, problem in op.problem.examples(dtype).items():
            found = list(_refusals(variant, problem, device))
            taken = runs.setdefault(kind, [])
            if not found:
                taken.append(dtype)
                found = list(_remarks(variant, problem, device))
            reasons |= dict.fromkeys(found)
    return Said(
        op=op.name,
        device=device.name,
        variant=variant.name,
        runs=runs,
        reasons=list(reasons),
    )


def _models(device: Device) -> Iterator[ModelInUse]:
    """The model of each op on a device."""
    surveyed, found = shipped.surveyed_for(device), shipped.serving(device)
    if surveyed is None or found is None:
        return
    for name, op in found.ops.items():
        seen = op.facts["held out"]["model"]
        if op.kinds:
            yield ModelInUse(
                op=name,
                device=device.name,
                problems=op.facts["problems"],
                kinds=sorted(op.kinds),
                geomean=seen["geomean"],
                under=seen["under"][0],
                same_versions=op.is_of(shipped.installed_versions(device)),
                surveyed=surveyed.name,
            )


def _elsewhere(target: targets.Target) -> Elsewhere:
    hip = target.dialect == "hip"
    return Elsewhere(
        target=target.name,
        gpus=target.gpus,
        state="compile-only" if hip else "text only",
        kernel=f"matmul by {target.instruction} of {', '.join(target.dtypes)}",
        missing=clang.why_unavailable() if hip else None,
    )


def _refusals(variant: Any, problem: Any, device: Device) -> Iterator[str]:
    """Why the variant cannot run, with the settings in force."""
    if (reason := variant.why_not(problem, device)) is not None:
        yield reason
    elif current().determinism:
        reason = why_forbidden(variant, problem, device)
        yield from () if reason is None else (reason,)


def _remarks(variant: Any, problem: Any, device: Device) -> Iterator[str]:
    """Why the variant does not run unmeasured, and why its bits may differ."""
    if (reason := why_default_varies(variant, problem, device)) is not None:
        yield f"bits may differ from run to run: {reason}"
    doubt = variant.doubt(problem, device) if isinstance(variant, Doubting) else None
    if doubt is not None:
        yield f"XLA runs until you tune: {doubt}"


def _caches() -> Caches:
    settings = current()
    directory = settings.directory
    return Caches(
        own=Directory(directory=str(directory), state=_state(directory)),
        shared=[
            Directory(directory=str(p), state=_state(p, Trust.SHARED))
            for p in settings.shared
        ],
        tuned_problems=sum(1 for _ in known(settings).own.entries()),
        compiled_kernels=cubins.count(directory),
        on_miss=settings.on_miss,
    )


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
