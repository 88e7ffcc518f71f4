"""Goals: what "fast" means. All of them are derived from the same measurements.

throughput   the steady time: executions in a row
latency      the cold time: one execution that finds nothing in the caches
balanced     their geometric mean
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable
from typing import Any

from tracea_jax.tuning.measure import Race
from tracea_jax.tuning.store.records import Observation

GOALS = ("latency", "throughput", "balanced")
ENOUGH = 7  # cold executions of each while it was quiet, before goals go by them
SIGNIFICANT = 3  # standard errors


def score_us(observation: Observation, goal: str) -> float | None:
    """What a search minimises, in microseconds; None for a failure.

    For latency that is the mean, too: single executions are timed too roughly to lead a
    search by themselves. The race decides by the goal alone.
    """
    steady, cold = observation.time_us, observation.cold_us
    if steady is None or cold is None or goal == "throughput":
        return steady
    return math.sqrt(steady * cold)


def times(race: Race, goal: str) -> dict[Any, float]:
    """Time by the goal of each racer, in units of the race's own.

    Single executions are timed roughly. Of who is cold as much slower than steady as
    the others are, but for noise, the steady times tell more: then they count instead.
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
    """Standard error of the ratio of their times by the goal, as a fraction of it."""
    if goal != "throughput" and _were_cold(race):
        usual = _usual_cold(race)
        if any(_is_oddly_cold(race, racer, usual) for racer in (slow, fast)):
            return race.error(slow, fast, "cold")
    return race.error(slow, fast)


def ratio(race: Race, slow: Hashable, fast: Hashable, goal: str) -> float:
    """How many times faster ``fast`` is than ``slow``: above 1, it is."""
    if goal == "throughput":
        return race.ratio(slow, fast)
    by_goal = times(race, goal)
    return by_goal[slow] / by_goal[fast]


def _usual_cold(race: Race) -> float:
    """How much slower most racers are cold than steady."""
    return statistics.median(
        race.relative(racer, "cold") / race.relative(racer) for racer in race.times_us
    )


def _is_oddly_cold(race: Race, racer: Hashable, usual: float) -> bool:
    """Whether a racer's cold times tell more than that it is as slow as most are."""
    slower = race.relative(racer, "cold") / race.relative(racer)
    noise = SIGNIFICANT * race.relative_error(racer, "cold")
    return abs(math.log(slower / usual)) > noise


def _were_cold(race: Race) -> bool:
    return all(
        racer in race.cold_us and len(race.quiet_us(racer, "cold")) >= ENOUGH
        for racer in race.times_us
    )
