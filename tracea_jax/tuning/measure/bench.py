"""The protocol of a bench, which runs and verifies candidates, and their failures.

Each op implements it in ``ops/<op>/workload`` on the base in ``ops/common/bench``.
Timing a prepared candidate is in ``slices`` and ``race``. Callers: tuning/lab, and the
two modules beside this one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tracea_jax.policy import Choice
from tracea_jax.runtime.cubins import KnownFailure
from tracea_jax.tuning.store.records import FAILURES

Run = Callable[[int], None]  # executes a candidate n times in a row; blocks until done
Flush = Callable[[], None]  # overwrites the caches; blocks until done
# (prepared candidates, rounds) -> kernel time of each candidate in every round, in us
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
    """Comparison of a candidate's results with a float64 reference.

    Attributes:
      max_rel_error: largest error; NaN if a result is NaN.
      tolerance: the largest error that is allowed.
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
    """Runs and verifies the candidates of one problem; each op provides one."""

    def prepare(self, choice: Choice) -> Run:
        """Compiles a candidate for random inputs; the result executes it.

        Raises:
          CandidateError: naming the kind of failure.
          Exception: any other one counts as "compile_error".
        """
        ...

    def verify(self, choice: Choice) -> Verification:
        """Runs a candidate into poisoned outputs and compares its results.

        The inputs are fresh and random, of the problem's shape and of a tail shape.
        """
        ...

    def flush(self) -> None:
        """Overwrites the device's caches; a bench without it gets no cold times."""
        ...

    def kernel_times(
        self, runs: Mapping[Any, Run], rounds: int
    ) -> Mapping[Any, list[float]]:
        """Kernel times of prepared candidates in microseconds, taken in turns.

        The candidates have any names; one may run under several.

        The result is empty where the device does not report kernel times, as for a
        bench without this method.
        """
        ...


def batch_of(run: Run) -> int:
    """Executions in one call to the device; multiples of this number cost least."""
    return getattr(run, "batch", 1)


def flush_of(bench: Bench) -> Flush | None:
    """The bench's ``flush``; None if it has none."""
    return getattr(bench, "flush", None)


def kernel_times_of(bench: Bench) -> KernelTimes:
    """The bench's ``kernel_times``; a function that returns {} if it has none."""
    return getattr(bench, "kernel_times", lambda runs, rounds: {})


def candidate_error(error: Exception, kind: str) -> CandidateError:
    """The failure that an exception stands for, of ``kind`` if the error names none."""
    if isinstance(error, CandidateError):
        if error.kind in FAILURES:
            return error
        return CandidateError(kind, str(error))
    if isinstance(error, TimeoutError):
        kind = "timeout"
    if isinstance(error, KnownFailure):
        kind = error.kind
    return CandidateError(kind, f"{type(error).__name__}: {error}")
