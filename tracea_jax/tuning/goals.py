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
from tracea_jax.tuning.store.protocols import by_protocol, deciding
from tracea_jax.tuning.store.records import Observation
from tracea_jax.typing import Goal

GOALS: tuple[Goal, ...] = get_args(Goal)


def score_us(observation: Observation, goal: str) -> float | None:
    """The score that a search minimises, in microseconds; None for a failure.

    For the goals "latency" and "balanced" alike, the score is the geometric mean of
    steady and cold time: single executions are timed too roughly to lead a search by
    themselves. The race then decides by the goal alone.
    """
    steady, cold = observation.time_us, observation.cold_us
    if steady is None or cold is None or goal == "throughput":
        return steady
    return by_protocol("balanced", steady, cold)


def times(race: Race, goal: str) -> dict[Any, float]:
    """The time of each racer by the goal, in microseconds.

    They decide the race and are what reports print, so that no report shows a winner
    that is slower than another racer.
    """
    how = _protocol_of(race, goal)
    by_goal: dict[Any, float] = {}
    for racer in race.times_us:
        cold = None if how == "steady" else race.level_us(racer, "cold")
        us = by_protocol(how, race.level_us(racer), cold)
        assert us is not None
        by_goal[racer] = us
    return by_goal


def error(race: Race, slow: Hashable, fast: Hashable, goal: str) -> float:
    """Standard error of ``ratio(race, slow, fast, goal)``, as a fraction of it."""
    how, steady = _protocol_of(race, goal), race.error(slow, fast)
    if how == "steady":
        return steady
    cold = max(race.error(slow, fast, "cold"), _usual_error(race))
    return cold if how == "cold" else math.hypot(steady, cold) / 2


def ratio(race: Race, slow: Hashable, fast: Hashable, goal: str) -> float:
    """The time of ``slow`` divided by that of ``fast``: above 1, ``fast`` is faster."""
    by_goal = times(race, goal)
    return by_goal[slow] / by_goal[fast]


def _usual_error(race: Race) -> float:
    """Standard error of a ratio of cold times of two typical racers.

    There are few cold rounds, so the error of a single pair may be small by chance, and
    three standard errors are not as sure as they are after many rounds: they are
    widened as Student's t is (the first terms of its Cornish-Fisher expansion).
    """
    errors = (race.relative_error(racer, "cold") for racer in race.times_us)
    freedom = max(min(map(len, race.cold_us.values())) - 1, 1)
    wider = 1 + 2.5 / freedom + 5.75 / freedom**2
    return wider * math.sqrt(2) * statistics.median(errors)


def _protocol_of(race: Race, goal: str) -> str:
    has_cold = bool(race.times_us) and all(map(race.cold_us.get, race.times_us))
    return deciding(goal, has_cold=has_cold)
