"""One tuning among several: what it costs, what it may gain, and how it ended.

Here are the values that the schedule computes with; which tuning continues and when all
of them end is decided in ``tuning.schedule``, the only caller. Tunings themselves
(``tuning.tuner.Tuning``) are known here only by the protocol ``Task``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

MIN_HEADROOM = 0.02  # a roofline is only an estimate, so this much may always be left


class Task(Protocol):
    """The part of ``tuner.Tuning`` that is scheduled.

    Attributes:
      stop: why its search is over; None while it goes on.
    """

    stop: str | None

    @property
    def expected_gain(self) -> float:
        """Gain that more search promises, in log units.

        Infinite while nothing is known, 0 when no gain is expected.
        """
        ...

    @property
    def best_us(self) -> float | None: ...

    @property
    def default_us(self) -> float | None: ...

    @property
    def evals(self) -> int: ...

    def step(self, *, limit_s: float = math.inf) -> bool:
        """Measures one batch, or the part of it that fits in the time.

        Returns:
          False when the search is over.
        """
        ...

    def finish(self, *, bounded_s: float | None = None) -> Any:
        """Verifies, races and records the best configs; returns the stored entry."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One problem to tune.

    Attributes:
      task: the tuning of the problem.
      count: how often the graph runs the problem.
      floor_us: time of the problem at the device's peak; None if that is unknown.
    """

    task: Task
    count: float = 1
    floor_us: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of the tuning of a job.

    Attributes:
      entry: what ``Task.finish`` returned; None if the tuning was not finished.
      stop: why the schedule ended the tuning, "converged", "budget" or "interrupted";
        "" if the tuning's own search ended before.
      failure: message of the ``TuningError`` that ended the tuning, or "".
      seconds: time that the tuning has taken.
    """

    entry: Any | None
    stop: str = ""
    failure: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """A job together with the schedule's records of it."""

    job: Job
    batches: int = 0
    batches_s: float = 0.0
    seconds: float = 0.0
    is_over: bool = False
    outcome: Outcome | None = None

    @property
    def now_us(self) -> float:
        """Time of one run: the best known, else the default's, else the bound or 0."""
        task = self.job.task
        known = (task.best_us, task.default_us, self.job.floor_us)
        return next((us for us in known if us is not None), 0.0)

    @property
    def share_us(self) -> float:
        """Time of all runs of the problem: its part of the graph's time."""
        return self.job.count * self.now_us

    @property
    def saving(self) -> float:
        """The part of the problem's time that another batch may save, 0 to 1."""
        return 0.0 if self.is_over else -math.expm1(-self.job.task.expected_gain)

    @property
    def headroom(self) -> float:
        """The part of the problem's time that a config at the bound would save."""
        floor_us, now_us = self.job.floor_us, self.now_us
        if floor_us is None or not now_us:
            return 1.0
        return max(1 - floor_us / now_us, MIN_HEADROOM)

    @property
    def priority(self) -> float:
        return self.share_us * self.headroom * self.saving

    @property
    def gain_us(self) -> float:
        return self.share_us * min(self.headroom, self.saving)
