"""Which choice wins a race: never slower than the default or XLA, and never by luck.

The race itself is held by ``tuning.measure``, and times by the goal come from
``tuning.goals``. The winner may still lose to XLA in ``tuning.verdict``, which compares
kernel times. Caller: ``tuning.session``.
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
SLACK = 0.99  # a winner by any goal keeps at least this speed in executions in a row


def winner(
    race: Race,
    order: Sequence[Choice],
    heroes: Sequence[Choice],
    goal: str = "throughput",
) -> Choice:
    """The choice to use from now on.

    | step            | among                          | chosen                        |
    |-----------------|--------------------------------|-------------------------------|
    | 1 the best hero | the heroes                     | the fastest; of those that    |
    |                 |                                | tie with it, the first in     |
    |                 |                                | ``order``                     |
    | 2 the incumbent | the best hero and XLA          | the hero, unless XLA surely   |
    |                 |                                | beats it                      |
    | 3 the winner    | choices that beat XLA and      | the fastest, ties as in 1; if |
    |                 | surely beat the incumbent      | there is none, the incumbent  |
    |                 | (a hero by at least 1 %)       |                               |

    "Surely" means by more than the noise. Without that margin, each tuning on a
    disturbed machine would replace the incumbent by another choice, by luck. Ties go to
    the first in order so that several tunings name the same choice. The goal decides
    which of two choices is faster. But a choice that is more than 1 % slower than XLA
    or the best hero in executions in a row, as in most programs, never wins.

    Args:
      race: of verified racers; XLA is compared if it is among them.
      order: every choice of the space, in the order that breaks ties.
      heroes: the defaults.
      goal: one of ``goals.GOALS``.
    """
    by_goal = goals.times(race, goal)
    xla = next(h for h in heroes if h.variant == "xla")
    ours = [c for c in order if c in by_goal and c.variant != "xla"]

    def beats(choice: Choice, other: Choice, margin: float) -> bool:
        if other not in by_goal:  # ``other`` cannot run
            return True
        faster = by_goal[other] / by_goal[choice]
        return faster > 1 + margin and race.ratio(other, choice) >= SLACK

    def noise(choice: Choice, other: Choice) -> float:
        if other not in by_goal:
            return 0.0
        return SURE * goals.error(race, other, choice, goal)

    incumbent = xla
    if defaults := [c for c in ours if c in heroes]:
        hero = fastest(race, defaults, by_goal)
        incumbent = hero if beats(hero, xla, -noise(hero, xla)) else xla

    def challenges(choice: Choice) -> bool:
        least = 0.0 if incumbent == xla else HERO_MARGIN
        margin = max(least, noise(choice, incumbent))
        return beats(choice, xla, 0.0) and beats(choice, incumbent, margin)

    challengers = [c for c in ours if c not in defaults and challenges(c)]
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
