"""The Doctor: which variants can serve a problem on a device, and why others cannot."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from tracea_jax import variants
from tracea_jax.device import Device
from tracea_jax.emit.kernel import MOST_BYTES
from tracea_jax.problem import Problem
from tracea_jax.runtime import nvrtc
from tracea_jax.variants.base import Varying


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A variant that cannot serve the problem, and the sentence why."""

    variant: str
    reason: str

    def __str__(self) -> str:
        return f"{self.variant}: {self.reason}"


def by_reason(
    rejected: Iterable[Rejection], form: str = "{variants}: {reason}"
) -> tuple[str, ...]:
    """A line for each reason, "variant, another: reason", or in another form."""
    names: dict[str, list[str]] = {}
    for rejection in rejected:
        names.setdefault(rejection.reason, []).append(rejection.variant)
    return tuple(
        form.format(variants=", ".join(own), reason=reason)
        for reason, own in names.items()
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All variants of an op, sorted into those that can run and those that cannot.

    Attributes:
      problem, device: what was asked.
      candidates: names of the variants that apply, our own first, "xla" last.
      rejected: the others with their reasons.
      deterministic: ``Options.determinism``, which configs and answers are chosen by.
      varying: names of those that were rejected only because bits of their results may
        differ from run to run.
    """

    problem: Problem
    device: Device
    candidates: tuple[str, ...]
    rejected: tuple[Rejection, ...]
    deterministic: bool | None = None
    varying: tuple[str, ...] = ()

    def reason(self, variant: str) -> str | None:
        """Why this variant was rejected; None if it is a candidate."""
        return next((r.reason for r in self.rejected if r.variant == variant), None)

    def may_vary(self, variant: str, config: Any) -> str | None:
        """Why bits of a choice's results may differ from run to run, or None."""
        found = variants.get(self.problem.op, variant)
        return variants.may_vary(found, self.problem, config, self.device)

    def without(self, rejection: Rejection) -> Diagnosis:
        """The same with one candidate rejected."""
        others = tuple(name for name in self.candidates if name != rejection.variant)
        rejected = (*self.rejected, rejection)
        return dataclasses.replace(self, candidates=others, rejected=rejected)

    def __str__(self) -> str:
        lines = [f"{self.problem} on {self.device}"]
        lines += [f"  can run: {', '.join(self.candidates)}"]
        lines += [f"  cannot:  {r}" for r in by_reason(self.rejected)]
        return "\n".join(lines)


def diagnose(
    problem: Problem, device: Device, deterministic: bool | None = None
) -> Diagnosis:
    """Asks every variant of the op; a pure function but for the installed toolchain.

    ``compiled_elsewhere`` is for devices that are not here, nor their toolchain.

    Args:
      problem, device: what is to run, and where.
      deterministic: as ``Options.determinism``; True rejects variants none of whose
        configs gives equal bits from run to run.
    """
    candidates, rejected, varying = [], [], []
    for variant in variants.of(problem.op):
        reason = (
            variant.why_not(problem, device)
            or _size(variant, problem, device)
            or _toolchain(variant, device)
        )
        if reason is None and deterministic:
            reason = why_forbidden(variant, problem, device)
            varying += [variant.name] * (reason is not None)
        if reason is None:
            candidates.append(variant.name)
        else:
            rejected.append(Rejection(variant=variant.name, reason=reason))
    return Diagnosis(
        problem=problem,
        device=device,
        candidates=tuple(candidates),
        rejected=tuple(rejected),
        deterministic=deterministic,
        varying=tuple(varying),
    )


# A context variable, as answers diagnose the neighbours of a problem, too.
_elsewhere = contextvars.ContextVar("elsewhere", default=False)


@contextlib.contextmanager
def compiled_elsewhere() -> Iterator[None]:
    """Inside, no compiler is missed: kernels are compiled where the device is."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def why_forbidden(
    variant: variants.Variant, problem: Problem, device: Device
) -> str | None:
    """Why no config may run where bits must not differ; its default one tells."""
    reason = why_default_varies(variant, problem, device)
    return None if reason is None else forbidden(reason)


def why_default_varies(
    variant: variants.Variant, problem: Problem, device: Device
) -> str | None:
    """Why bits may differ from run to run with the default config, or None."""
    if not isinstance(variant, Varying):
        return None
    return variant.may_vary(problem, variant.heuristic(problem, device), device)


def forbidden(reason: str) -> str:
    """The sentence why a choice whose bits may differ for a reason may not run."""
    return f"{reason}, which deterministic=True or a flag of XLA forbids"


def _size(variant: variants.Variant, problem: Problem, device: Device) -> str | None:
    """Why the variant's kernels do not reach all of the arrays."""
    if not _is_compiled(variant, device) or problem.bytes < MOST_BYTES:
        return None
    return f"its arrays have {problem.bytes} bytes; kernels reach up to {MOST_BYTES}"


def _toolchain(variant: variants.Variant, device: Device) -> str | None:
    """Why the variant's kernels cannot be compiled, if they need compiling here."""
    if _elsewhere.get():
        return None
    return nvrtc.why_unavailable() if _is_compiled(variant, device) else None


def _is_compiled(variant: variants.Variant, device: Device) -> bool:
    """Returns whether the variant has kernels that are compiled for the device."""
    compiled = any(source.startswith("cuda/") for source in variant.sources)
    return compiled and device.platform == "cuda"
