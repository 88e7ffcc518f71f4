"""What a tuning found for the program as a whole: its part of the report.

``campaign.program`` holds the race, ``campaign.report`` shows this.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.tuning.store.records import Entry
from tracea_jax.verdicts import Verdict


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What the race of a whole program found.

    Attributes:
      verdict: what is kept; None if there was no race.
      every: plain time by the time with every site; None if that failed.
      leaves_all: whether plain is what is kept.
      reason: why there was no race, as a phrase.
    """

    verdict: Verdict | None = None
    every: float | None = None
    leaves_all: bool = False
    reason: str = ""

    @classmethod
    def of_entry(cls, entry: Entry) -> Whole:
        """What the entry of a race says."""
        verdict = Verdict.of_entry(entry)
        every = entry.tuner.get("every")
        return cls(
            verdict=verdict,
            every=every if isinstance(every, int | float) else None,
            leaves_all=verdict is not None
            and verdict.leaves_all(entry.problem.get("ops", ())),
        )

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain data."""
        return {
            "verdict": self.verdict and self.verdict.to_json(),
            "every": self.every,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        if self.verdict is None:
            return f"whole program: not raced: {self.reason}"
        every = "it fails" if self.every is None else f"{self.every:.2f}x"
        if self.leaves_all:
            return (
                f"whole program: plain is the fastest, {self.verdict.plain_us:.1f} us "
                f"wall clock ({every} with every site): all is left as written"
            )
        if self.verdict.without:
            left = "such sites are left as written"
            return f"whole program: {self.verdict}: {left} ({every} with every site)"
        return f"whole program: {self.verdict} is kept"
