"""Random schedules of a cp.async pipeline of one block.

Every thread copies its own part of each step and reads the parts of all threads; a copy
lands at any time after its issue, in any order. The hazards are those of ``schedules``.
Caller: the tests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tracea_jax.ir.pipeline import AsyncCopyRing, Operation, SyncRequirement
from tracea_jax.ir.schedules import Agent, Slot, always, run_agents


def run_async_copy(
    ring: AsyncCopyRing,
    *,
    steps: int,
    seed: int,
    threads: int = 2,
    program: Sequence[Operation] | None = None,
    commits_empty: bool = True,
) -> None:
    """Run the block once.

    Args:
      ring: stages and form.
      steps: k steps.
      seed: of the scheduler.
      threads: threads (or warps) of the block.
      program: the operations of one step; ``ring.program`` unless a mutation is tested.
      commits_empty: whether steps with nothing to load commit an empty group.

    Raises:
      Hazard: the schedule is wrong.
    """
    agents: list[Agent] = []
    block = _Block(ring, steps, threads, commits_empty, agents)
    operations = ring.program if program is None else program
    agents.extend(_Thread(block, part).run(operations) for part in range(threads))
    run_agents(agents, random.Random(seed))


class _Block:
    """Stages with a part of each thread, and how many barriers each has reached."""

    def __init__(
        self,
        ring: AsyncCopyRing,
        steps: int,
        threads: int,
        commits_empty: bool,
        agents: list[Agent],
    ) -> None:
        self.ring, self.steps, self.commits_empty = ring, steps, commits_empty
        self.slots = [[Slot() for _ in range(threads)] for _ in range(ring.stages)]
        self.arrived = [0] * threads
        self.agents = agents

    def stage(self, k: int) -> list[Slot]:
        return self.slots[self.ring.compute_stage(k)]


class _Thread:
    """Copies of one thread in groups, each of which has landed or has not."""

    def __init__(self, block: _Block, part: int) -> None:
        self.block, self.part = block, part
        self.groups: list[list[bool]] = []

    def run(self, program: Sequence[Operation]) -> Agent:
        for k in range(self.block.ring.prologue):
            self._load(k)
        for k in range(self.block.steps):
            for operation in program:
                yield always
                if operation == "load":
                    yield from self._load_ahead(k)
                elif operation == "compute":
                    yield from self._compute(k)
                else:
                    yield from self._await(operation)

    def _load_ahead(self, k: int) -> Agent:
        self._load(k + self.block.ring.prologue)
        if self.block.ring.stages == 1:  # a plain copy, not an asynchronous one
            yield lambda: self.groups[-1][0]

    def _load(self, k: int) -> None:
        is_empty = k >= self.block.steps
        group = [is_empty]  # has landed; an empty group has at once
        if not is_empty:
            self.block.agents.append(self._copy(k, group))
        if not is_empty or self.block.commits_empty:
            self.groups.append(group)

    def _copy(self, k: int, group: list[bool]) -> Agent:
        yield always
        self.block.stage(k)[self.part].write(k, len(self.block.arrived))
        group[0] = True

    def _compute(self, k: int) -> Agent:
        for slot in self.block.stage(k):
            yield always
            slot.read(k)

    def _await(self, required: SyncRequirement) -> Agent:
        if required.kind == "wait":
            older = self.groups[: max(0, len(self.groups) - required.groups_behind)]
            yield lambda: all(group[0] for group in older)
        elif required.kind == "barrier":
            arrived = self.block.arrived
            arrived[self.part] += 1
            turn = arrived[self.part]
            yield lambda: min(arrived) >= turn
