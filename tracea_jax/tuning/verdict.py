"""The last decision between a kernel of ours and XLA: the times of their kernels.

A race times whole executions, the bench's own work included. That work takes 5 to 14 us
of an execution and differs between choices: some answers that won a race by 1 to 4
percent are slower than XLA in a program. A program pays for kernel time. So where the
device reports kernel times, a choice replaces XLA only if its kernels take clearly less
time. Races are in ``tuning.measure``; callers are ``tuning.session`` and
``tuning.sharing``.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning.lab.local import Lab

CLEARLY = 0.01  # our kernels must be faster than XLA's by this fraction ...
SURE = 3  # ... or by this many standard errors, whichever is more


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Kernel times of one execution.

    Attributes:
      ours_us, xla_us: medians over the rounds.
      ratio, error: XLA's time divided by ours, and the ratio's standard error as a
        fraction of it.
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
    """Compares kernel times; None where the device does not report them.

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
