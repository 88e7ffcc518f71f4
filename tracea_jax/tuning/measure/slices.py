"""Measuring one candidate, by two protocols.

steady   slices: enough executions in a row to be timed well; caches keep their contents
cold     one execution after the caches were flushed; the median of several

Several candidates are compared in ``race``, which uses slices and ``Timing``. Callers:
``race`` and, through ``measure``, tuning/lab, tuning/session, demo and benchmarks.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

from tracea_jax.tuning.measure.bench import Flush, Run, batch_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The measuring protocol.

    Attributes:
      slice_s: least duration of a slice.
      slices: slices of one candidate measured alone; fewer if they exceed candidate_s.
      candidate_s: time that the slices of one candidate may take together.
      abandon: a candidate slower than this multiple of the best gets one slice only.
      max_repeats: executions in one slice at most.
      settle, settle_s: warming up ends when two successive slices differ by less than
        the fraction ``settle``, or after ``settle_s``.
      rounds, max_rounds: a race has ``rounds`` rounds, and up to ``max_rounds`` while
        they take less than race_s together.
      race_s: time of the steady rounds, see above.
      race_limit_s: time after which a race of slow candidates ends.
      min_rounds: rounds that even such a race has.
      quiet_rounds, precision: on a machine that other programs use, a race goes on
        until it has had this many quiet rounds and its standard errors, as fractions,
        are at most ``precision`` ...
      patience_s: ... or until it has lasted this long.
      cold_runs: cold executions of one candidate measured alone; fewer if they and the
        flushing exceed cold_s.
      cold_s: time for those executions and the flushing.
      cold_rounds: cold rounds of a race; fewer if they exceed race_s.
      kernel_rounds: executions of each candidate whose kernels are timed for the
        verdict.
      clock: monotonic time in nanoseconds; wall-clock time may jump.
    """

    slice_s: float = 0.02
    slices: int = 5
    candidate_s: float = 1.0
    abandon: float = 2.0
    max_repeats: int = 1 << 20
    settle: float = 0.005
    settle_s: float = 0.5
    rounds: int = 11
    max_rounds: int = 25
    race_s: float = 3.0
    race_limit_s: float = 30.0
    min_rounds: int = 3
    quiet_rounds: int = 44
    precision: float = 0.004
    patience_s: float = 30.0
    cold_runs: int = 11
    cold_s: float = 0.25
    cold_rounds: int = 31
    kernel_rounds: int = 15
    clock: Callable[[], int] = time.perf_counter_ns

    def now_s(self) -> float:
        return self.clock() * 1e-9

    @property
    def final(self) -> Timing:
        """The protocol of a race: short slices, so a disturbance spoils few rounds."""
        return dataclasses.replace(
            self, slice_s=self.slice_s / 4, max_rounds=4 * self.max_rounds
        )

    @property
    def heat(self) -> Timing:
        """The protocol of a heat: a short race of many; the best of them race again."""
        return dataclasses.replace(
            self.final,
            max_rounds=self.rounds,
            quiet_rounds=2 * self.rounds,
            precision=math.inf,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Times of one candidate measured alone.

    Attributes:
      time_us: median over the slices of the time of one execution.
      spread: median absolute deviation of the slices, as a fraction of ``time_us``.
      repeats: executions that were timed.
      abandoned: whether measuring ended after one slice, which was far from the best.
      cold_us: median time of one execution from flushed caches; None if not measured.
      prepare_s: seconds for compiling the candidate and making its inputs.
    """

    time_us: float
    spread: float
    repeats: int
    abandoned: bool = False
    cold_us: float | None = None
    prepare_s: float = 0.0


def time_us(
    run: Run,
    timing: Timing,
    *,
    incumbent_us: float | None = None,
    flush: Flush | None = None,
) -> Sample:
    """Measures one candidate: warm-up, the median of several slices, then cold ones.

    Args:
      run: the candidate.
      timing: the protocol.
      incumbent_us: time of the best so far; a much slower candidate is abandoned and
        gets no cold time.
      flush: empties the caches; without it there is no cold time.
    """
    repeats, first = calibrate(run, timing)
    if incumbent_us is not None and first > timing.abandon * incumbent_us:
        return Sample(time_us=first, spread=0.0, repeats=repeats, abandoned=True)
    affordable = int(timing.candidate_s * 1e6 / (first * repeats))
    more = min(timing.slices, affordable) - 1
    times = [first, *(slice_us(run, repeats, timing) for _ in range(more))]
    return Sample(
        time_us=statistics.median(times),
        spread=relative_deviation(times),
        repeats=repeats * len(times),
        cold_us=None if flush is None else cold_us(run, flush, timing),
    )


def cold_us(run: Run, flush: Flush, timing: Timing) -> float:
    """Median time of one execution that finds none of its data in the caches."""
    start = timing.now_s()
    times: list[float] = []
    while affords_another(len(times), timing, timing.now_s() - start, timing.cold_s):
        flush()
        times.append(slice_us(run, 1, timing))
    return statistics.median(times)


def affords_another(
    done: int, timing: Timing, elapsed_s: float, limit_s: float
) -> bool:
    """True if a further cold execution is due: the first always, others in time."""
    if done == 0:
        return True
    return done < timing.cold_runs and elapsed_s * (done + 1) / done <= limit_s


def slice_us(run: Run, repeats: int, timing: Timing) -> float:
    """Time of one execution, from one slice, which counts as 1 ns at least."""
    start = timing.clock()
    run(repeats)
    return max(timing.clock() - start, 1) / (1e3 * repeats)


def calibrate(run: Run, timing: Timing) -> tuple[int, float]:
    """The number of executions that fill a slice, and the time of one execution.

    The first executions warm up and are not timed.
    """
    batch = batch_of(run)
    run(batch)
    repeats = batch
    while True:
        each = slice_us(run, repeats, timing)
        filled = each * repeats / (timing.slice_s * 1e6)
        if filled >= 0.75 or repeats >= timing.max_repeats:
            return repeats, each
        # A short slice is mostly overhead, so its time is not trusted for long steps.
        growth = min(1.1 / max(filled, 1e-3), 32.0)
        batches = math.ceil(repeats * growth / batch)
        repeats = min(batches * batch, timing.max_repeats)


def settle(run: Run, timing: Timing) -> None:
    """Runs until the device's clock rate has settled, or for ``settle_s``."""
    end = timing.now_s() + timing.settle_s
    repeats, before = calibrate(run, timing)
    while timing.now_s() < end:
        after = slice_us(run, repeats, timing)
        if abs(after - before) <= timing.settle * before:
            return
        before = after


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Repeated times of one unchanging candidate.

    They show how the machine's speed has changed since the tuning began, apart from the
    merits of other candidates.

    Attributes:
      first_us, latest_us: first and latest time; None before the first measurement.
      least_us, most_us: the lowest and highest time.
      count: measurements so far.
    """

    first_us: float | None = None
    latest_us: float | None = None
    least_us: float = math.inf
    most_us: float = 0.0
    count: int = 0

    @property
    def factor(self) -> float:
        """Latest time divided by first time: above 1, the machine has become slower."""
        if not self.first_us or not self.latest_us:
            return 1.0
        return self.latest_us / self.first_us

    @property
    def unrest(self) -> float:
        """Highest time divided by lowest: samples of equal candidates may differ so."""
        return self.most_us / self.least_us if self.count else 1.0

    def measured(self, time_us: float) -> Reference:
        """The reference after another measurement of its candidate.

        Raises:
          ValueError: if the time is not positive and finite.
        """
        if not 0 < time_us < math.inf:
            raise ValueError(f"{time_us=} must be positive and finite")
        first = time_us if self.first_us is None else self.first_us
        return Reference(
            first_us=first,
            latest_us=time_us,
            least_us=min(time_us, self.least_us),
            most_us=max(time_us, self.most_us),
            count=self.count + 1,
        )

    def has_drifted(self, tolerance: float = 0.03) -> bool:
        """True if the latest time differs from the first by more than ``tolerance``."""
        return abs(math.log(self.factor)) > math.log1p(tolerance)


def relative_deviation(values: list[float] | tuple[float, ...]) -> float:
    """Median absolute deviation from the median, as a fraction of the median."""
    middle = statistics.median(values)
    return statistics.median(abs(v - middle) for v in values) / middle
