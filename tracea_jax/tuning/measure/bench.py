"""What a bench must offer so that its candidates can be tuned, and how they fail."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tracea_jax.policy import Choice
from tracea_jax.runtime.cubins import KnownFailure
from tracea_jax.tuning.store.records import FAILURES

Run = Callable[[int], None]  # executes so many times in a row and blocks until done
Flush = Callable[[], None]  # leaves nothing useful in the caches; blocks until done
# (prepared candidates, rounds) -> microseconds of the kernels of each in every round
KernelTimes = Callable[[Mapping[Any, Run], int], Mapping[Any, list[float]]]


class CandidateError(Exception):
    """A candidate failed in a way that its bench can name.

    Attributes:
      kind: one of ``records.FAILURES``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, str(self))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How a candidate's results compare with a float64 reference.

    Attributes:
      max_rel_error, tolerance: largest error, and what is allowed; NaN if a result is.
      ok: whether every result was within the tolerance.
      repeatable: whether two runs gave the same bits.
      message: what was wrong, or which inputs were used.
    """

    max_rel_error: float
    tolerance: float
    ok: bool
    repeatable: bool = True
    message: str = ""

    @property
    def failure(self) -> str | None:
        """Why the candidate may not be used: "nan" or "wrong_result"; else None."""
        if math.isnan(self.max_rel_error):
            return "nan"
        return None if self.ok and self.repeatable else "wrong_result"


class Bench(Protocol):
    """What an op provides so that its candidates can be tuned."""

    def prepare(self, choice: Choice) -> Run:
        """Compiles a candidate for random inputs; the result executes it.

        Raises:
          CandidateError: naming the kind of failure.
          Exception: any other one counts as "compile_error".
        """
        ...

    def verify(self, choice: Choice) -> Verification:
        """Runs it on fresh random inputs, and a tail shape, into poisoned outputs."""
        ...

    def flush(self) -> None:
        """Overwrites the caches of the device; without this method nothing is cold."""
        ...

    def kernel_times(
        self, runs: Mapping[Choice, Run], rounds: int
    ) -> Mapping[Choice, list[float]]:
        """Microseconds of the kernels of prepared candidates, taken in turns.

        Empty where the device does not tell them, as if this method were missing.
        """
        ...


def batch_of(run: Run) -> int:
    """Executions that one call to the device makes: multiples of it cost least."""
    return getattr(run, "batch", 1)


def flush_of(bench: Bench) -> Flush | None:
    """How a bench flushes caches; None if it cannot."""
    return getattr(bench, "flush", None)


def kernel_times_of(bench: Bench) -> KernelTimes:
    """How a bench tells kernel times; of none if it cannot."""
    return getattr(bench, "kernel_times", lambda runs, rounds: {})


def candidate_error(error: Exception, kind: str) -> CandidateError:
    """The failure that an exception stands for; ``kind`` if it does not tell."""
    if isinstance(error, CandidateError):
        if error.kind in FAILURES:
            return error
        return CandidateError(kind, str(error))
    if isinstance(error, TimeoutError):
        kind = "timeout"
    if isinstance(error, KnownFailure):
        kind = error.kind
    return CandidateError(kind, f"{type(error).__name__}: {error}")
