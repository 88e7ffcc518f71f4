"""Goals: what "fast" means. All of them are derived from the same measurements.

throughput   the steady time: executions in a row
latency      the cold time: one execution that finds nothing in the caches
balanced     their geometric mean
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable

from tracea_jax.tuning.measure import Race
from tracea_jax.tuning.records import Observation

GOALS = ("latency", "throughput", "balanced")
ENOUGH = 7  # cold executions of each, before latency goes by them


def score_us(observation: Observation, goal: str) -> float | None:
    """What a search minimises, in microseconds; None for a failure.

    For latency that is the mean, too: single executions are timed too roughly to lead a
    search by themselves. The race decides by the goal alone.
    """
    steady, cold = observation.time_us, observation.cold_us
    if steady is None or cold is None or goal == "throughput":
        return steady
    return math.sqrt(steady * cold)


def ratio(race: Race, slow: Hashable, fast: Hashable, goal: str) -> float:
    """How many times faster ``fast`` is than ``slow``: above 1, it is.

    Cold times that are few, or differ by no more than their noise, tell nothing: then
    latency, too, goes by the steady ones.
    """
    steady = race.ratio(slow, fast)
    if goal == "throughput" or not _were_cold(race, slow, fast):
        return steady
    cold = race.ratio(slow, fast, "cold")
    if goal == "balanced":
        return math.sqrt(steady * cold)
    noise = 2 * race.deviation(slow, fast, "cold")
    is_few = min(len(race.cold_us[racer]) for racer in (slow, fast)) < ENOUGH
    return steady if is_few or abs(cold - 1) <= noise else cold


def deviation(race: Race, slow: Hashable, fast: Hashable, goal: str) -> float:
    """The noise of that ratio, as a fraction of it."""
    steady = race.deviation(slow, fast)
    if goal == "throughput" or not _were_cold(race, slow, fast):
        return steady
    return max(steady, race.deviation(slow, fast, "cold"))


def median_us(race: Race, racer: Hashable, goal: str) -> float:
    """Time by the goal of one racer."""
    steady = race.median_us(racer)
    if goal == "throughput" or racer not in race.cold_us:
        return steady
    cold = statistics.median(race.cold_us[racer])
    return cold if goal == "latency" else math.sqrt(steady * cold)


def _were_cold(race: Race, *racers: Hashable) -> bool:
    return all(race.cold_us.get(racer) for racer in racers)
