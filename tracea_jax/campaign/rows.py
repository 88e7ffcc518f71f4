"""Results of a tuning for one problem: its trials, its times, and its choice.

``run`` makes these values; ``report`` gathers those of all problems; ``plot`` draws
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tracea_jax import page, variants
from tracea_jax.page import Column, Page, Printable, Table
from tracea_jax.page.times import number
from tracea_jax.problem import Problem
from tracea_jax.tuning.store.protocols import ORIGINS, by_protocol, untuned_us
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
    """Microseconds of a problem in one race; None for what was not in it.

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Row(Printable):
    """One problem: what runs it from now on, and what that takes.

    Attributes:
      problem, count: what was tuned, and how often it runs.
      entry: what is remembered; None if the time ended before it was measured.
      legal, tried: configs that there are, and that were tried, here or before.
      evals, compiles: configs that the search knows, and that were compiled.
      seconds: that were spent on it.
      stop: why its search ended: "complete", "converged", "budget", "interrupted", or
        what failed.
      trials: every measurement.
    """

    problem: Problem
    count: int
    entry: Entry | None
    legal: int = 0
    tried: int = 0
    evals: int = 0
    compiles: int = 0
    seconds: float = 0.0
    stop: str = ""
    trials: tuple[Trial, ...] = ()

    @property
    def protocol(self) -> str:
        """The deciding protocol: "kernels", "steady", "cold" or "balanced"."""
        return "steady" if self.entry is None else self.entry.best.protocol

    @property
    def steady(self) -> Times:
        """Times of executions in a row."""
        return self.times("steady")

    @property
    def cold(self) -> Times:
        """Times of single executions on cold caches."""
        return self.times("cold")

    def times(self, protocol: str | None = None) -> Times:
        """All of one race, the last; by default the times that decided it."""
        if self.entry is None:
            return Times()
        best = self.entry.best
        protocol = protocol or best.protocol
        if protocol == "kernels":
            after, xla = best.kernel_us, best.xla_kernel_us
        else:
            after = by_protocol(protocol, best.time_us, best.cold_us)
            xla = by_protocol(protocol, best.xla_us, best.xla_cold_us)
        before = untuned_us(self.entry.tuner, protocol)
        return Times(before=before, after=after, xla=xla)

    @property
    def variant(self) -> str | None:
        return self.entry and self.entry.best.variant

    @property
    def config(self) -> dict[str, Any] | None:
        return self.entry and self.entry.best.config

    @property
    def origin(self) -> str | None:
        """Origin of the answer in its race; see ``records.Best``."""
        return self.entry and self.entry.best.origin

    @property
    def ratio(self) -> float | None:
        """XLA's time by ours, of the times that decided; None if XLA won."""
        us = self.times()
        if self.entry is None or self.variant == "xla" or not (us.after and us.xla):
            return None
        return us.xla / us.after

    @property
    def choice(self) -> str:
        """ "gemm_cpu [kc 384 nc 512 tasks 2]"."""
        if self.entry is None:
            return "not tuned"
        best = self.entry.best
        return choice(self.problem.op, best.variant, best.config)

    @property
    def page(self) -> Page:
        return Page((table([self]),))

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
            "legal": self.legal,
            "tried": self.tried,
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
    Column("configs tried", is_number=True),
    Column("choice"),
)


def table(rows: Sequence[Row], title: str = "") -> Table:
    """One line for each row under a head, with the times that decided."""
    lines = tuple(page.Row(_cells(row)) for row in rows)
    return Table(columns=_COLUMNS, rows=lines, title=title, form="aligned")


def _cells(row: Row) -> tuple[str, ...]:
    origin = "" if row.variant in (None, "xla") else ORIGINS.get(row.origin or "")
    return (
        str(row.count),
        str(row.problem),
        *("-" if us is None else number(us) for us in dataclasses.astuple(row.times())),
        f"{row.tried} of {row.legal}" if row.legal else "-",
        f"{row.choice}, {origin}" if origin else row.choice,
    )
