"""Random schedules of a TMA pipeline of one cluster of blocks, and of turns in a block.

Every block's producer multicasts its share of each step to all blocks. The hazards are
those of ``schedules``. Caller: the tests.
"""

from __future__ import annotations

import collections
import dataclasses
import random

from tracea_jax.ir.pipeline import Ring, turn_parity
from tracea_jax.ir.schedules import Agent, Barrier, Hazard, Slot, always, run_agents


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RingProtocol:
    """The actions of blocks.

    Attributes:
      ring: stages, parities and arrival counts.
      steps: k steps of each block.
      consumers: reading warpgroups of each block.
      cluster: blocks.
      release_lag: steps that a consumer keeps reading a stage after the wait for it
        (asynchronous wgmma); fewer than ``ring.stages`` or it deadlocks.
      drains: whether producers wait for ``ring.drain`` before they exit.
      tile_steps: each consumer reads so many steps alone, a tile, and then as many are
        the other's; None if all read every step.
      waits_for_turn: whether they then wait as ``turn_parity`` says.
    """

    ring: Ring
    steps: int
    consumers: int = 2
    cluster: int = 1
    release_lag: int = 0
    drains: bool = True
    tile_steps: int | None = None
    waits_for_turn: bool = True

    @property
    def readers(self) -> int:
        """Consumers of a block that read each step."""
        return self.consumers if self.tile_steps is None else 1


def run_ring(protocol: RingProtocol, seed: int) -> None:
    """Run the cluster once.

    Raises:
      Hazard: the schedule is wrong.
    """
    blocks = [_Block(protocol, number) for number in range(protocol.cluster)]
    agents: list[Agent] = []
    for block in blocks:
        agents.append(block.produce(blocks, agents))
        consumers = range(protocol.consumers)
        agents.extend(block.consume(blocks, consumer) for consumer in consumers)
    run_agents(agents, random.Random(seed))


class _Block:
    """One block of a cluster: barriers, stages, and the agents still running."""

    def __init__(self, protocol: RingProtocol, number: int) -> None:
        self.protocol, self.number = protocol, number
        self.ring = ring = protocol.ring
        arrivals = ring.empty_arrivals(
            consumers=protocol.readers, cluster=protocol.cluster
        )
        self.full = [Barrier(ring.full_arrivals()) for _ in range(ring.stages)]
        self.empty = [Barrier(arrivals) for _ in range(ring.stages)]
        # One part for each block of the cluster: every block multicasts its share.
        parts = range(protocol.cluster)
        self.slots = [[Slot() for _ in parts] for _ in range(ring.stages)]
        self.turns = [Barrier(1) for _ in range(protocol.consumers)]
        self.running = 1 + protocol.consumers

    def check_alive(self) -> None:
        if not self.running:
            raise Hazard("a peer reaches into the memory of a block that has exited")

    def produce(self, blocks: list[_Block], agents: list[Agent]) -> Agent:
        p, ring = self.protocol, self.ring
        for k in range(p.steps):
            s, parity = ring.stage(k), ring.producer_parity(k)
            yield lambda s=s, parity=parity: self.empty[s].passes(parity)
            # Some kernels issue the copies first, others expect their bytes first.
            agents.extend(target.receive(self.number, k) for target in blocks)
            yield always
            self.full[s].arrive(expect_bytes=p.cluster)
        for s, parity in ring.drain(p.steps) if p.drains else ():
            yield lambda s=s, parity=parity: self.empty[s].passes(parity)
        self.running -= 1

    def receive(self, part: int, k: int) -> Agent:
        """A copy in flight: the share of step k that is a block's."""
        s = self.ring.stage(k)
        yield always
        self.check_alive()
        self.slots[s][part].write(k, self.protocol.readers)
        yield always
        self.full[s].complete_bytes(1)

    def consume(self, blocks: list[_Block], consumer: int) -> Agent:
        p = self.protocol
        if p.tile_steps is None:
            yield from self._read(blocks, range(p.steps))
        else:
            for tile in range(consumer, -(-p.steps // p.tile_steps), p.consumers):
                before, parity = self.turns[consumer - 1], turn_parity(tile)
                if p.waits_for_turn:
                    yield lambda b=before, parity=parity: b.passes(parity)
                first = tile * p.tile_steps
                steps = range(first, min(first + p.tile_steps, p.steps))
                yield from self._read(blocks, steps, self.turns[consumer])
        self.running -= 1

    def _read(
        self, blocks: list[_Block], steps: range, turn: Barrier | None = None
    ) -> Agent:
        """Steps, the last of which grants a turn."""
        lag = self.protocol.release_lag
        for k in range(steps.start, steps.stop + lag):
            if k < steps.stop:
                s, parity = self.ring.stage(k), self.ring.consumer_parity(k)
                yield lambda s=s, parity=parity: self.full[s].passes(parity)
            if k == steps.stop - 1 and turn is not None:
                turn.arrive()
            if k >= steps.start + lag:
                yield from self._release(blocks, k - lag)

    def _release(self, blocks: list[_Block], k: int) -> Agent:
        for slot in self.slots[self.ring.stage(k)]:
            yield always
            slot.read(k)
        for target in blocks:
            yield always
            target.check_alive()
            target.empty[self.ring.stage(k)].arrive()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnProtocol:
    """Two consumers that take tiles in turn, as the warps of each see it.

    Attributes:
      tile_steps: steps of each tile, which may be none.
      warps: of each consumer. All of them wait for its turns, and the first ends them.
      meets: whether the warps of a tile without steps meet before its turn ends.
        Steps are products of all warps, which meet in them.
    """

    tile_steps: tuple[int, ...]
    warps: int = 4
    meets: bool = True


def run_turns(protocol: TurnProtocol, seed: int) -> None:
    """Run the consumers once.

    Raises:
      Hazard: the schedule is wrong.
    """
    turns = [Barrier(1), Barrier(1)]
    met = [collections.Counter[int](), collections.Counter[int]()]
    agents = [
        _warp(protocol, warp, consumer, turns, met[consumer])
        for consumer in range(2)
        for warp in range(protocol.warps)
    ]
    run_agents(agents, random.Random(seed))


def _warp(
    protocol: TurnProtocol,
    warp: int,
    consumer: int,
    turns: list[Barrier],
    met: collections.Counter[int],
) -> Agent:
    p = protocol
    for tile in range(consumer, len(p.tile_steps), 2):
        yield lambda tile=tile: turns[1 - consumer].passes(turn_parity(tile))
        if p.tile_steps[tile] or p.meets:
            met[tile] += 1
            yield lambda tile=tile: met[tile] == p.warps
        if warp == 0:
            turns[consumer].arrive()
