"""Which problem of a graph is searched next, and when all searches stop.

    priority = count x time x headroom x expected gain

Every problem gets one batch before any problem gets a second one. When a search is
over, its problem is verified and raced at once; the time that this takes is then kept
back from the budget for every other problem. (Ansor's task scheduler, Zheng et al.
2020, with the expected improvement of each search in place of its past slope.)

One tuning is in ``tuning.tuner``; the caller is ``campaign.run``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from tracea_jax.tuning.lane import Job, Lane, Outcome, Task
from tracea_jax.tuning.progress import TuningError

MIN_GAIN = 0.01  # part of the graph's time; searches end when they expect less
FINISH_S = 5.0  # assumed for verifying and racing one problem, until some are finished
SEARCH_SHARE = 0.6  # part of the time left that one batch of every search may take
FINISH_SHARE = 0.5  # part of the budget kept back for verifying and racing, at most
RACE_SHARE = 0.5  # part of a hurried problem's time left that its race may take
BOUNDED_S = 2.0  # of racing for all remaining problems together, once the time is over
GRACE_S = 10.0  # for those races with compiling and verifying; then all ends
INTERRUPTED_S = 2.0  # the same after Ctrl-C: whoever pressed it waits
GRACE_SHARE = 0.1  # part of the budget that this grace takes at most


def run(
    jobs: Sequence[Job],
    *,
    budget_s: float = math.inf,
    min_gain: float = MIN_GAIN,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Outcome, ...]:
    """Searches, verifies and races all jobs; returns the outcome of each.

    All searches end when together they are expected to gain less than ``min_gain`` of
    the graph's time, twice in a row. A single job is not ended so: its own search knows
    better when it is over.

    When little time is left for a job, only its leader and its defaults race. When the
    budget is used up, the jobs that were searched still race shortly, for ten seconds
    or a tenth of the budget, whichever is less. The remaining jobs end without a race;
    their measurements stay in their journals. At least one job always races. The first
    Ctrl-C ends the searches in the same way with ten seconds for races; a second Ctrl-C
    is raised.

    Args:
      jobs: in an order that breaks ties.
      budget_s: seconds for everything.
      min_gain: part of the graph's time, see above.
      clock: seconds, monotonic.

    Raises:
      TuningError: if there is one job and it fails. The failure of one of several jobs
        is in its outcome instead.
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
    calm: int = 0  # batches in a row after which too little gain was expected
    finishes_s: list[float] = dataclasses.field(default_factory=list)  # of full races

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
        """Jobs without an outcome, those of the longest time in the graph first."""
        open_ = [lane for lane in self.lanes if lane.outcome is None]
        return sorted(open_, key=lambda lane: -lane.share_us)

    def search(self) -> None:
        """Searches batch by batch until every search is over, or the schedule ends."""
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
        """Races the unfinished jobs: in full while time is left, then shortly."""
        for lane in self.unfinished:
            if self.left_s > 0 or not self.is_any_finished:
                self._finish(lane, stop=self.stop)
        self._close(self.stop, min(GRACE_S, GRACE_SHARE * self.budget_s))

    def interrupt(self) -> None:
        self._close("interrupted", INTERRUPTED_S)

    def _close(self, stop: str, grace_s: float) -> None:
        """Races jobs that have measurements shortly; ends the others without a race."""
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
        """Races in full if the time suffices for all unfinished jobs, else shortly."""
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
        """True if the time left suffices for a batch and for all races after it."""
        if self.budget_s == math.inf:
            return True
        seen = [lane] if lane.batches else [o for o in self.lanes if o.batches]
        batches = sum(other.batches for other in seen)
        batch_s = math.fsum(o.batches_s for o in seen) / max(batches, 1)
        each_s = min(self._finish_s, FINISH_SHARE * self.budget_s / len(self.lanes))
        return self.left_s - len(self.unfinished) * each_s > batch_s

    @property
    def _finish_s(self) -> float:
        """Seconds that verifying and racing a problem in full takes, on average."""
        return statistics.fmean(self.finishes_s) if self.finishes_s else FINISH_S

    @contextlib.contextmanager
    def _working(self, lane: Lane) -> Iterator[None]:
        """Counts the lane's time; ends the lane if its tuning fails beside others."""
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
