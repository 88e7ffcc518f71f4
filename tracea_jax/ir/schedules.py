"""Random schedules of a pipeline: whatever order the hardware picks, is it right?

Producers, consumers and copies in flight are generators that yield the condition they
wait for; a seeded scheduler advances any one whose condition holds. A run either reads
every step's own data in every block, or raises ``Hazard``: a deadlock, data overwritten
before it was read, a read of another step's data, an arrival too many, or a reach into
a block that has exited.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence

from tracea_jax.ir.pipeline import AsyncCopyRing, Operation, Ring, turn_parity

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
            waiting[agent], speed[agent] = _always, rng.choice(_SPEEDS)
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


def _always() -> bool:
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


class _Block:
    """One block of a cluster: barriers, stages, and the agents still running."""

    def __init__(self, ring: Ring, consumers: int, readers: int, cluster: int) -> None:
        arrivals = ring.empty_arrivals(consumers=readers, cluster=cluster)
        self.full = [Barrier(ring.full_arrivals()) for _ in range(ring.stages)]
        self.empty = [Barrier(arrivals) for _ in range(ring.stages)]
        # One part for each block of the cluster: every block multicasts its share.
        self.slots = [[Slot() for _ in range(cluster)] for _ in range(ring.stages)]
        self.turns = [Barrier(1) for _ in range(consumers)]
        self.running = 1 + consumers

    def check_alive(self) -> None:
        if not self.running:
            raise Hazard("a peer reaches into the memory of a block that has exited")


def run_ring(
    ring: Ring,
    *,
    steps: int,
    seed: int,
    consumers: int = 2,
    cluster: int = 1,
    release_lag: int = 0,
    drains: bool = True,
    tile_steps: int | None = None,
    waits_for_turn: bool = True,
) -> None:
    """Run a TMA pipeline of one cluster once.

    Every block's producer multicasts its share of each step to all blocks.

    Args:
      ring: stages, parities and arrival counts.
      steps: k steps of each block.
      seed: of the scheduler.
      consumers: reading warpgroups of each block.
      cluster: blocks.
      release_lag: steps that a consumer keeps reading a stage after the wait for it
        (asynchronous wgmma); fewer than ``ring.stages`` or it deadlocks.
      drains: whether producers wait for ``ring.drain`` before they exit.
      tile_steps: each consumer reads so many steps alone, a tile, and then as many are
        the other's; None if all read every step.
      waits_for_turn: whether they then wait as ``turn_parity`` says.

    Raises:
      Hazard: the schedule is wrong.
    """
    readers = consumers if tile_steps is None else 1  # of each step
    blocks = [_Block(ring, consumers, readers, cluster) for _ in range(cluster)]
    agents: list[Agent] = []

    def copy(part: int, target: _Block, k: int) -> Agent:
        yield _always
        target.check_alive()
        target.slots[ring.stage(k)][part].write(k, readers)
        yield _always
        target.full[ring.stage(k)].complete_bytes(1)

    def produce(part: int, block: _Block) -> Agent:
        for k in range(steps):
            s, parity = ring.stage(k), ring.producer_parity(k)
            yield lambda s=s, parity=parity: block.empty[s].passes(parity)
            # Some kernels issue the copies first, others expect their bytes first.
            agents.extend(copy(part, target, k) for target in blocks)
            yield _always
            block.full[s].arrive(expect_bytes=cluster)
        for s, parity in ring.drain(steps) if drains else ():
            yield lambda s=s, parity=parity: block.empty[s].passes(parity)
        block.running -= 1

    def consume(block: _Block, consumer: int) -> Agent:
        if tile_steps is None:
            yield from read(block, 0, steps)
        else:
            for tile in range(consumer, -(-steps // tile_steps), consumers):
                before, parity = block.turns[consumer - 1], turn_parity(tile)
                if waits_for_turn:
                    yield lambda b=before, parity=parity: b.passes(parity)
                first = tile * tile_steps
                last = min(first + tile_steps, steps)
                yield from read(block, first, last, block.turns[consumer])
        block.running -= 1

    def read(
        block: _Block, first: int, last: int, turn: Barrier | None = None
    ) -> Agent:
        for k in range(first, last + release_lag):
            if k < last:
                s, parity = ring.stage(k), ring.consumer_parity(k)
                yield lambda s=s, parity=parity: block.full[s].passes(parity)
            if k == last - 1 and turn is not None:
                turn.arrive()
            if k >= first + release_lag:
                yield from release(block, k - release_lag)

    def release(block: _Block, k: int) -> Agent:
        for slot in block.slots[ring.stage(k)]:
            yield _always
            slot.read(k)
        for target in blocks:
            yield _always
            target.check_alive()
            target.empty[ring.stage(k)].arrive()

    for part, block in enumerate(blocks):
        agents.append(produce(part, block))
        agents.extend(consume(block, consumer) for consumer in range(consumers))
    run_agents(agents, random.Random(seed))


def run_async_copy(
    ring: AsyncCopyRing,
    *,
    steps: int,
    seed: int,
    threads: int = 2,
    program: Sequence[Operation] | None = None,
    commits_empty: bool = True,
) -> None:
    """Run a cp.async pipeline of one block once.

    Every thread copies its own part of each step and reads the parts of all threads; a
    copy lands at any time after its issue, in any order.

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
    program = ring.program if program is None else program
    slots = [[Slot() for _ in range(threads)] for _ in range(ring.stages)]
    arrived = [0] * threads
    agents: list[Agent] = []

    def copy(part: int, k: int, group: list[bool]) -> Agent:
        yield _always
        slots[ring.compute_stage(k)][part].write(k, threads)
        group[0] = True

    def load(part: int, k: int, groups: list[list[bool]]) -> None:
        group = [k >= steps]  # has landed; an empty group has at once
        if k < steps:
            agents.append(copy(part, k, group))
        if k < steps or commits_empty:
            groups.append(group)

    def thread(part: int) -> Agent:
        groups: list[list[bool]] = []
        for k in range(ring.prologue):
            load(part, k, groups)
        for k in range(steps):
            for operation in program:
                yield _always
                if operation == "load":
                    load(part, k + ring.prologue, groups)
                    if ring.stages == 1:  # a plain copy, not an asynchronous one
                        yield lambda: groups[-1][0]
                elif operation == "compute":
                    for slot in slots[ring.compute_stage(k)]:
                        yield _always
                        slot.read(k)
                elif operation.kind == "wait":
                    older = groups[: max(0, len(groups) - operation.groups_behind)]
                    yield lambda older=older: all(group[0] for group in older)
                elif operation.kind == "barrier":
                    arrived[part] += 1
                    turn = arrived[part]
                    yield lambda turn=turn: min(arrived) >= turn

    agents.extend(thread(part) for part in range(threads))
    run_agents(agents, random.Random(seed))
