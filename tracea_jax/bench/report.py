"""The report of a bench: times of the whole program and of its sites.

``bench`` makes these values of the times in ``bench.timed``; ``bench.plot`` draws them.
docs/json.md names the keys of their plain data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tracea_jax import device as devices
from tracea_jax.bench.timed import Load, Timed, warning
from tracea_jax.device import Device
from tracea_jax.dispatch import Plan
from tracea_jax.page import Column, Page, Printable, Row, Table, times
from tracea_jax.problem import Problem

IDENTICAL = "identical programs, nothing to compare"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WholeTime(Printable):
    """The whole program, plain and transformed, by wall-clock time.

    Attributes:
      timed: the times; None if it did not race.
      is_identical: whether both are the same program, so that a race means nothing.
      reason: why it did not race, as a phrase.
    """

    timed: Timed | None = None
    is_identical: bool = False
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Plain time by transformed time; None if it did not race."""
        return self.timed and self.timed.ratio

    @property
    def page(self) -> Page:
        if self.is_identical:
            outcome = f"{IDENTICAL} ({self.reason})"
        elif self.timed is None:
            outcome = f"not raced: {self.reason}"
        else:
            outcome = str(self.timed)
        return Page((f"whole program: {outcome}",))

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain data."""
        return {
            "timed": self.timed and self.timed.to_json(),
            "identical": self.is_identical,
            "reason": self.reason,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SiteTime(Printable):
    """The sites of one problem and choice: their time alone, and that of XLA.

    Attributes:
      where: the scopes or lines of the sites.
      op, problem: the op, and its problem; None for an op that is made of others.
      count: how often the sites run in a call; None in a loop of unknown length.
      variant, plan: what runs; as of ``explain``'s sites.
      timed: the times, in which plain is XLA; None if it was not measured.
      is_identical: whether XLA serves the sites, so that there is nothing to compare.
      by: how the times were taken: "wall clock", or "kernels" of a GPU.
      reason: why it was not measured.
    """

    where: str
    op: str
    problem: Problem | None
    count: int | None
    variant: str | None
    plan: Plan | None
    timed: Timed | None
    by: str
    reason: str
    is_identical: bool = False

    @property
    def choice(self) -> str:
        """ "gemm_cpu [kc 384 nc 512 tasks 2], tuned"."""
        if self.plan is None or self.variant is None:
            return self.variant or "cannot run"
        config = f" {self.plan.config_text}".rstrip()
        return f"{self.variant}{config}, {self.plan.origin}"

    @property
    def page(self) -> Page:
        return Page(tuple(_tables([self]).values()))

    def to_json(self) -> dict[str, Any]:
        """The site as plain data."""
        return {
            "where": self.where,
            "op": self.op,
            "problem": self.problem and self.problem.to_json(),
            "text": str(self.problem or self.op),
            "count": self.count,
            "variant": self.variant,
            "config": self.plan and dataclasses.asdict(self.plan.config),
            "origin": self.plan and self.plan.origin,
            "timed": self.timed and self.timed.to_json(),
            "identical": self.is_identical,
            "by": self.by,
            "reason": self.reason,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BenchReport(Printable):
    """A function plain against transformed; a shell and a notebook show it.

    Attributes:
      function: its name.
      device: that it ran on.
      versions: of the packages that ran, by name.
      whole: the whole program.
      sites: its problems, in the order of the program.
      load: of the machine before anything was measured; None where it is unknown.
    """

    function: str
    device: Device
    versions: dict[str, str]
    whole: WholeTime
    sites: tuple[SiteTime, ...]
    load: Load | None = None

    @property
    def timed(self) -> tuple[SiteTime, ...]:
        """The sites that were measured."""
        return tuple(site for site in self.sites if site.timed is not None)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for ``json.dumps``; docs/json.md has the keys."""
        return {
            "function": self.function,
            "device": devices.to_json(self.device),
            "versions": self.versions,
            "load": self.load and dataclasses.asdict(self.load),
            "warning": self.warning,
            "whole": self.whole.to_json(),
            "sites": [site.to_json() for site in self.sites],
        }

    @property
    def total(self) -> Timed | None:
        """The sum of runs x time of the measured sites; None if there are none."""
        known = [(s.count or 1, s.timed) for s in self.sites if s.timed is not None]
        return Timed.total(known) if known else None

    @property
    def warning(self) -> str:
        """Why the times are uncertain, as a sentence; "" on a quiet machine."""
        timed = self.whole.timed or self.total
        return "" if timed is None else warning(self.load, timed)

    @property
    def page(self) -> Page:
        head = [f"{self.function} on {self.device}", self.warning]
        head += ["" if self.sites else "no sites", str(self.whole)]
        tables = _tables(self.sites)
        measured = [tables.pop("measured"), self._sum] if self.timed else []
        return Page(("\n".join(filter(None, head)), *measured, *tables.values()))

    @property
    def _sum(self) -> str:
        total = self.total
        assert total is not None
        xla, ours = map(times.microseconds, (total.plain_us, total.ours_us))
        by = ", ".join(dict.fromkeys(site.by for site in self.timed))
        return (
            f"Sum of runs x time, each site alone, by {by}: XLA {xla}, ours {ours}: "
            f"{total.outcome}"
        )


# --- text -----------------------------------------------------------------------------

_TIMES = (
    Column("runs", is_number=True),
    Column("problem"),
    Column("XLA us", is_number=True),
    Column("ours us", is_number=True),
    Column("ratio", is_number=True),
    Column("in half of the rounds"),
    Column("XLA against itself"),
    Column("choice"),
    Column("where"),
)
_UNTIMED = (Column("where"), Column("problem", ": "), Column("because", ": "))
_IDENTICAL = (Column("where"), Column("problem", ": "))


def _tables(sites: Sequence[SiteTime]) -> dict[str, Table]:
    """Sites that were measured, those that XLA serves, and the others, if any."""
    timed = [(site, site.timed) for site in sites if site.timed is not None]
    left = [site for site in sites if site.timed is None]
    served = [Row(_name(site)) for site in left if site.is_identical]
    others = [Row((*_name(s), s.reason)) for s in left if not s.is_identical]
    made = {
        "measured": Table(
            columns=_TIMES,
            rows=tuple(Row(_cells(*pair)) for pair in timed),
            form="aligned",
        ),
        "identical": Table(
            columns=_IDENTICAL,
            rows=tuple(served),
            title="served by XLA, as in the plain program:",
        ),
        "left": Table(
            columns=_UNTIMED, rows=tuple(others), title="not measured alone:"
        ),
    }
    return {name: table for name, table in made.items() if table.rows}


def _name(site: SiteTime) -> tuple[str, str]:
    return site.where, str(site.problem or site.op)


def _cells(site: SiteTime, timed: Timed) -> tuple[str, ...]:
    is_measured = timed.difference != "none"
    ratio = times.ratio_number(timed.plain_us, timed.ours_us)
    return (
        "?" if site.count is None else str(site.count),
        str(site.problem),
        times.number(timed.plain_us),
        times.number(timed.ours_us),
        ratio if is_measured else "no difference",
        timed.spread,
        timed.noise_text,
        site.choice,
        site.where,
    )
