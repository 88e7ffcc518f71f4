"""Measuring: what a candidate must offer, slices, and the interleaved race.

A slice is enough executions in a row to be timed well. Everything that compares
candidates compares slices that were taken alternately, so that a drifting clock rate or
a busy neighbour hits all of them alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.tuning import files

Run = Callable[[int], None]  # executes so many times in a row and blocks until done
Racer = TypeVar("Racer", bound=Hashable)


class CandidateError(Exception):
    """A candidate failed in a way that its bench can name.

    Attributes:
      kind: one of ``records.FAILURES``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How a candidate's results compare with a float64 reference.

    Attributes:
      max_rel_error, tolerance: largest error, and what is allowed; NaN if a result is.
      ok: whether every result was within the tolerance.
      repeatable: whether two runs gave the same bits.
      message: what was wrong, or which inputs were used.
    """

    max_rel_error: float
    tolerance: float
    ok: bool
    repeatable: bool = True
    message: str = ""

    @property
    def failure(self) -> str | None:
        """Why the candidate may not be used: "nan" or "wrong_result"; else None."""
        if math.isnan(self.max_rel_error):
            return "nan"
        return None if self.ok and self.repeatable else "wrong_result"


class Bench(Protocol):
    """What an op provides so that its candidates can be tuned."""

    def prepare(self, choice: Choice) -> Run:
        """Compiles a candidate for random inputs; the result executes it.

        Raises:
          CandidateError: naming the kind of failure.
          Exception: any other one counts as "compile_error".
        """
        ...

    def verify(self, choice: Choice) -> Verification:
        """Runs it on fresh random inputs, and a tail shape, into poisoned outputs."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The measuring protocol.

    Attributes:
      slice_s: least duration of a slice.
      slices: slices of one candidate in the sweep; fewer if they exceed candidate_s.
      candidate_s: time that the slices of one candidate may take together.
      abandon: a candidate slower than this multiple of the best gets one slice only.
      max_repeats: executions in one slice at most.
      settle, settle_s: warming up ends when two successive slices differ by less than
        this fraction, or after this time.
      rounds, max_rounds: rounds of a race; the latter while it lasts less than race_s.
      race_s: see above.
      race_limit_s: a race of slow candidates ends here, after ``min_rounds`` at least.
      min_rounds: see above.
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
    clock: Callable[[], int] = time.perf_counter_ns

    def now_s(self) -> float:
        return self.clock() * 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Times of one candidate measured alone.

    Attributes:
      time_us: median over the slices of the time of one execution.
      spread: median distance from that median, as a fraction of it.
      repeats: executions that were timed.
      abandoned: whether one slice showed that it is far from the best.
    """

    time_us: float
    spread: float
    repeats: int
    abandoned: bool = False


def time_us(run: Run, timing: Timing, *, incumbent_us: float | None = None) -> Sample:
    """Measures one candidate: warm-up, then the median of several slices.

    Args:
      run: the candidate.
      timing: the protocol.
      incumbent_us: time of the best so far, for abandoning early.
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
    )


def slice_us(run: Run, repeats: int, timing: Timing) -> float:
    """Time of one execution, from one slice; at least a nanosecond for all of them."""
    start = timing.clock()
    run(repeats)
    return max(timing.clock() - start, 1) / (1e3 * repeats)


def calibrate(run: Run, timing: Timing) -> tuple[int, float]:
    """Executions that fill a slice, and the time of one; the first is not timed."""
    run(1)
    repeats = 1
    while True:
        each = slice_us(run, repeats, timing)
        filled = each * repeats / (timing.slice_s * 1e6)
        if filled >= 0.75 or repeats >= timing.max_repeats:
            return repeats, each
        # A short slice is mostly overhead, so its time is not trusted for long steps.
        growth = min(1.1 / max(filled, 1e-3), 32.0)
        repeats = min(math.ceil(repeats * growth), timing.max_repeats)


def settle(run: Run, timing: Timing) -> None:
    """Runs until the device's clock rate has settled, or for ``settle_s``."""
    end = timing.now_s() + timing.settle_s
    repeats, before = calibrate(run, timing)
    while timing.now_s() < end:
        after = slice_us(run, repeats, timing)
        if abs(after - before) <= timing.settle * before:
            return
        before = after


