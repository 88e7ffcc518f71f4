"""Which choice wins a race: never slower than the defaults or XLA, and never by luck.

The race itself is held by ``tuning.measure``, and times by the goal come from
``tuning.goals``. Where kernel times are known, ``tuning.verdict`` decides after it.
Caller: ``tuning.session``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracea_jax.policy import Choice
from tracea_jax.tuning import goals
from tracea_jax.tuning.measure import Race

HERO_MARGIN = 0.01  # a challenger must beat the best default by this much
TIE = 0.005  # candidates whose times differ by less are equal, ...
NOISY_TIE = 0.01  # ... or by less than the race's standard error, up to this much
SURE = 3  # standard errors by which the incumbent must lose, as it has many challengers


def winner(
    race: Race,
    order: Sequence[Choice],
    heroes: Sequence[Choice],
    goal: str = "throughput",
) -> Choice:
    """The choice to use from now on.

    | step            | among                          | chosen                        |
    |-----------------|--------------------------------|-------------------------------|
    | 1 the incumbent | the defaults and XLA           | the fastest                   |
    | 2 the winner    | choices that surely beat the   | the fastest; of those that    |
    |                 | incumbent (ours by at least    | tie with it, the first in     |
    |                 | 1 %)                           | ``order``; if there is none,  |
    |                 |                                | the incumbent                 |

    "Surely" means by more than the noise. Without that margin, each tuning on a
    disturbed machine would replace the incumbent by another choice, by luck. Ties go to
    the first in order so that several tunings name the same choice. The goal alone
    decides which of two choices is faster, so no racer of step 1 is faster than the
    winner by the times of ``goals.times``.

    Args:
      race: of verified racers.
      order: every choice of the space, in the order that breaks ties.
      heroes: the defaults, XLA's among them.
      goal: one of ``goals.GOALS``.
    """
    by_goal = goals.times(race, goal)
    xla = next(h for h in heroes if h.variant == "xla")
    defaults = [h for h in heroes if h in by_goal]
    incumbent = min(defaults, key=by_goal.__getitem__, default=xla)

    def challenges(choice: Choice) -> bool:
        if incumbent not in by_goal:  # none of them can run
            return True
        least = 0.0 if incumbent == xla else HERO_MARGIN
        noise = SURE * goals.error(race, incumbent, choice, goal)
        return by_goal[incumbent] / by_goal[choice] > 1 + max(least, noise)

    ours = [c for c in order if c in by_goal and c not in heroes]
    challengers = [c for c in ours if challenges(c)]
    return fastest(race, challengers, by_goal) if challengers else incumbent


def fastest(
    race: Race, group: Sequence[Choice], by_goal: Mapping[Choice, float]
) -> Choice:
    """The first choice of the group that ties with the fastest of the group."""
    lowest = min(group, key=by_goal.__getitem__)

    def ties(choice: Choice) -> bool:
        noise = min(race.error(choice, lowest), NOISY_TIE)
        return by_goal[choice] / by_goal[lowest] <= 1 + max(TIE, noise)

    return next(c for c in group if c == lowest or ties(c))


def runner_up(
    race: Race, chosen: Choice, order: Sequence[Choice], goal: str = "throughput"
) -> Choice | None:
    """The next best racer by the goal."""
    by_goal = goals.times(race, goal)
    others = [c for c in order if c in by_goal and c != chosen]
    return min(others, key=by_goal.__getitem__, default=None)
