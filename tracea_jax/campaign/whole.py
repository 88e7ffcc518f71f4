"""Results of a tuning for the program as a whole: their part of the report.

``campaign.program`` holds the race, ``campaign.report`` shows this.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.page import Page, Printable, times
from tracea_jax.tuning.store.records import Entry
from tracea_jax.verdicts import Verdict


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Whole(Printable):
    """The result of the race of a whole program.

    Attributes:
      verdict: what is kept; None if there was no race.
      every: plain time by the time with every site; None if that failed.
      every_us: that time, in the same race as those of the verdict.
      reason: why there was no race, as a phrase.
      note: a remark, such as what the budget did not suffice for.
    """

    verdict: Verdict | None = None
    every: float | None = None
    every_us: float | None = None
    reason: str = ""
    note: str = ""

    @classmethod
    def of_entry(cls, entry: Entry) -> Whole:
        """The result in the cache entry of a race."""
        every, every_us = map(entry.tuner.get, ("every", "every_us"))
        return cls(
            verdict=Verdict.of_entry(entry),
            every=every if isinstance(every, int | float) else None,
            every_us=every_us if isinstance(every_us, int | float) else None,
            note=str(entry.tuner.get("note", "")),
        )

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain data."""
        return {
            "verdict": self.verdict and self.verdict.to_json(),
            "every": self.every,
            "every_us": self.every_us,
            "reason": self.reason,
            "note": self.note,
        }

    @property
    def page(self) -> Page:
        note = f"\n({self.note})" if self.note else ""
        return Page((f"whole program: {self._outcome}{note}",))

    @property
    def _outcome(self) -> str:
        if self.verdict is None:
            return f"not raced: {self.reason}"
        if not self.verdict.without:
            return str(self.verdict)
        left = "the program is" if self.verdict.leaves_all else "those sites are"
        return f"{self.verdict} ({self._with_every}); {left} left as written"

    @property
    def _with_every(self) -> str:
        assert self.verdict is not None
        if self.every is None:
            return "with every site it fails"
        if self.every_us is None:
            return "slower with every site"
        ratio = times.ratio(self.verdict.plain_us, self.every_us)
        return f"with every site {times.microseconds(self.every_us)}, {ratio}"
