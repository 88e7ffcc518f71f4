"""A race: measuring candidates against each other, in turns.

Candidates run alternately, so that a drifting clock rate or another busy program meets
every candidate equally often. But it does not slow every candidate equally: while
another program takes a part of one core, configs that cut the work into more pieces are
the fastest; on an idle machine they are the slowest. Such states last for seconds. So
that races held at different times agree, only quiet rounds count: rounds in which all
candidates together were about as fast as in the fastest rounds. Because all candidates
decide which rounds are quiet, no candidate gains by its own luck.

One candidate alone is measured in ``slices``; ``tuning.select`` names the winner of a
race. Callers: ``tuning.lab.local``, demo and benchmarks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tracea_jax.tuning.measure.bench import Flush, Run
from tracea_jax.tuning.measure.slices import (
    Timing,
    affords_another,
    calibrate,
    slice_us,
)

PROTOCOLS = ("steady", "cold")
QUIET = 0.05  # quiet rounds are at most this much slower than the quietest ones
_SURE = 3  # standard errors that count as more than noise
_TELLING = 2  # paired ratios, of which at least noise can be told
_QUIETEST = 8  # the fastest 1/8 of the rounds are the quietest; the first may be luck
Racer = TypeVar("Racer", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Times of several candidates taken in turns; all statistics are of quiet rounds.

    Attributes:
      times_us: for each candidate its steady time in every round.
      repeats: executions of each candidate in one round.
      failures: exceptions of the candidates that failed; those have no times.
      cold_us: for each candidate its time from flushed caches in every cold round;
        empty if cold times were not measured.
      cold_after: for each cold round the steady round before it, which tells whether
        the cold round was quiet; if empty, all cold rounds count.
    """

    times_us: dict[Any, tuple[float, ...]]
    repeats: dict[Any, int]
    failures: dict[Any, Exception]
    cold_us: dict[Any, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    cold_after: tuple[int, ...] = ()

    @property
    def rounds(self) -> int:
        return min((len(t) for t in self.times_us.values()), default=0)

    def quiet_us(self, racer: Hashable, protocol: str = "steady") -> list[float]:
        """Times of one candidate in the quiet rounds."""
        return self._quiet(protocol)[racer]

    def median_us(self, racer: Hashable, protocol: str = "steady") -> float:
        return statistics.median(self.quiet_us(racer, protocol))

    def ratio(self, slow: Hashable, fast: Hashable, protocol: str = "steady") -> float:
        """Median over quiet rounds of slow's time by fast's: above 1, fast is faster.

        Each two successive rounds are averaged: their orders differ, so an advantage
        that a drifting clock rate gives a candidate in one round is a disadvantage in
        the other.
        """
        return statistics.median(self._ratios(slow, fast, protocol))

    def error(self, slow: Hashable, fast: Hashable, protocol: str = "steady") -> float:
        """Standard error of ``ratio``, as a fraction of it.

        Where too few rounds were quiet to tell, it is that of all rounds.
        """
        quiet = self._ratios(slow, fast, protocol)
        if len(quiet) >= _TELLING:
            return _standard_error(quiet)
        times = self._times(protocol)
        return _standard_error(_paired(times[slow], times[fast]))

    def interval(self, slow: Hashable, fast: Hashable) -> tuple[float, float]:
        """Between which values slow's time by fast's was in the middle half of rounds.

        All rounds count: whichever rounds a rule picks may be those in which one of
        the candidates had luck. The quartiles of few rounds are uncertain, so there
        the interval is that of the median's rank and ``_SURE`` standard errors of it:
        all values of up to ten rounds, and the quartiles from 37 rounds on.
        """
        ratios = _paired(self.times_us[slow], self.times_us[fast])
        half = min(max(0.25, 0.5 * _SURE / math.sqrt(len(ratios))), 0.5)
        low, high = np.quantile(ratios, (0.5 - half, 0.5 + half))
        return float(low), float(high)

    def relative(self, racer: Hashable, protocol: str = "steady") -> float:
        """Median over quiet rounds of a candidate's time by the mean of all times.

        The mean is the geometric mean of all candidates' times in the round.
        """
        return statistics.median(self._relatives(racer, protocol))

    def level_us(self, racer: Hashable, protocol: str = "steady") -> float:
        """``relative`` in microseconds: such times rank as ``relative`` does.

        Medians may rank otherwise, as each is of another round.
        """
        means = _means(self._quiet(protocol))
        return self.relative(racer, protocol) * statistics.median(means)

    def without(self, racer: Hashable) -> Race:
        """The race as if one candidate had not taken part."""
        left = {r: us for r, us in self.times_us.items() if r != racer}
        cold = {r: us for r, us in self.cold_us.items() if r != racer}
        return dataclasses.replace(self, times_us=left, cold_us=cold)

    def relative_error(self, racer: Hashable, protocol: str = "steady") -> float:
        """Standard error of ``relative``, as a fraction of it; see ``error``."""
        quiet = self._relatives(racer, protocol)
        if len(quiet) >= _TELLING:
            return _standard_error(quiet)
        return _standard_error(_by_mean(self._times(protocol), racer))

    def _ratios(self, slow: Hashable, fast: Hashable, protocol: str) -> list[float]:
        return _paired(self.quiet_us(slow, protocol), self.quiet_us(fast, protocol))

    def _relatives(self, racer: Hashable, protocol: str) -> list[float]:
        return _by_mean(self._quiet(protocol), racer)

    def _quiet(self, protocol: str) -> dict[Any, list[float]]:
        times, after = self._times(protocol), self.cold_after
        quiet: Sequence[int] = quiet_rounds(self.times_us)
        if protocol == "cold":
            every = range(min(map(len, times.values()), default=0))
            quiet = [i for i in every if i < len(after) and after[i] in quiet] or every
        return {racer: [us[i] for i in quiet] for racer, us in times.items()}

    def _times(self, protocol: str) -> dict[Any, tuple[float, ...]]:
        if protocol not in PROTOCOLS:
            raise ValueError(f"{protocol=} must be one of {', '.join(PROTOCOLS)}")
        return self.times_us if protocol == "steady" else self.cold_us


def quiet_rounds(times_us: Mapping[Any, Sequence[float]]) -> list[int]:
    """The rounds in which the machine was about as fast as in the fastest rounds.

    The slowness of a round is the median, over the candidates, of the candidate's time
    in that round divided by its median time.
    """
    if not times_us or not min(map(len, times_us.values())):
        return []
    times = np.array(list(times_us.values()))
    slowness = np.median(times / np.median(times, axis=1, keepdims=True), axis=0)
    quietest = np.sort(slowness)[slowness.size // _QUIETEST]
    return np.flatnonzero(slowness <= (1 + QUIET) * quietest).tolist()


def _paired(slow_us: Sequence[float], fast_us: Sequence[float]) -> list[float]:
    """Ratio of each round, averaged (geometric mean) with that of the next round."""
    ratios = [slow / fast for slow, fast in zip(slow_us, fast_us, strict=True)]
    return [math.sqrt(a * b) for a, b in itertools.pairwise(ratios)] or ratios


def _by_mean(times_us: Mapping[Any, Sequence[float]], racer: Hashable) -> list[float]:
    """Paired ratios of a candidate's time by the geometric mean of all times."""
    return _paired(times_us[racer], _means(times_us))


def _means(times_us: Mapping[Any, Sequence[float]]) -> list[float]:
    """The geometric mean of all candidates' times, of each round."""
    return np.exp(np.log(list(times_us.values())).mean(axis=0)).tolist()


def _standard_error(ratios: Sequence[float]) -> float:
    """Standard error of the median of paired ratios, as a fraction of the median.

    For normal noise the standard error of a median is 1.253 sigma / sqrt(n), and sigma
    is 1.253 times the mean deviation. Each round is in two pairs, so only half of the
    pairs are independent. A single pair tells nothing of the noise: infinity.
    """
    if len(ratios) < _TELLING:
        return math.inf
    middle = statistics.median(ratios)
    deviation = statistics.fmean(abs(r - middle) for r in ratios) / middle
    return 1.253 * 1.253 * deviation * math.sqrt(2 / len(ratios))


def race(
    runs: Mapping[Racer, Run],
    timing: Timing,
    *,
    known_us: Mapping[Racer, float] | None = None,
    limit_s: float = math.inf,
    on_round: Callable[[int, int], None] = lambda done, total: None,
    flush: Flush | None = None,
    on_turn: Callable[[Any], None] = lambda racer: None,
    is_even: bool = False,
) -> Race:
    """Measures candidates against each other, one slice of each in every round.

    A candidate that raises drops out; the others go on.

    Args:
      runs: the candidates by any name.
      timing: the protocol.
      known_us: times of some candidates on an undisturbed machine; the race goes on
        until the machine is that fast again, for ``patience_s`` at most.
      limit_s: time allowed beside the protocol's own limits.
      on_round: called after each round with the rounds done and wanted.
      flush: empties the caches; if given, cold rounds follow quiet steady rounds.
      on_turn: called with each candidate right before it runs.
      is_even: whether each candidate has the same number of executions in a slice. A
        disturbance weighs more in a short slice, so that equal candidates may differ.
    """
    start = timing.now_s()
    turns = _Turns(runs, timing, on_turn)
    repeats = turns.each(list(runs), lambda run, _: calibrate(run, timing)[0])
    if is_even:
        repeats = dict.fromkeys(repeats, max(repeats.values(), default=1))
    limit_s = min(limit_s, timing.race_limit_s)
    times: dict[Racer, list[float]] = {racer: [] for racer in repeats}
    cold = _ColdRounds(turns, list(times), flush)
    first = timing.now_s()
    for done in itertools.count():
        now = timing.now_s()
        steady_s = now - first - cold.spent_s
        after_next = now - start + (now - first) / max(done, 1)
        enough = done >= timing.max_rounds
        enough = enough or steady_s * (done + 1) / max(done, 1) > timing.race_s
        is_patient = after_next <= timing.patience_s
        if done >= timing.rounds and enough:
            if not (is_patient and _is_disturbed(times, known_us or {}, timing)):
                break
        if done >= timing.min_rounds and after_next > limit_s:
            break
        turns.round(times, done, lambda run, r: slice_us(run, repeats[r], timing))
        cold.follow(done, quiet_rounds(times), min(steady_s, timing.race_s))
        on_round(done + 1, timing.rounds)
    return Race(
        times_us={r: tuple(times[r]) for r in times if r not in turns.failures},
        repeats={r: repeats[r] for r in times if r not in turns.failures},
        failures=turns.failures,
        cold_us=cold.times_us,
        cold_after=tuple(cold.after),
    )


def _is_disturbed(
    times: Mapping[Racer, Sequence[float]],
    known_us: Mapping[Racer, float],
    timing: Timing,
) -> bool:
    """Returns whether too few rounds were as quiet as the machine is known to be.

    There are enough quiet rounds when the standard errors of most candidates' times are
    at most ``timing.precision``.
    """
    quiet = quiet_rounds(times)
    slowness = [
        statistics.median(times[racer][i] for i in quiet) / known
        for racer, known in known_us.items()
        if times.get(racer)
    ]
    if not slowness:
        return False
    if len(quiet) < timing.quiet_rounds or statistics.median(slowness) > 1 + QUIET:
        return True
    logs = np.log(np.array(list(times.values()))[:, quiet])
    deviations = logs - logs.mean(axis=0)
    deviations -= np.median(deviations, axis=1, keepdims=True)
    errors = 1.253 * 1.253 * np.abs(deviations).mean(axis=1) / math.sqrt(len(quiet))
    return float(np.median(errors)) > timing.precision


class _ColdRounds:
    """Cold rounds: one cold execution of each candidate, right after a steady round.

    The steady round tells how quiet the machine is.

    Attributes:
      after: for each cold round the steady round before it.
      spent_s: time that all cold rounds took together.
    """

    def __init__(self, turns: _Turns, racers: list[Any], flush: Flush | None) -> None:
        self.after: list[int] = []
        self.spent_s = 0.0
        self._turns, self._flush = turns, flush
        self._times: dict[Any, list[float]] = {racer: [] for racer in racers}

    @property
    def times_us(self) -> dict[Any, tuple[float, ...]]:
        failures = self._turns.failures
        finished = {r: tuple(t) for r, t in self._times.items() if r not in failures}
        return finished if self._flush is not None else {}

    def follow(self, done: int, quiet: list[int], limit_s: float) -> None:
        """Runs a cold round if the steady round ``done`` was quiet and time is left.

        A cold round whose steady round no longer counts as quiet does not count. At
        least one cold round runs, however long it takes.
        """
        timing, flush = self._turns.timing, self._flush
        if flush is None or done not in quiet:
            return
        count = len(set(quiet).intersection(self.after))
        spent_s = self.spent_s * count / max(len(self.after), 1)
        timing = dataclasses.replace(timing, cold_runs=timing.cold_rounds)
        if not affords_another(count, timing, spent_s, limit_s):
            return

        def cold(run: Run, _: Any) -> float:
            flush()
            return slice_us(run, 1, timing)

        start = timing.now_s()
        self._turns.round(self._times, len(self.after), cold)
        self.after.append(done)
        self.spent_s += timing.now_s() - start


class _Turns:
    """Lets racers run in turns; a racer that raises drops out."""

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
        """The result of ``work`` for each racer that does not fail."""
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
        """Appends each racer's time of one turn; drops all times of failed racers."""
        left = [racer for racer in times if racer not in self.failures]
        taken = self.each(_order(left, done), work)
        for racer, time_us in taken.items():
            times[racer].append(time_us)
        for racer in [r for r in times if r in self.failures]:
            del times[racer]


def _order(racers: list[Racer], done: int) -> list[Racer]:
    """An order of the racers in which each runs after another one than in other rounds.

    A predecessor may leave full caches or a hot device, so it must change.
    """
    start = done // 2 % max(len(racers), 1)
    turned = racers[start:] + racers[:start]
    return turned[::-1] if done % 2 else turned
