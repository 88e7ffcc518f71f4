"""The report of a tuning: all its rows, what the whole graph gains, and both as text.

``run`` returns it, and users print it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

from tracea_jax import device as devices
from tracea_jax import page
from tracea_jax.campaign import text
from tracea_jax.campaign.rows import Row, Times, table
from tracea_jax.campaign.whole import Whole
from tracea_jax.device import Device
from tracea_jax.page import Column, Page, Printable, Table
from tracea_jax.problem import Problem
from tracea_jax.tuning.portfolio import Portfolio
from tracea_jax.tuning.store.records import Entry

_PROTOCOLS = {"latency": "cold", "throughput": "steady", "balanced": "balanced"}
_MEANING = {
    "steady": "of executions in a row",
    "cold": "of single executions on cold caches",
    "balanced": "geometric means of executions in a row and on cold caches",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TuneReport(Printable):
    """What ``tracea.tune`` did; a shell and a notebook show it.

    Attributes:
      device: that was measured on.
      goal, effort, seed: as they were given.
      rows: of the problems that were asked for.
      parts: of problems that others are made of, tuned on the way.
      seconds: for everything.
      portfolio: the configs that the problems share, if that was asked for.
      whole: how the program raced against plain; None if no function was tuned.
    """

    device: Device
    goal: str
    effort: str
    seed: int
    rows: tuple[Row, ...]
    parts: tuple[Row, ...] = ()
    seconds: float = 0.0
    portfolio: Portfolio | None = None
    whole: Whole | None = None

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
            "device": devices.to_json(self.device),
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
            "whole": self.whole and self.whole.to_json(),
        }

    @property
    def page(self) -> Page:
        whole = () if self.whole is None else (str(self.whole),)
        if len(self.rows) == 1 and not self.parts:
            return Page((_alone(self), *whole))
        lines = [f"{text.counted(len(self.rows), 'problem')} on {self.device}"]
        lines += [f"goal {self.goal}, effort {self.effort}: {_work(self)}"]
        lines += [f"times {_MEANING[self.protocol]}"]
        title = "tuned for problems that are made of them:"
        parts = (
            "\n".join(lines),
            table(self.rows, self.protocol),
            "\n".join(_totals(self) if self.timed else []),
            table(self.parts, self.protocol, title) if self.parts else "",
            text.portfolio(self.portfolio) if self.portfolio is not None else "",
            *whole,
        )
        return Page(tuple(part for part in parts if part))


_ALONE = (
    Column("problem"),
    Column("choice", ": "),
    Column("time", ", ", is_number=True),
    Column("XLA", ", XLA ", is_number=True),
    Column("XLA / time", ", ", is_number=True),
)


def _alone(report: TuneReport) -> Table:
    (row,) = report.rows
    steady, cold = row.steady, row.cold
    time = "not timed" if steady.after is None else f"{steady.after:.1f} us"
    xla = ratio = ""
    if steady.xla is not None and row.ratio is not None:
        xla, ratio = f"{steady.xla:.1f} us", f"{row.ratio:.2f}x"
    notes: list[str] = []
    if cold.after and cold.xla and report.protocol != "steady":
        notes.append(f"on cold caches {cold.after:.1f} us, XLA {cold.xla:.1f} us")
    details = [
        "" if steady.before is None else f"untuned {steady.before:.1f} us",
        text.evaluations(row.evals, row.compiles),
        f"{row.seconds:.1f} s",
        f"ended by: {row.stop}" if row.stop else "",
    ]
    notes.append(", ".join(part for part in details if part))
    cells = (str(row.problem), row.choice, time, xla, ratio)
    return Table(columns=_ALONE, rows=(page.Row(cells, tuple(notes)),))


def _work(report: TuneReport) -> str:
    done = text.evaluations(report.evals, report.compiles)
    rows = (*report.rows, *report.parts)
    stops = collections.Counter(row.stop for row in rows if row.stop)
    why = ", ".join(f"{n} {stop}" for stop, n in stops.items())
    return f"{done}, {report.seconds:.1f} s" + (f"; ended by: {why}" if why else "")


def _totals(report: TuneReport) -> list[str]:
    lines = []
    for protocol in dict.fromkeys((report.protocol, "steady")):
        total = report.total(protocol)
        if not (total.before and total.after and total.xla):
            continue
        how = "" if protocol == report.protocol else f", {_MEANING[protocol]}"
        lines.append(
            f"sum of count x time{how}: untuned {total.before:.1f} us, tuned "
            f"{total.after:.1f} us ({total.before / total.after:.2f}x), XLA "
            f"{total.xla:.1f} us ({total.xla / total.after:.2f}x)"
        )
    missing = len(report.rows) - len(report.timed)
    return [*lines, *([f"({missing} without all times left out)"] if missing else [])]
