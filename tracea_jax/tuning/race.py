"""Measuring candidates against each other, in turns.

Times that are compared were taken alternately, so that a drifting clock rate or a busy
neighbour hits all candidates alike.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from tracea_jax.tuning.bench import Flush, Run
from tracea_jax.tuning.slices import (
    Timing,
    affords_another,
    calibrate,
    relative_deviation,
    slice_us,
)

PROTOCOLS = ("steady", "cold")
Racer = TypeVar("Racer", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Times of several candidates taken in turns.

    Attributes:
      times_us: for each candidate its time in every round.
      repeats: executions of each in one round.
      failures: what those raised that did not finish; they have no times.
      cold_us: for each candidate its time from flushed caches in every round of such;
        empty if they were not measured.
    """

    times_us: dict[Any, tuple[float, ...]]
    repeats: dict[Any, int]
    failures: dict[Any, Exception]
    cold_us: dict[Any, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return min((len(t) for t in self.times_us.values()), default=0)

    def median_us(self, racer: Hashable, protocol: str = "steady") -> float:
        return statistics.median(self._times(protocol)[racer])

    def ratio(self, slow: Hashable, fast: Hashable, protocol: str = "steady") -> float:
        """Median over the rounds of slow's time by fast's: above 1, fast is faster.

        Successive rounds are taken together: their orders differ, so what a drifting
        clock rate gives to one candidate in the first, it takes in the second.
        """
        return statistics.median(self._ratios(slow, fast, protocol))

    def deviation(
        self, slow: Hashable, fast: Hashable, protocol: str = "steady"
    ) -> float:
        """Median absolute deviation of that ratio, as a fraction of it."""
        return relative_deviation(self._ratios(slow, fast, protocol))

    def _ratios(self, slow: Hashable, fast: Hashable, protocol: str) -> list[float]:
        times = self._times(protocol)
        pairs = zip(times[slow], times[fast], strict=True)
        ratios = [s / f for s, f in pairs]
        return [math.sqrt(a * b) for a, b in itertools.pairwise(ratios)] or ratios

    def _times(self, protocol: str) -> dict[Any, tuple[float, ...]]:
        if protocol not in PROTOCOLS:
            raise ValueError(f"{protocol=} must be one of {', '.join(PROTOCOLS)}")
        return self.times_us if protocol == "steady" else self.cold_us


def race(
    runs: Mapping[Racer, Run],
    timing: Timing,
    *,
    limit_s: float = math.inf,
    on_round: Callable[[int, int], None] = lambda done, total: None,
    flush: Flush | None = None,
    on_turn: Callable[[Any], None] = lambda racer: None,
) -> Race:
    """Measures candidates against each other, one slice of each in every round.

    Args:
      runs: the candidates by any name.
      timing: the protocol.
      limit_s: time allowed beside the protocol's own limits.
      on_round: called after each round with the rounds done and wanted.
      flush: empties the caches; with it, rounds of cold executions follow.
      on_turn: called with each candidate right before it runs.

    A candidate that raises drops out; the others go on.
    """
    start = timing.now_s()
    turns = _Turns(runs, timing, on_turn)
    repeats = turns.each(list(runs), lambda run, _: calibrate(run, timing)[0])
    limit_s = min(limit_s, timing.race_limit_s)
    times: dict[Racer, list[float]] = {racer: [] for racer in repeats}
    first = timing.now_s()
    for done in range(timing.max_rounds):
        now = timing.now_s()
        after_next = now - start + (now - first) / max(done, 1)
        if done >= timing.rounds and after_next > timing.race_s:
            break
        if done >= timing.min_rounds and after_next > limit_s:
            break
        turns.round(times, done, lambda run, r: slice_us(run, repeats[r], timing))
        on_round(done + 1, timing.rounds)
    cold: dict[Racer, list[float]] = {}
    if flush is not None:
        left_s = min(timing.race_s, limit_s - (timing.now_s() - start))
        cold = _race_cold(turns, list(times), flush, left_s)
    return Race(
        times_us={r: tuple(times[r]) for r in times if r not in turns.failures},
        repeats={r: repeats[r] for r in times if r not in turns.failures},
        failures=turns.failures,
        cold_us={racer: tuple(t) for racer, t in cold.items()},
    )


def _race_cold(
    turns: _Turns, racers: list[Any], flush: Flush, limit_s: float
) -> dict[Any, list[float]]:
    """Rounds of one cold execution each."""
    timing = turns.timing

    def cold(run: Run, _: Any) -> float:
        flush()
        return slice_us(run, 1, timing)

    start = timing.now_s()
    times: dict[Any, list[float]] = {racer: [] for racer in racers}
    for done in range(timing.cold_runs):
        if not affords_another(done, timing, timing.now_s() - start, limit_s):
            break
        turns.round(times, done, cold)
    return times


class _Turns:
    """Lets racers run in turns; who raises drops out."""

    def __init__(
        self,
        runs: Mapping[Any, Run],
        timing: Timing,
        on_turn: Callable[[Any], None],
    ) -> None:
        self.timing = timing
        self.failures: dict[Any, Exception] = {}
        self._runs = runs
        self._on_turn = on_turn

    def each(
        self, racers: list[Any], work: Callable[[Run, Any], Any]
    ) -> dict[Any, Any]:
        """What the work gives for each racer that does not fail."""
        results = {}
        for racer in racers:
            self._on_turn(racer)
            try:
                results[racer] = work(self._runs[racer], racer)
            except Exception as e:
                self.failures[racer] = e
        return results

    def round(
        self,
        times: dict[Any, list[float]],
        done: int,
        work: Callable[[Run, Any], float],
    ) -> None:
        """Appends the time of one turn of everyone; failures lose all their times."""
        taken = self.each(_order(list(times), done), work)
        for racer, time_us in taken.items():
            times[racer].append(time_us)
        for racer in [r for r in times if r in self.failures]:
            del times[racer]


def _order(racers: list[Racer], done: int) -> list[Racer]:
    """Everyone's predecessor changes between rounds: it may leave caches or heat."""
    start = done // 2 % max(len(racers), 1)
    turned = racers[start:] + racers[:start]
    return turned[::-1] if done % 2 else turned
