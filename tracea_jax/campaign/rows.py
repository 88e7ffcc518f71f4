"""What a tuning found for one problem: its trials, its times, and what runs it now.

``run`` makes these values; ``report`` gathers those of all problems; ``plot`` draws
them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tracea_jax import page, variants
from tracea_jax.page import Column, Page, Printable, Table
from tracea_jax.problem import Problem
from tracea_jax.tuning.store.records import Entry


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Row(Printable):
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
    def ratio(self) -> float | None:
        """XLA's time by ours, round by round of their race; None if XLA won it.

        Where the rounds are not known, it is the quotient of both times.
        """
        if self.entry is None or self.variant == "xla":
            return None
        after, xla = self.steady.after, self.steady.xla
        return self.entry.best.ratio or (xla / after if after and xla else None)

    @property
    def choice(self) -> str:
        """ "gemm_cpu [kc 384 nc 512 tasks 2]"."""
        if self.entry is None:
            return "not tuned"
        best = self.entry.best
        return choice(self.problem.op, best.variant, best.config)

    @property
    def page(self) -> Page:
        return Page((table([self], "steady"),))

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


def choice(op: str, variant: str, config: dict[str, Any]) -> str:
    """A choice from plain data, as plans print it."""
    try:
        value = variants.config_from_json(variants.get(op, variant), config)
    except (ValueError, TypeError):  # of another version
        value = ", ".join(f"{k} {v}" for k, v in config.items()) or "-"
    return variant if str(value) == "-" else f"{variant} [{value}]"


_COLUMNS = (
    Column("count", is_number=True),
    Column("problem"),
    Column("untuned us", is_number=True),
    Column("tuned us", is_number=True),
    Column("XLA us", is_number=True),
    Column("evals", is_number=True),
    Column("choice"),
)


def table(rows: Sequence[Row], protocol: str, title: str = "") -> Table:
    """One line for each row under a head, with times of this protocol."""
    lines = tuple(page.Row(_cells(row, protocol)) for row in rows)
    return Table(columns=_COLUMNS, rows=lines, title=title, form="aligned")


def _cells(row: Row, protocol: str) -> tuple[str, ...]:
    times = dataclasses.astuple(row.times(protocol))
    return (
        str(row.count),
        str(row.problem),
        *("-" if us is None else f"{us:.1f}" for us in times),
        str(row.evals),
        f"{row.choice}, {row.origin}" if row.origin else row.choice,
    )
