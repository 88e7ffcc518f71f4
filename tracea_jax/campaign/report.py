"""What a tuning found: one row for each problem, and what the whole graph gains."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tracea_jax.campaign import text
from tracea_jax.device import Device
from tracea_jax.problem import Problem
from tracea_jax.tuning.sharing import Portfolio
from tracea_jax.tuning.store.records import Entry

_PROTOCOLS = {"latency": "cold", "throughput": "steady", "balanced": "balanced"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One measurement of a tuning, in the order in which they were made.

    Attributes:
      variant, config: what was measured, the config as plain data.
      time_us, cold_us, failure: as in ``records.Observation``.
      elapsed_s: since the tuning began.
    """

    variant: str
    config: dict[str, Any]
    time_us: float | None
    cold_us: float | None
    failure: str | None
    elapsed_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Microseconds of a problem; None for what was not measured.

    Attributes:
      before: of what runs untuned.
      after: of what runs now.
      xla: of XLA's own code.
    """

    before: float | None = None
    after: float | None = None
    xla: float | None = None

    @property
    def is_complete(self) -> bool:
        return None not in dataclasses.astuple(self)

    def mean(self, other: Times) -> Times:
        """The geometric mean of both."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        means = (None if None in (a, b) else math.sqrt(a * b) for a, b in pairs)
        return Times(**dict(zip(("before", "after", "xla"), means, strict=True)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem: what runs it from now on, and what that takes.

    Attributes:
      problem, count: what was tuned, and how often it runs.
      entry: what is remembered; None if the time ended before it was measured.
      steady: times of executions in a row.
      cold: times of single executions on cold caches.
      evals, compiles: what the search did.
      seconds: that were spent on it.
      stop: why its search ended: "complete", "converged", "budget", "interrupted", or
        what failed.
      trials: every measurement.
    """

    problem: Problem
    count: int
    entry: Entry | None
    steady: Times = Times()
    cold: Times = Times()
    evals: int = 0
    compiles: int = 0
    seconds: float = 0.0
    stop: str = ""
    trials: tuple[Trial, ...] = ()

    def times(self, protocol: str) -> Times:
        """By "steady", "cold" or "balanced"."""
        if protocol == "balanced":
            return self.steady.mean(self.cold)
        return self.cold if protocol == "cold" else self.steady

    @property
    def variant(self) -> str | None:
        return self.entry and self.entry.best.variant

    @property
    def config(self) -> dict[str, Any] | None:
        return self.entry and self.entry.best.config

    @property
    def origin(self) -> str | None:
        """How the answer came into its race; see ``records.Best``."""
        return self.entry and self.entry.best.origin

    @property
    def choice(self) -> str:
        """ "gemm_cpu [kc 384 nc 512 tasks 2]"."""
        if self.entry is None:
            return "not tuned"
        best = self.entry.best
        return text.choice(self.problem.op, best.variant, best.config)

    def to_json(self) -> dict[str, Any]:
        return {
            "problem": self.problem.to_json(),
            "text": str(self.problem),
            "count": self.count,
            "variant": self.variant,
            "config": self.config,
            "origin": self.origin,
            "steady_us": dataclasses.asdict(self.steady),
            "cold_us": dataclasses.asdict(self.cold),
            "evals": self.evals,
            "compiles": self.compiles,
            "seconds": round(self.seconds, 3),
            "stop": self.stop,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """What ``tracea.tune`` did; ``print`` it.

    Attributes:
      device: that was measured on.
      goal, effort, seed: as they were given.
      rows: of the problems that were asked for.
      parts: of problems that others are made of, tuned on the way.
      seconds: for everything.
      portfolio: the configs that the problems share, if that was asked for.
    """

    device: Device
    goal: str
    effort: str
    seed: int
    rows: tuple[Row, ...]
    parts: tuple[Row, ...] = ()
    seconds: float = 0.0
    portfolio: Portfolio | None = None

    @property
    def entries(self) -> dict[Problem, Entry]:
        """What is remembered about each problem that was measured."""
        return {r.problem: r.entry for r in self.rows if r.entry is not None}

    @property
    def entry(self) -> Entry:
        """The entry of the only problem.

        Raises:
          ValueError: if there is another number of them.
        """
        if len(self.entries) != 1:
            raise ValueError(
                f"{len(self.entries)} problems were tuned: use entries[problem]"
            )
        return next(iter(self.entries.values()))

    @property
    def evals(self) -> int:
        return sum(row.evals for row in (*self.rows, *self.parts))

    @property
    def compiles(self) -> int:
        return sum(row.compiles for row in (*self.rows, *self.parts))

    @property
    def protocol(self) -> str:
        """How the goal measures: "steady", "cold" or "balanced".

        "steady" if cold times are missing.
        """
        wanted = _PROTOCOLS.get(self.goal, "steady")
        measured = (row for row in self.rows if row.steady.is_complete)
        return wanted if all(r.cold.is_complete for r in measured) else "steady"

    @property
    def timed(self) -> tuple[Row, ...]:
        """The rows that have all times."""
        return tuple(row for row in self.rows if row.steady.is_complete)

    def total(self, protocol: str | None = None) -> Times:
        """Sum of count x time over ``timed``; by the goal's protocol by default."""
        times = [(r.count, r.times(protocol or self.protocol)) for r in self.timed]
        sums = {
            name: math.fsum(n * (getattr(t, name) or 0.0) for n, t in times)
            for name in ("before", "after", "xla")
        }
        return Times(**sums)

    @property
    def gain(self) -> float | None:
        """Untuned by tuned time of the graph; None if nothing was timed."""
        total = self.total()
        return total.before / total.after if total.before and total.after else None

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for ``json.dumps``."""
        return {
            "device": {
                "platform": self.device.platform,
                "arch": self.device.arch,
                **dataclasses.asdict(self.device),
            },
            "goal": self.goal,
            "effort": self.effort,
            "seed": self.seed,
            "rows": [row.to_json() for row in self.rows],
            "parts": [row.to_json() for row in self.parts],
            "protocol": self.protocol,
            "total_us": dataclasses.asdict(self.total()),
            "steady_total_us": dataclasses.asdict(self.total("steady")),
            "gain": self.gain,
            "evals": self.evals,
            "compiles": self.compiles,
            "seconds": round(self.seconds, 3),
            "portfolio": self.portfolio and self.portfolio.to_json(),
        }

    def __str__(self) -> str:
        return text.of_report(self)
