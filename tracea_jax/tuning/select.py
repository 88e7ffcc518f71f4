"""Who wins a race: never worse than the default or XLA, and never by luck."""

from __future__ import annotations

from collections.abc import Sequence

from tracea_jax.policy import Choice
from tracea_jax.tuning.measure import Race

HERO_MARGIN = 0.01  # a challenger must beat the best default by this much
TIE = 0.005  # candidates this close are equal ...
NOISY_TIE = 0.02  # ... or as close as the race's own noise, up to this


def winner(race: Race, order: Sequence[Choice], heroes: Sequence[Choice]) -> Choice:
    """The choice to use from now on.

    | among                          | chosen                                        |
    |--------------------------------|-----------------------------------------------|
    | challengers that beat the best | the fastest; of those that tie with it, the   |
    | hero by 1 % and beat XLA       | first in ``order``, so that tunings agree     |
    | else the heroes that beat XLA  | the fastest; ties as above                    |
    | else                           | XLA                                           |

    Args:
      race: its racers are verified; XLA is compared if it is among them.
      order: every choice of the space, in the order that breaks ties.
      heroes: the defaults.
    """
    xla = next(h for h in heroes if h.variant == "xla")
    ours = [c for c in order if c in race.times_us and c.variant != "xla"]
    if xla in race.times_us:
        ours = [c for c in ours if race.ratio(xla, c) > 1.0]
    defaults = [h for h in heroes if h in race.times_us and h.variant != "xla"]
    challengers = [c for c in ours if c not in defaults]
    if defaults:
        best = fastest(race, defaults)
        challengers = [c for c in challengers if race.ratio(best, c) >= 1 + HERO_MARGIN]
    for group in (challengers, [c for c in ours if c in defaults]):
        if group:
            return fastest(race, group)
    return xla


def fastest(race: Race, group: Sequence[Choice]) -> Choice:
    """The first of the group that ties with its lowest median."""
    lowest = min(group, key=race.median_us)

    def ties(choice: Choice) -> bool:
        noise = min(2 * race.deviation(choice, lowest), NOISY_TIE)
        return race.ratio(choice, lowest) <= 1 + max(TIE, noise)

    return next(c for c in group if c == lowest or ties(c))


def runner_up(race: Race, chosen: Choice, order: Sequence[Choice]) -> Choice | None:
    """The next best racer by its median."""
    others = [c for c in order if c in race.times_us and c != chosen]
    return min(others, key=race.median_us, default=None)
