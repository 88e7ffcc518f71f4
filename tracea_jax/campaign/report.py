"""The report of a tuning: all its rows, what the whole graph gains, and both as text.

``run`` returns it, and users print it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tracea_jax import device as devices
from tracea_jax import page
from tracea_jax.campaign import text
from tracea_jax.campaign.rows import Row, Times, table
from tracea_jax.campaign.whole import Whole
from tracea_jax.device import Device
from tracea_jax.page import Column, Page, Printable, Table, times
from tracea_jax.problem import Problem
from tracea_jax.tuning.portfolio import Portfolio
from tracea_jax.tuning.store.protocols import deciding
from tracea_jax.tuning.store.records import Entry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TuneReport(Printable):
    """The report of ``tracea.tune``; a shell and a notebook show it.

    Attributes:
      device: that was measured on.
      goal, effort, seed: as they were given.
      rows: of the problems that ``tune`` was given.
      parts: of problems that others are made of, tuned first.
      seconds: for everything.
      portfolio: the configs that the problems share; None unless wanted.
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
        """The cache entry of each problem that was measured."""
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
        """The deciding protocol: "kernels", "steady", "cold", "balanced", "mixed"."""
        found = {row.protocol for row in self.timed} or {
            deciding(self.goal, has_cold=True)
        }
        return found.pop() if len(found) == 1 else "mixed"

    @property
    def timed(self) -> tuple[Row, ...]:
        """The rows that have all times."""
        return tuple(row for row in self.rows if row.times().is_complete)

    def total(self, protocol: str | None = None) -> Times:
        """Sum of count x time over ``timed``, by default of the times that decided."""
        return _sum(self.timed, protocol)

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
        head = f"{text.counted(len(self.rows), 'problem')} on {self.device}\n"
        head += f"goal {self.goal}, effort {self.effort}: {_work(self)}"
        parts = (
            head,
            *_tables(self.rows),
            *_tables(self.parts, "tuned because other problems are made of them; "),
            text.portfolio(self.portfolio) if self.portfolio is not None else "",
            *whole,
        )
        return Page(tuple(part for part in parts if part))


def _sum(rows: Iterable[Row], protocol: str | None = None) -> Times:
    known = [(row.count, row.times(protocol)) for row in rows]
    sums = {
        name: math.fsum(n * (getattr(us, name) or 0.0) for n, us in known)
        for name in ("before", "after", "xla")
    }
    return Times(**sums)


_ALONE = (
    Column("problem"),
    Column("choice", ": "),
    Column("time", ", ", is_number=True),
    Column("XLA", ", XLA ", is_number=True),
    Column("XLA / time", ", ", is_number=True),
)


def _alone(report: TuneReport) -> Table:
    (row,) = report.rows
    us = row.times()
    time = "not timed" if us.after is None else times.microseconds(us.after)
    xla = ratio = ""
    if us.after and us.xla and row.variant != "xla":
        xla, ratio = times.microseconds(us.xla), times.ratio(us.xla, us.after)
    details = [
        "" if us.before is None else f"untuned {times.microseconds(us.before)}",
        text.tried([row]),
        f"{row.seconds:.1f} s",
        f"search ended by: {row.stop}" if row.stop else "",
    ]
    notes = [", ".join(part for part in details if part)]
    if us.after is not None:
        notes.insert(0, f"times of {text.MEANINGS[row.protocol]}")
    cells = (str(row.problem), row.choice, time, xla, ratio)
    return Table(columns=_ALONE, rows=(page.Row(cells, tuple(notes)),))


def _work(report: TuneReport) -> str:
    rows = (*report.rows, *report.parts)
    done = text.tried(rows)
    stops = collections.Counter(row.stop for row in rows if row.stop)
    why = ", ".join(f"{n} {stop}" for stop, n in stops.items())
    ended = f"; searches ended by: {why}" if why else ""
    return f"{done}, {report.seconds:.1f} s{ended}"


def _tables(rows: Sequence[Row], why: str = "") -> Iterator[str | Table]:
    """A table and its totals for each protocol that decided some of the rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.entry is not None:
            groups.setdefault(row.protocol, []).append(row)
    untimed = [row for row in rows if row.entry is None]
    if untimed:
        groups.setdefault(next(iter(groups), ""), []).extend(untimed)
    for protocol, group in groups.items():
        of = f"times of {text.MEANINGS[protocol]}" if protocol else "nothing was timed"
        yield table(sorted(group, key=rows.index), f"{why}{of}:")
        if totals := _totals(group):
            yield totals


def _totals(rows: Sequence[Row]) -> str:
    """The sums of the rows that have all times, and how many have not."""
    timed = [row for row in rows if row.times().is_complete]
    total, lines = _sum(timed), []
    if total.before and total.after and total.xla:
        lines.append(
            f"total (count x time): tuned {times.microseconds(total.after)}, "
            f"{text.compared(total.after, 'untuned', total.before)}, "
            f"{text.compared(total.after, 'XLA', total.xla)}"
        )
    if missing := len(rows) - len(timed):
        lines.append(
            f"({text.counted(missing, 'problem')} without timings not counted)"
        )
    return "\n".join(lines)
