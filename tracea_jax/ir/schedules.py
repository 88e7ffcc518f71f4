"""Random schedules of pipelines: whatever order the hardware picks, is it right?

Producers, consumers and copies in flight are generators that yield the condition they
wait for; a seeded scheduler advances any one whose condition holds. A run either reads
every step's own data in every block, or raises ``Hazard``: a deadlock, data overwritten
before it was read, a read of another step's data, an arrival too many, or a reach into
a block that has exited. What runs so is in ``ring_schedules``, ``copy_schedules``,
``attention_schedules`` and ``sum_schedules``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence

Condition = Callable[[], bool]
Agent = Generator[Condition, None, None]

_SPEEDS = (1, 30, 1000)


class Hazard(Exception):
    """A schedule that loses data, reads wrong data or never ends."""


def run_agents(agents: Sequence[Agent], rng: random.Random) -> None:
    """Advance agents in random order until all have ended.

    Agents differ in speed, at random: even odds would hardly ever let one fall far
    behind. An agent may append to ``agents`` when that is a list.

    Raises:
      Hazard: every agent that is left waits.
    """
    waiting: dict[Agent, Condition] = {}
    speed: dict[Agent, int] = {}
    started = 0
    while True:
        for agent in agents[started:]:
            waiting[agent], speed[agent] = always, rng.choice(_SPEEDS)
        started = len(agents)
        ready = [agent for agent, condition in waiting.items() if condition()]
        if not ready:
            if waiting:
                raise Hazard(f"deadlock: {len(waiting)} agents wait for each other")
            return
        [agent] = rng.choices(ready, [speed[agent] for agent in ready])
        try:
            waiting[agent] = next(agent)
        except StopIteration:
            del waiting[agent]


def always() -> bool:
    """The condition of an agent that waits for nothing, but for its turn."""
    return True


class Barrier:
    """An mbarrier: a phase completes with no pending arrivals and no pending bytes."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0

    def arrive(self, expect_bytes: int = 0) -> None:
        if not self.pending:
            raise Hazard(f"more than {self.count} arrivals in one phase of a barrier")
        self.bytes += expect_bytes
        self.pending -= 1
        self._complete()

    def complete_bytes(self, count: int) -> None:
        self.bytes -= count
        self._complete()

    def passes(self, parity: int) -> bool:
        """True if the phase of that parity, current or last, is complete."""
        return self.phase != parity

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


class Slot:
    """One part of one stage's memory, and how many of its readers are still to come."""

    def __init__(self) -> None:
        self.step = -1
        self.unread = 0

    def write(self, step: int, readers: int) -> None:
        if self.unread:
            raise Hazard(
                f"step {step} overwrites step {self.step}, which has {self.unread} "
                "readers to come"
            )
        self.step, self.unread = step, readers

    def read(self, step: int) -> None:
        if self.step != step:
            raise Hazard(f"step {step} reads the data of step {self.step}")
        self.unread -= 1
