"""Estimate of the time that the race of a whole program takes.

What was measured until then goes in: how long tracing the program and compiling plain
JAX took, and how long one execution takes. Caller: ``campaign.program``.
"""

from __future__ import annotations

import dataclasses
import math

from tracea_jax.tuning import measure

_RACERS = 2  # plain, and the program with our ops


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Seconds that a race of plain against the program with our ops needs.

    Attributes:
      compile_s: for compiling the program with our ops: as long as tracing it and
        compiling plain took, until it is known better.
      race_s: for the rounds.
    """

    compile_s: float
    race_s: float

    @classmethod
    def of(
        cls, *, trace_s: float, plain_s: float, each_s: float, timing: measure.Timing
    ) -> Needs:
        """An estimate.

        Args:
          trace_s, plain_s: that tracing and compiling took.
          each_s: time of one execution of plain.
          timing: the protocol of the race.
        """
        slice_s = max(timing.slice_s, each_s)
        rounds = timing.rounds + 2  # two slices for warming up and calibrating
        settled_s = min(timing.settle_s, 3 * slice_s)
        return cls(
            compile_s=trace_s + plain_s,
            race_s=_RACERS * rounds * slice_s + settled_s,
        )

    @property
    def once_s(self) -> float:
        """For one race."""
        return self.compile_s + self.race_s

    def after(self, spent_s: float) -> float:
        """A budget for a race, a search of that length, and a race after it."""
        return spent_s + 3 * self.once_s


def about(seconds: float) -> str:
    """ "about 40 s", rounded up to two digits."""
    step = 10.0 ** max(math.floor(math.log10(max(seconds, 1.0))) - 1, 0)
    return f"about {math.ceil(seconds / step) * step:.0f} s"
