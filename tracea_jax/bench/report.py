"""What a bench found: times of the whole program and of its sites.

``bench`` makes these values; ``bench.plot`` draws them. docs/json.md names the keys of
their plain data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

from tracea_jax import device as devices
from tracea_jax.device import Device
from tracea_jax.dispatch import Plan
from tracea_jax.page import Column, Page, Printable, Row, Table
from tracea_jax.problem import Problem
from tracea_jax.tuning.measure import Race


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Times of two that ran in turns.

    Attributes:
      plain_us, ours_us: medians over the rounds of one execution, in microseconds.
      ratio: median over the rounds of plain time by our time: above 1, ours is faster.
      low, high: quartiles of the ratio: it was between them in half of the rounds.
      rounds: that were measured.
    """

    plain_us: float
    ours_us: float
    ratio: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, race: Race, *, plain: Hashable, ours: Hashable) -> Timed:
        """The times of two racers, which may be the same one."""
        low, high = race.quartiles(plain, ours)
        return cls(
            plain_us=race.median_us(plain),
            ours_us=race.median_us(ours),
            ratio=race.ratio(plain, ours),
            low=low,
            high=high,
            rounds=race.rounds,
        )

    def __str__(self) -> str:
        return (
            f"plain {self.plain_us:.1f} us, transformed {self.ours_us:.1f} us: "
            f"{self.ratio:.2f}x ({self.spread}), {self.rounds} rounds"
        )

    @property
    def spread(self) -> str:
        """ "1.19 to 1.25"."""
        return f"{self.low:.2f} to {self.high:.2f}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WholeTime(Printable):
    """The whole program, plain and transformed, by wall-clock time.

    Attributes:
      timed: the times; None if it did not race.
      reason: why it did not, as a phrase.
    """

    timed: Timed | None = None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Plain time by transformed time; None if it did not race."""
        return self.timed and self.timed.ratio

    @property
    def page(self) -> Page:
        told = f"not raced: {self.reason}" if self.timed is None else str(self.timed)
        return Page((f"whole program: {told}",))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SiteTime(Printable):
    """The sites of one problem that run the same: what that takes alone, beside XLA.

    Attributes:
      where: the scopes or lines of the sites.
      op, problem: what is asked; no problem where it cannot be told.
      count: how often the sites run in a call; None in a loop of unknown length.
      variant, plan: what runs; as of ``explain``'s sites.
      timed: the times, in which plain is XLA; None if it was not measured.
      by: what the times are of: "wall clock", or "kernels" of a GPU.
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

    @property
    def choice(self) -> str:
        """ "gemm_cpu [kc 384 nc 512 tasks 2], tuned"."""
        if self.plan is None or self.variant is None:
            return self.variant or "cannot run"
        config = f" {self.plan.config_text}".rstrip()
        return f"{self.variant}{config}, {self.plan.origin}"

    @property
    def page(self) -> Page:
        return Page((_times([self]) if self.timed else _untimed([self]),))

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
            "timed": self.timed and dataclasses.asdict(self.timed),
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
      sites: the problems that it asks, in the order of the program.
    """

    function: str
    device: Device
    versions: dict[str, str]
    whole: WholeTime
    sites: tuple[SiteTime, ...]

    @property
    def timed(self) -> tuple[SiteTime, ...]:
        """The sites that were measured."""
        return tuple(site for site in self.sites if site.timed is not None)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for ``json.dumps``; docs/json.md has the keys."""
        whole = self.whole
        return {
            "function": self.function,
            "device": devices.to_json(self.device),
            "versions": self.versions,
            "whole": {
                "timed": whole.timed and dataclasses.asdict(whole.timed),
                "reason": whole.reason,
            },
            "sites": [site.to_json() for site in self.sites],
        }

    @property
    def page(self) -> Page:
        left = [site for site in self.sites if site.timed is None]
        head = f"{self.function} on {self.device}"
        if not self.sites:
            return Page((f"{head}\nno sites\n{self.whole}",))
        parts = [f"{head}\n{self.whole}"]
        timed = [_times(self.timed), _sum(self.timed)] if self.timed else []
        return Page((*parts, *timed, *([_untimed(left)] if left else [])))


# --- text -----------------------------------------------------------------------------

_TIMES = (
    Column("runs", is_number=True),
    Column("problem"),
    Column("XLA us", is_number=True),
    Column("ours us", is_number=True),
    Column("ratio", is_number=True),
    Column("quartiles"),
    Column("choice"),
    Column("where"),
)
_UNTIMED = (Column("where"), Column("problem", ": "), Column("because", ": "))


def _times(sites: tuple[SiteTime, ...] | list[SiteTime]) -> Table:
    rows = [
        Row(
            (
                "?" if site.count is None else str(site.count),
                str(site.problem),
                f"{site.timed.plain_us:.1f}",
                f"{site.timed.ours_us:.1f}",
                f"{site.timed.ratio:.2f}",
                site.timed.spread,
                site.choice,
                site.where,
            )
        )
        for site in sites
        if site.timed is not None
    ]
    return Table(columns=_TIMES, rows=tuple(rows), form="aligned")


def _sum(sites: tuple[SiteTime, ...]) -> str:
    known = [(site.count or 1, site.timed) for site in sites if site.timed is not None]
    plain, ours = (
        math.fsum(count * getattr(timed, name) for count, timed in known)
        for name in ("plain_us", "ours_us")
    )
    by = ", ".join(dict.fromkeys(site.by for site in sites))
    return (
        f"each alone, by {by}; sum of runs x time: XLA {plain:.1f} us, ours "
        f"{ours:.1f} us ({plain / ours:.2f}x)"
    )


def _untimed(sites: list[SiteTime]) -> Table:
    rows = (Row((s.where, str(s.problem or s.op), s.reason)) for s in sites)
    return Table(columns=_UNTIMED, rows=tuple(rows), title="not measured alone:")
