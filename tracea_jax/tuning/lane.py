"""A tuning among others: what it costs, what it is worth, and how it ended."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

MIN_HEADROOM = 0.02  # a roofline is an estimate: no problem is at it for certain


class Task(Protocol):
    """The part of ``tuner.Tuning`` that is scheduled.

    Attributes:
      stop: why its search is over; None while it goes on.
    """

    stop: str | None

    @property
    def expected_gain(self) -> float:
        """In log units; infinite while nothing is known, 0 when there is none."""
        ...

    @property
    def best_us(self) -> float | None: ...

    @property
    def default_us(self) -> float | None: ...

    @property
    def evals(self) -> int: ...

    def step(self, *, limit_s: float = math.inf) -> bool:
        """Searches one batch, or what fits in the time; False when it is over."""
        ...

    def finish(self, *, bounded_s: float | None = None) -> Any:
        """Verifies, races and records; the entry."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One problem to tune.

    Attributes:
      task: its tuning.
      count: how often the problem runs.
      floor_us: what it takes at the device's peak, if that is known.
    """

    task: Task
    count: float = 1
    floor_us: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the tuning of a job ended.

    Attributes:
      entry: what ``Task.finish`` returned; None if it never came to that.
      stop: what the schedule ended it for, "converged", "budget" or "interrupted"; ""
        if its own search was over.
      failure: what went wrong, as ``TuningError`` said it.
      seconds: that were spent on it.
    """

    entry: Any | None
    stop: str = ""
    failure: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """A job with what the schedule knows of it."""

    job: Job
    batches: int = 0
    batches_s: float = 0.0
    seconds: float = 0.0
    is_over: bool = False
    outcome: Outcome | None = None

    @property
    def now_us(self) -> float:
        """Time of one run as far as it is known."""
        task = self.job.task
        known = (task.best_us, task.default_us, self.job.floor_us)
        return next((us for us in known if us is not None), 0.0)

    @property
    def share_us(self) -> float:
        """Time of all runs: its part of the graph's."""
        return self.job.count * self.now_us

    @property
    def saving(self) -> float:
        """The part of its time that another batch is expected to save, 0 to 1."""
        return 0.0 if self.is_over else -math.expm1(-self.job.task.expected_gain)

    @property
    def headroom(self) -> float:
        """The part of its time that any config could save."""
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
