"""The outcome of a tuning's last race: the answer, and the times to compare it with.

All times of an outcome are of one race, those of the winner, of XLA and of what runs
untuned alike. Caller: ``tuning.session``, which holds the race.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning import select
from tracea_jax.tuning.measure import Race
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.records import Best


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a session.

    Attributes:
      best: the winner of its last race.
      verified: the results of its verification; empty for XLA.
      untuned: times, in the same race, of what runs untuned; None where unknown.
    """

    best: Best
    verified: dict[str, Any]
    untuned: dict[str, float | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A race that was decided.

    Attributes:
      race: of the verified choices.
      kernels: kernel times of some of them; None where the device reports none.
      chosen, xla: the winner, and XLA's choice.
    """

    race: Race
    kernels: Race | None
    chosen: Choice
    xla: Choice

    def times(self, choice: Choice) -> dict[str, float | None]:
        """The times of a choice, by the names that ``Best`` has for them."""
        kernels = self.kernels
        return {
            "time_us": _level(self.race, choice),
            "cold_us": _level(self.race, choice, "cold"),
            "kernel_us": None if kernels is None else _level(kernels, choice),
        }

    def best(
        self,
        problem: Problem,
        device: Device,
        *,
        order: Sequence[Choice],
        heroes: Sequence[Choice],
        goal: str,
    ) -> Best:
        """The answer; arguments are the attributes of ``Session``."""
        race, chosen = self.race, self.chosen
        ours, xla = self.times(chosen), self.times(self.xla)
        raced = {chosen, self.xla} <= set(race.times_us)
        second = select.runner_up(race, chosen, order, goal)
        origin = "hero" if chosen in heroes else "search"
        return Best(
            **named(problem, chosen, device),
            time_us=ours["time_us"],
            cold_us=ours["cold_us"],
            kernel_us=ours["kernel_us"],
            xla_us=xla["time_us"],
            xla_cold_us=xla["cold_us"],
            xla_kernel_us=xla["kernel_us"],
            ratio=race.ratio(self.xla, chosen) if raced else None,
            goal=goal,
            runner_up={}
            if second is None
            else {**named(problem, second, device), "time_us": _level(race, second)},
            origin="xla" if chosen == self.xla else origin,
        )


def _level(race: Race, choice: Choice, protocol: str = "steady") -> float | None:
    times = race.times_us if protocol == "steady" else race.cold_us
    return race.level_us(choice, protocol) if times.get(choice) else None
