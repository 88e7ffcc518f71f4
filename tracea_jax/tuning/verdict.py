"""The last decision where the device reports kernel times: those of three choices.

A race times whole executions, the bench's own work included. That work takes 5 to 14 us
of an execution on a GPU and differs between choices: some answers that won a race by 1
to 4 percent are slower than XLA in a program. A program pays for kernel time. Races are
in ``tuning.measure``; callers are ``tuning.session`` and ``tuning.sharing``.
"""

from __future__ import annotations

from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning.lab.local import Lab
from tracea_jax.tuning.measure import Race

CLEARLY = 0.01  # our kernels must be faster than XLA's by this fraction ...
SURE = 3  # ... or by this many standard errors, whichever is more


def kernel_race(
    lab: Lab, problem: Problem, chosen: Choice, untuned: Choice, xla: Choice
) -> Race | None:
    """Kernel times of the three; None where the device does not report them.

    Raises:
      CandidateError, LabError: as ``Lab.kernel_race``, which blames the first choice of
        ours.
    """
    racers = sorted({chosen: 0, untuned: 1, xla: 2}, key=lambda c: c == xla)
    race = lab.kernel_race(problem, racers)
    return race if set(racers) <= set(race.times_us) else None


def verdict(race: Race, chosen: Choice, untuned: Choice, xla: Choice) -> Choice:
    """The choice to use, by the kernel times of the three.

    | if                                                           | then             |
    |--------------------------------------------------------------|------------------|
    | ``chosen`` clearly beats XLA and is not slower than untuned  | ``chosen``       |
    | else                                                         | the faster one   |
    |                                                              | of untuned, XLA  |
    """
    us = {c: race.level_us(c) for c in (chosen, untuned, xla)}
    margin = max(CLEARLY, SURE * race.error(xla, chosen))
    if us[xla] / us[chosen] >= 1 + margin and us[chosen] <= us[untuned]:
        return chosen
    return min((untuned, xla), key=us.__getitem__)
