"""Who wins a race: never worse than the default or XLA, and never by luck."""

from __future__ import annotations

from collections.abc import Sequence

from tracea_jax.policy import Choice
from tracea_jax.tuning import goals
from tracea_jax.tuning.measure import Race

HERO_MARGIN = 0.01  # a challenger must beat the best default by this much
TIE = 0.005  # candidates this close are equal ...
NOISY_TIE = 0.02  # ... or as close as the race's own noise, up to this
SLACK = 0.99  # executions in a row may lose this much to who is replaced, whatever for


def winner(
    race: Race,
    order: Sequence[Choice],
    heroes: Sequence[Choice],
    goal: str = "throughput",
) -> Choice:
    """The choice to use from now on.

    | among                          | chosen                                        |
    |--------------------------------|-----------------------------------------------|
    | challengers that beat the best | the fastest; of those that tie with it, the   |
    | hero by 1 % and beat XLA       | first in ``order``, so that tunings agree     |
    | else the heroes that beat XLA  | the fastest; ties as above                    |
    | else                           | XLA                                           |

    Who is faster, the goal decides. But nobody wins who is slower than XLA or the best
    hero by more than 1 % when executed in a row, as most programs do.

    Args:
      race: its racers are verified; XLA is compared if it is among them.
      order: every choice of the space, in the order that breaks ties.
      heroes: the defaults.
      goal: one of ``goals.GOALS``.
    """
    xla = next(h for h in heroes if h.variant == "xla")
    ours = [c for c in order if c in race.times_us and c.variant != "xla"]
    if xla in race.times_us:
        ours = [c for c in ours if _beats(race, c, xla, goal)]
    defaults = [h for h in heroes if h in race.times_us and h.variant != "xla"]
    challengers = [c for c in ours if c not in defaults]
    if defaults:
        best = fastest(race, defaults, goal)
        challengers = [
            c for c in challengers if _beats(race, c, best, goal, HERO_MARGIN)
        ]
    for group in (challengers, [c for c in ours if c in defaults]):
        if group:
            return fastest(race, group, goal)
    return xla


def fastest(race: Race, group: Sequence[Choice], goal: str = "throughput") -> Choice:
    """The first of the group that ties with its lowest median."""
    lowest = min(group, key=lambda choice: goals.median_us(race, choice, goal))

    def ties(choice: Choice) -> bool:
        noise = min(2 * goals.deviation(race, choice, lowest, goal), NOISY_TIE)
        return goals.ratio(race, choice, lowest, goal) <= 1 + max(TIE, noise)

    return next(c for c in group if c == lowest or ties(c))


def runner_up(
    race: Race, chosen: Choice, order: Sequence[Choice], goal: str = "throughput"
) -> Choice | None:
    """The next best racer by its median."""
    others = [c for c in order if c in race.times_us and c != chosen]
    return min(others, key=lambda c: goals.median_us(race, c, goal), default=None)


def _beats(
    race: Race, choice: Choice, other: Choice, goal: str, margin: float = 0.0
) -> bool:
    steady = race.ratio(other, choice)
    faster = goals.ratio(race, other, choice, goal)
    is_enough = faster > 1 if not margin else faster >= 1 + margin
    return is_enough and steady >= SLACK
