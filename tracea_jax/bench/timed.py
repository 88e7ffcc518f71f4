"""Times of two programs that ran in turns, and of the noise of the same rounds.

The first program is in each race twice. Its ratio to itself is the control: what the
machine makes of two programs that are equally fast. A ratio whose interval overlaps
that of the control is no measured difference, whatever its value.

``bench`` holds the races; ``bench.report`` and ``bench.plot`` show these values.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal

from tracea_jax.page import times
from tracea_jax.tuning.measure import QUIET, Race

Difference = Literal["faster", "slower", "none"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Times of a program as it is written and of what ``transform`` makes of it.

    Attributes:
      plain_us, ours_us: medians over the rounds of one execution, in microseconds.
      low, high: the ratio of a round was between them in half of the rounds, or in more
        where rounds were few; see ``Race.interval``.
      noise: plain against itself was between 1 / noise and noise likewise.
      rounds: that were measured.
    """

    plain_us: float
    ours_us: float
    low: float
    high: float
    noise: float
    rounds: int

    @classmethod
    def of(
        cls, race: Race, *, plain: Hashable, again: Hashable, ours: Hashable
    ) -> Timed:
        """The times in a race; ``again`` is the second racer that is plain."""
        low, high = race.interval(plain, ours)
        # Which of two equal racers is the first one is arbitrary.
        noise = max(abs(math.log(x)) for x in race.interval(plain, again))
        return cls(
            plain_us=statistics.median(race.times_us[plain]),
            ours_us=statistics.median(race.times_us[ours]),
            low=low,
            high=high,
            noise=math.exp(noise) * (1 + 1e-12),  # not below by rounding
            rounds=race.rounds,
        )

    @classmethod
    def total(cls, counted: Iterable[tuple[int, Timed]]) -> Timed:
        """The total of programs that run one after another, each so many times."""
        known = list(counted)

        def total_us(time_us: Callable[[Timed], float]) -> float:
            return math.fsum(count * time_us(timed) for count, timed in known)

        plain_us = total_us(lambda timed: timed.plain_us)
        return cls(
            plain_us=plain_us,
            ours_us=total_us(lambda timed: timed.ours_us),
            low=plain_us / total_us(lambda timed: timed.plain_us / timed.low),
            high=plain_us / total_us(lambda timed: timed.plain_us / timed.high),
            noise=total_us(lambda timed: timed.plain_us * timed.noise) / plain_us,
            rounds=min(timed.rounds for _, timed in known),
        )

    @property
    def ratio(self) -> float:
        """Plain time by our time: above 1, ours is faster."""
        return self.plain_us / self.ours_us

    @property
    def difference(self) -> Difference:
        """Tests whether ours is faster or slower by more than the noise of the race."""
        if self.low > self.noise:
            return "faster"
        return "slower" if self.high < 1 / self.noise else "none"

    @property
    def outcome(self) -> str:
        """ "1.25x", or that no difference was measured."""
        if self.difference == "none":
            return "no difference measured"
        return times.ratio(self.plain_us, self.ours_us)

    @property
    def spread(self) -> str:
        """ "1.19 to 1.25"."""
        return f"{self.low:.2f} to {self.high:.2f}"

    @property
    def noise_text(self) -> str:
        """ "0.98 to 1.02"."""
        return f"{1 / self.noise:.2f} to {self.noise:.2f}"

    def __str__(self) -> str:
        plain, ours = map(times.microseconds, (self.plain_us, self.ours_us))
        return (
            f"plain {plain}, transformed {ours}: {self.outcome} ({self.spread} in "
            f"{self.rounds} rounds; plain against itself: {self.noise_text})"
        )

    def to_json(self) -> dict[str, Any]:
        """The times as plain data."""
        return {**dataclasses.asdict(self), "ratio": self.ratio}


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Load of a machine.

    Attributes:
      average: threads that run or wait for a core, a mean over the last minute.
      cores: of the machine.
    """

    average: float
    cores: int

    @classmethod
    def now(cls) -> Load | None:
        """The load of this machine; None where the system does not report it."""
        try:
            return cls(os.getloadavg()[0], os.cpu_count() or 1)
        except (AttributeError, OSError):
            return None

    @property
    def is_high(self) -> bool:
        """Returns whether threads wait for each other."""
        return self.average > self.cores

    def __str__(self) -> str:
        return f"the load average is {self.average:.1f} on {self.cores} cores"


def warning(load: Load | None, timed: Timed) -> str:
    """A warning about load on the machine during the race; "" if it was quiet.

    Even an idle machine has rounds that are slower than others by ``QUIET``. Where
    plain differs from itself by more, other programs were in the way.
    """
    why = [str(load)] if load is not None and load.is_high else []
    if timed.noise > 1 + QUIET:
        why.append(f"plain against itself measured {timed.noise_text}")
    if not why:
        return ""
    return (
        f"Warning: the machine is busy ({'; '.join(why)}). Small differences cannot be "
        "measured now: stop other programs and run bench again."
    )
