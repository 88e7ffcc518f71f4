"""Goals: what "fast" means. Every goal is computed from the same measurements.

throughput   the steady time: executions in a row
latency      the cold time: one execution that finds nothing in the caches
balanced     the geometric mean of steady and cold time

The times are taken by ``tuning.measure``; ``tuning.select`` names the winner of a race.
Callers: select, session, sharing, tuner and search/history, all in ``tuning``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable
from typing import Any, get_args

from tracea_jax.tuning.measure import Race
from tracea_jax.tuning.store.records import Observation
from tracea_jax.typing import Goal

GOALS: tuple[Goal, ...] = get_args(Goal)
ENOUGH = 7  # quiet cold executions of every racer that make cold times count
SIGNIFICANT = 3  # standard errors that two ratios must differ by to be different


def score_us(observation: Observation, goal: str) -> float | None:
    """The score that a search minimises, in microseconds; None for a failure.

    For the goals "latency" and "balanced" alike, the score is the geometric mean of
    steady and cold time: single executions are timed too roughly to lead a search by
    themselves. The race then decides by the goal alone.
    """
    steady, cold = observation.time_us, observation.cold_us
    if steady is None or cold is None or goal == "throughput":
        return steady
    return math.sqrt(steady * cold)


def times(race: Race, goal: str) -> dict[Any, float]:
    """The time of each racer by the goal, relative to the other racers' times.

    The unit belongs to the race: only ratios of these times have a meaning.

    Single executions are timed roughly. Therefore a racer's own cold time counts only
    if its ratio of cold to steady time clearly differs from the median of that ratio
    over all racers. Otherwise the racer's steady time multiplied by that median, which
    is the more precise estimate, counts as its cold time.
    """
    steady = {racer: race.relative(racer) for racer in race.times_us}
    if goal == "throughput" or not _were_cold(race):
        return steady
    cold, usual = dict(steady), _usual_cold(race)
    for racer in steady:
        is_odd = _is_oddly_cold(race, racer, usual)
        cold[racer] = race.relative(racer, "cold") if is_odd else steady[racer] * usual
    if goal == "latency":
        return cold
    return {racer: math.sqrt(steady[racer] * cold[racer]) for racer in steady}


def error(race: Race, slow: Hashable, fast: Hashable, goal: str) -> float:
    """Standard error of ``ratio(race, slow, fast, goal)``, as a fraction of it."""
    if goal != "throughput" and _were_cold(race):
        usual = _usual_cold(race)
        if any(_is_oddly_cold(race, racer, usual) for racer in (slow, fast)):
            return race.error(slow, fast, "cold")
    return race.error(slow, fast)


def ratio(race: Race, slow: Hashable, fast: Hashable, goal: str) -> float:
    """The time of ``slow`` divided by that of ``fast``: above 1, ``fast`` is faster."""
    if goal == "throughput":
        return race.ratio(slow, fast)
    by_goal = times(race, goal)
    return by_goal[slow] / by_goal[fast]


def _usual_cold(race: Race) -> float:
    """The median over the racers of cold time divided by steady time."""
    return statistics.median(
        race.relative(racer, "cold") / race.relative(racer) for racer in race.times_us
    )


def _is_oddly_cold(race: Race, racer: Hashable, usual: float) -> bool:
    """Whether a racer's ratio of cold to steady time clearly differs from the usual."""
    slower = race.relative(racer, "cold") / race.relative(racer)
    noise = SIGNIFICANT * race.relative_error(racer, "cold")
    return abs(math.log(slower / usual)) > noise


def _were_cold(race: Race) -> bool:
    return all(
        racer in race.cold_us and len(race.quiet_us(racer, "cold")) >= ENOUGH
        for racer in race.times_us
    )
