"""Who wins a race: never worse than the default or XLA, and never by luck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracea_jax.policy import Choice
from tracea_jax.tuning import goals
from tracea_jax.tuning.measure import Race

HERO_MARGIN = 0.01  # a challenger must beat the best default by this much
TIE = 0.005  # candidates this close are equal ...
NOISY_TIE = 0.01  # ... or as close as the race's standard error, up to this
SURE = 3  # standard errors by which what runs must lose: several challenge it
SLACK = 0.99  # executions in a row may lose this much to who is replaced, whatever for


def winner(
    race: Race,
    order: Sequence[Choice],
    heroes: Sequence[Choice],
    goal: str = "throughput",
) -> Choice:
    """The choice to use from now on.

    | among                             | chosen                                     |
    |-----------------------------------|--------------------------------------------|
    | the heroes                        | the fastest; of those that tie with it,    |
    |                                   | the first in ``order``                     |
    | that one and XLA                  | the hero unless XLA surely beats it        |
    | challengers that surely beat the  | the fastest; ties as above, so that        |
    | latter, a hero by 1 %, and XLA    | tunings agree                              |

    Surely is by more than the noise: on a disturbed machine tunings would else replace
    what runs by luck, each by another choice. Who is faster, the goal decides. But
    nobody wins who is slower than XLA or the best hero by more than 1 % when executed
    in a row, as most programs do.

    Args:
      race: its racers are verified; XLA is compared if it is among them.
      order: every choice of the space, in the order that breaks ties.
      heroes: the defaults.
      goal: one of ``goals.GOALS``.
    """
    by_goal = goals.times(race, goal)
    xla = next(h for h in heroes if h.variant == "xla")
    ours = [c for c in order if c in by_goal and c.variant != "xla"]

    def beats(choice: Choice, other: Choice, margin: float) -> bool:
        if other not in by_goal:  # it does not run
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
    """The first of the group that ties with its fastest."""
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
