"""Progress of a tuning: its steps, and the error that ends it.

Nothing is printed here: ``campaign.watch`` and the command line do. The session, the
tuner, the schedule and whoever watches them use it.
"""

from __future__ import annotations

from typing import Protocol


class TuningError(RuntimeError):
    """Nothing can be measured any more; all measurements so far are in the journal."""


class Progress(Protocol):
    """Told about every step of a tuning."""

    def __call__(
        self,
        *,
        phase: str,
        done: int,
        total: int,
        best_us: float | None,
        message: str,
        ratio: float | None = None,
    ) -> None:
        """One step.

        Args:
          phase: "search", "verify", "race", "wait" for another process, or "done".
          done, total: steps of the phase.
          best_us: lowest time so far, if any; at the end the winner's.
          message: the choice at hand, or the reason for waiting.
          ratio: XLA's time by the winner's, of the last race; None before it was held.
        """
        ...
