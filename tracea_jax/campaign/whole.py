"""What a tuning found for the program as a whole: its part of the report.

``campaign.program`` holds the race, ``campaign.report`` shows this.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.page import Page, Printable
from tracea_jax.tuning.store.records import Entry
from tracea_jax.verdicts import Verdict


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Whole(Printable):
    """What the race of a whole program found.

    Attributes:
      verdict: what is kept; None if there was no race.
      every: plain time by the time with every site; None if that failed.
      reason: why there was no race, as a phrase.
    """

    verdict: Verdict | None = None
    every: float | None = None
    reason: str = ""

    @classmethod
    def of_entry(cls, entry: Entry) -> Whole:
        """What the entry of a race says."""
        every = entry.tuner.get("every")
        return cls(
            verdict=Verdict.of_entry(entry),
            every=every if isinstance(every, int | float) else None,
        )

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain data."""
        return {
            "verdict": self.verdict and self.verdict.to_json(),
            "every": self.every,
            "reason": self.reason,
        }

    @property
    def page(self) -> Page:
        return Page((f"whole program: {self._outcome}",))

    @property
    def _outcome(self) -> str:
        if self.verdict is None:
            return f"not raced: {self.reason}"
        every = "it fails" if self.every is None else f"{self.every:.2f}x"
        if not self.verdict.without:
            return f"{self.verdict} is kept"
        left = "all is" if self.verdict.leaves_all else "such sites are"
        return f"{self.verdict} ({every} with every site): {left} left as written"