def relative_deviation(values: list[float] | tuple[float, ...]) -> float:
    """Median absolute deviation from the median, as a fraction of the median."""
    middle = statistics.median(values)
    return statistics.median(abs(v - middle) for v in values) / middle


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Times of several candidates taken in turns.

    Attributes:
      times_us: for each candidate its time in every round.
      repeats: executions of each in one round.
      failures: what those raised that did not finish; they have no times.
    """

    times_us: dict[Any, tuple[float, ...]]
    repeats: dict[Any, int]
    failures: dict[Any, Exception]

    @property
    def rounds(self) -> int:
        return min((len(t) for t in self.times_us.values()), default=0)

    def median_us(self, racer: Hashable) -> float:
        return statistics.median(self.times_us[racer])

    def ratio(self, slow: Hashable, fast: Hashable) -> float:
        """Median over the rounds of slow's time by fast's: above 1, fast is faster.

        Successive rounds are taken together: their orders differ, so what a drifting
        clock rate gives to one candidate in the first, it takes in the second.
        """
        return statistics.median(self._ratios(slow, fast))

    def deviation(self, slow: Hashable, fast: Hashable) -> float:
        """Median absolute deviation of that ratio, as a fraction of it."""
        return relative_deviation(self._ratios(slow, fast))

    def _ratios(self, slow: Hashable, fast: Hashable) -> list[float]:
        pairs = zip(self.times_us[slow], self.times_us[fast], strict=True)
        ratios = [s / f for s, f in pairs]
        return [math.sqrt(a * b) for a, b in itertools.pairwise(ratios)] or ratios


def race(
    runs: Mapping[Racer, Run],
    timing: Timing,
    *,
    limit_s: float = math.inf,
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> Race:
    """Measures candidates against each other, one slice of each in every round.

    Args:
      runs: the candidates by any name.
      timing: the protocol.
      limit_s: time allowed beside the protocol's own limits.
      on_round: called after each round with the rounds done and wanted.

    A candidate that raises drops out; the others go on.
    """
    start = timing.now_s()
    limit_s = min(limit_s, timing.race_limit_s)
    repeats: dict[Racer, int] = {}
    failures: dict[Racer, Exception] = {}
    for racer, run in runs.items():
        with _dropping_out(racer, failures):
            repeats[racer], _ = calibrate(run, timing)
    times: dict[Racer, list[float]] = {racer: [] for racer in repeats}
    first = timing.now_s()
    for done in range(timing.max_rounds):
        now = timing.now_s()
        after_next = now - start + (now - first) / max(done, 1)
        if done >= timing.rounds and after_next > timing.race_s:
            break
        if done >= timing.min_rounds and after_next > limit_s:
            break
        for racer in _order(list(times), done):
            with _dropping_out(racer, failures):
                times[racer].append(slice_us(runs[racer], repeats[racer], timing))
        times = {r: t for r, t in times.items() if r not in failures}
        on_round(done + 1, timing.rounds)
    return Race(
        times_us={racer: tuple(t) for racer, t in times.items()},
        repeats={racer: repeats[racer] for racer in times},
        failures=failures,
    )


@contextlib.contextmanager
def _dropping_out(racer: Racer, failures: dict[Racer, Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        failures[racer] = e


def _order(racers: list[Racer], done: int) -> list[Racer]:
    """Everyone's predecessor changes between rounds: it may leave caches or heat."""
    start = done // 2 % max(len(racers), 1)
    turned = racers[start:] + racers[:start]
    return turned[::-1] if done % 2 else turned


@contextlib.contextmanager
def exclusive(
    directory: pathlib.Path | None,
    device: Device,
    on_wait: Callable[[], None] | None = None,
) -> Iterator[bool]:
    """Keeps other tuning processes of this cache from measuring on the device.

    Two devices of the same name share the lock. Without a directory that can be
    written, processes are not kept apart.

    Args:
      directory: the cache directory.
      device: the device about to be measured.
      on_wait: called once if another process is measuring.
    """
    name = hashlib.sha256(device.name.encode()).hexdigest()[:12]
    with contextlib.ExitStack() as stack:
        held = False
        if directory is not None:
            with contextlib.suppress(OSError):
                files.make_private_directory(directory)
                path = directory / f"measure-{name}.lock"
                held = stack.enter_context(files.locked(path, on_wait))
        yield held
