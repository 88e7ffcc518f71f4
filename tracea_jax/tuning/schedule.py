"""Which problem of a graph is searched next, and when to stop.

    priority = count x time x headroom x expected gain

Every problem gets one batch before any gets a second. A search that is over is verified
and raced at once, so that how long this takes is known for the others; a time budget
keeps that much back for each of them. (Ansor's task scheduler, Zheng et al. 2020, with
the expected improvement of each search in place of its past slope.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from tracea_jax.tuning.lane import Job, Lane, Outcome, Task
from tracea_jax.tuning.session import TuningError

MIN_GAIN = 0.01  # of the graph's time; less is not searched for
FINISH_S = 5.0  # to verify and race one problem, until some were
SEARCH_SHARE = 0.6  # of the time that is left, for one batch of everybody
FINISH_SHARE = 0.5  # of the budget that is kept back for that at most
RACE_SHARE = 0.5  # of the time of a hurried problem; compiling and verifying the rest
BOUNDED_S = 2.0  # for all races together once the time is over
GRACE_S = 10.0  # for them with all that surrounds them; then nothing more is raced
GRACE_SHARE = 0.1  # of the budget that this takes at most


def run(
    jobs: Sequence[Job],
    *,
    budget_s: float = math.inf,
    min_gain: float = MIN_GAIN,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Outcome, ...]:
    """Searches, verifies and races all jobs; the outcome of each.

    The searches end when together they are expected to gain less than ``min_gain`` of
    the graph's time, twice in a row. That needs more than one job: a search on its own
    knows better when it is over.

    Where time is short, races are too: of the leader and the defaults only. When it
    has ended, jobs that were searched race shortly as long as that is no tenth of the
    budget; the others are left, and what was measured of them stays in their journals.
    One job is always raced. The first Ctrl-C does the same with ten seconds, a second
    one is raised.

    Args:
      jobs: in an order that breaks ties.
      budget_s: seconds for everything.
      min_gain: see above.
      clock: seconds, monotonic.

    Raises:
      TuningError: of a job on its own; else it is that job's failure.
    """
    schedule = _Schedule(
        lanes=[Lane(job=job) for job in jobs],
        budget_s=budget_s,
        min_gain=min_gain,
        clock=clock,
        start_s=clock(),
    )
    try:
        schedule.search()
        schedule.conclude()
    except KeyboardInterrupt:
        schedule.interrupt()
    outcomes = [lane.outcome for lane in schedule.lanes]
    return tuple(outcome for outcome in outcomes if outcome is not None)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Schedule:
    lanes: list[Lane]
    budget_s: float
    min_gain: float
    clock: Callable[[], float]
    start_s: float
    stop: str = ""
    calm: int = 0  # batches in a row after which little was expected
    finishes_s: list[float] = dataclasses.field(default_factory=list)  # full ones

    @property
    def left_s(self) -> float:
        return self.budget_s - (self.clock() - self.start_s)

    @property
    def is_any_finished(self) -> bool:
        return any(lane.outcome and lane.outcome.entry for lane in self.lanes)

    @property
    def searching(self) -> list[Lane]:
        return [lane for lane in self.lanes if not lane.is_over]

    @property
    def unfinished(self) -> list[Lane]:
        """The most important first."""
        open_ = [lane for lane in self.lanes if lane.outcome is None]
        return sorted(open_, key=lambda lane: -lane.share_us)

    def search(self) -> None:
        """Batches until every search is over, or the graph's."""
        while lanes := self.searching:
            fresh = [lane for lane in lanes if not lane.batches]
            if not fresh and self._is_converged():
                self.stop = "converged"
                return
            lane = max(fresh or lanes, key=_importance if fresh else _priority)
            if not self._affords(lane):
                self.stop = "budget"
                return
            self._search(lane)
            if lane.is_over and lane.outcome is None:
                self._finish(lane, stop="")

    def conclude(self) -> None:
        """Races what is left; what was not searched only while there is time."""
        for lane in self.unfinished:
            if self.left_s > 0 or not self.is_any_finished:
                self._finish(lane, stop=self.stop)
        self._close(self.stop, min(GRACE_S, GRACE_SHARE * self.budget_s))

    def interrupt(self) -> None:
        self._close("interrupted", GRACE_S)

    def _close(self, stop: str, grace_s: float) -> None:
        """Short races for what was measured; the rest is left."""
        end_s = self.clock() + grace_s
        known = [lane for lane in self.unfinished if lane.job.task.evals]
        if not known and not self.is_any_finished:
            known = self.unfinished[:1]
        for lane in known:
            if self.clock() < end_s or not self.is_any_finished:
                self._race(lane, stop, BOUNDED_S / len(known))
        for lane in self.unfinished:
            lane.outcome = Outcome(entry=None, stop=stop, seconds=lane.seconds)

    def _search(self, lane: Lane) -> None:
        before_s = lane.seconds
        with self._working(lane):
            fair_s = SEARCH_SHARE * self.left_s / len(self.searching)
            lane.is_over = not lane.job.task.step(limit_s=fair_s)
        lane.batches += 1
        lane.batches_s += lane.seconds - before_s

    def _finish(self, lane: Lane, *, stop: str) -> None:
        """A full race if there is time for one of everybody, else a short one."""
        fair_s = self.left_s / len(self.unfinished)
        if fair_s < self._finish_s:
            self._race(lane, stop, RACE_SHARE * max(fair_s, 0.0))
            return
        before_s = lane.seconds
        self._race(lane, stop, None)
        self.finishes_s.append(lane.seconds - before_s)

    def _race(self, lane: Lane, stop: str, bounded_s: float | None) -> None:
        lane.is_over = True
        if stop:
            lane.job.task.stop = stop
        entry = None
        with self._working(lane):
            entry = lane.job.task.finish(bounded_s=bounded_s)
        if lane.outcome is None:
            lane.outcome = Outcome(entry=entry, stop=stop, seconds=lane.seconds)

    def _is_converged(self) -> bool:
        if len(self.lanes) == 1:
            return False
        gain_us = math.fsum(lane.gain_us for lane in self.lanes)
        total_us = math.fsum(lane.share_us for lane in self.lanes)
        self.calm = self.calm + 1 if gain_us < self.min_gain * total_us else 0
        return self.calm >= 2

    def _affords(self, lane: Lane) -> bool:
        """Whether there is time for a batch and for all the races that follow."""
        if self.budget_s == math.inf:
            return True
        seen = [lane] if lane.batches else [o for o in self.lanes if o.batches]
        batches = sum(other.batches for other in seen)
        batch_s = math.fsum(o.batches_s for o in seen) / max(batches, 1)
        each_s = min(self._finish_s, FINISH_SHARE * self.budget_s / len(self.lanes))
        return self.left_s - len(self.unfinished) * each_s > batch_s

    @property
    def _finish_s(self) -> float:
        """What it takes to verify and race a problem in full."""
        return statistics.fmean(self.finishes_s) if self.finishes_s else FINISH_S

    @contextlib.contextmanager
    def _working(self, lane: Lane) -> Iterator[None]:
        """Counts the time, and ends a job of several that can do nothing more."""
        start_s = self.clock()
        failure = ""
        try:
            yield
        except TuningError as e:
            if len(self.lanes) == 1:
                raise
            failure = str(e)
        finally:
            lane.seconds += self.clock() - start_s
        if failure:
            lane.is_over = True
            lane.outcome = Outcome(entry=None, failure=failure, seconds=lane.seconds)


def _importance(lane: Lane) -> float:
    return lane.share_us


def _priority(lane: Lane) -> float:
    return lane.priority


__all__ = ["Job", "Outcome", "Task", "run"]
