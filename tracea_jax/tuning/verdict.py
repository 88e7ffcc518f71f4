"""The last word between a kernel of ours and XLA: the times of their kernels.

A race times executions in a row, with what the bench does beside them. That is 5 to 14
us of an execution and not the same for everybody: of answers that won a race by 1 to 4
percent, some are slower than XLA in a program. What a program pays is kernel time, so
where the device tells it, XLA is replaced only by what has clearly less of it.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning.lab.local import Lab

CLEARLY = 0.01  # by which our kernels must be faster than XLA's ...
SURE = 3  # ... or by so many standard errors, if that is more


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Kernel times of one execution.

    Attributes:
      ours_us, xla_us: medians over the rounds.
      ratio, error: XLA's time by ours, and its standard error as a fraction.
    """

    ours_us: float
    xla_us: float
    ratio: float
    error: float

    @property
    def is_ours(self) -> bool:
        """Whether our kernels are clearly faster."""
        return self.ratio >= 1 + max(CLEARLY, SURE * self.error)


def verdict(lab: Lab, problem: Problem, ours: Choice, xla: Choice) -> Verdict | None:
    """Compares kernel times; None where the device does not tell them.

    Raises:
      CandidateError, LabError: as ``Lab.kernel_race``.
    """
    race = lab.kernel_race(problem, (ours, xla))
    if not {ours, xla} <= set(race.times_us):
        return None
    return Verdict(
        ours_us=race.median_us(ours),
        xla_us=race.median_us(xla),
        ratio=race.ratio(xla, ours),
        error=race.error(xla, ours),
    )
