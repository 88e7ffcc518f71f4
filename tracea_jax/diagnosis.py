"""The Doctor: which variants can serve a problem on a device, and why others cannot."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator

from tracea_jax import variants
from tracea_jax.device import Device
from tracea_jax.problem import Problem
from tracea_jax.runtime import nvrtc


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
    """

    problem: Problem
    device: Device
    candidates: tuple[str, ...]
    rejected: tuple[Rejection, ...]

    def reason(self, variant: str) -> str | None:
        """Why this variant was rejected; None if it is a candidate."""
        return next((r.reason for r in self.rejected if r.variant == variant), None)

    def __str__(self) -> str:
        lines = [f"{self.problem} on {self.device}"]
        lines += [f"  can run: {', '.join(self.candidates)}"]
        lines += [f"  cannot:  {r}" for r in by_reason(self.rejected)]
        return "\n".join(lines)


def diagnose(problem: Problem, device: Device) -> Diagnosis:
    """Asks every variant of the op; a pure function but for the installed toolchain.

    ``compiled_elsewhere`` is for devices that are not here, nor their toolchain.
    """
    candidates, rejected = [], []
    for variant in variants.of(problem.op):
        reason = variant.why_not(problem, device) or _toolchain(variant, device)
        if reason is None:
            candidates.append(variant.name)
        else:
            rejected.append(Rejection(variant=variant.name, reason=reason))
    return Diagnosis(
        problem=problem,
        device=device,
        candidates=tuple(candidates),
        rejected=tuple(rejected),
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


def _toolchain(variant: variants.Variant, device: Device) -> str | None:
    """Why the variant's kernels cannot be compiled, if they need compiling here."""
    if _elsewhere.get():
        return None
    compiled = any(source.startswith("cuda/") for source in variant.sources)
    return nvrtc.why_unavailable() if compiled and device.platform == "cuda" else None
