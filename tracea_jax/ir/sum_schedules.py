"""Random schedules of sums in an order: tiles of keys that add to blocks of queries.

Of each tile two consumers stage a part for each block that it sees, and two warps,
every second block each, add both parts when all earlier tiles that see the block have.
Kernel: tile/attention_sums.cuh; the hazards are those of ``schedules``. Caller: the
tests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tracea_jax.ir.schedules import Agent, Barrier, Slot, run_agents

_CONSUMERS = _WARPS = 2


def run_sums(
    tiles: Sequence[Sequence[int]],
    seed: int,
    *,
    resident: int = 2,
    launches_in_order: bool = True,
    barriers: int = 2,
) -> dict[int, list[int]]:
    """Run tiles of keys that add to the sums of blocks of queries, in order.

    Args:
      tiles: for each tile the blocks that it sees, in the order in which it does.
      seed: of the schedule.
      resident: tiles that run at the same time; another one starts when one has ended.
      launches_in_order: whether tiles start in the order in which they add.
      barriers: 2 if even and odd blocks have a barrier each, else 1.

    Returns:
      The tiles that added to each block, the first one first.

    Raises:
      Hazard: the schedule is wrong.
    """
    launch = _Launch(tiles, resident, launches_in_order, barriers)
    launch.start()
    run_agents(launch.agents, random.Random(seed))
    return launch.sums


class _Launch:
    """Tiles that wait and that run, and what they have added."""

    def __init__(
        self,
        tiles: Sequence[Sequence[int]],
        resident: int,
        in_order: bool,
        barriers: int,
    ) -> None:
        self.tiles, self.barriers = tiles, barriers
        self.waiting = list(range(len(tiles)))[:: 1 if in_order else -1]
        self.free = resident
        self.sums: dict[int, list[int]] = {}
        self.agents: list[Agent] = []

    def start(self) -> None:
        while self.waiting and self.free:
            self.free -= 1
            self.agents.extend(_Tile(self, self.waiting.pop(0)).roles())

    def has_ended(self) -> None:
        self.free += 1
        self.start()

    def turn(self, tile: int, block: int) -> int:
        """Number of tiles that add to the block before this one."""
        return sum(block in other for other in self.tiles[:tile])


class _Tile:
    """The block of threads of one tile: barriers, and the parts of two consumers."""

    def __init__(self, launch: _Launch, number: int) -> None:
        self.launch, self.number = launch, number
        self.blocks = launch.tiles[number]
        self.full = [Barrier(_CONSUMERS) for _ in range(launch.barriers)]
        self.empty = Barrier(1)
        self.parts = [Slot() for _ in range(_CONSUMERS)]
        self.running = _CONSUMERS + _WARPS

    def roles(self) -> list[Agent]:
        consumers = map(self._consume, range(_CONSUMERS))
        return [*consumers, *map(self._add, range(_WARPS))]

    def _consume(self, consumer: int) -> Agent:
        for i in range(len(self.blocks)):
            yield lambda i=i: self.empty.passes(i % 2 ^ 1)
            self.parts[consumer].write(i, 1)
            yield lambda: True
            self.full[i % len(self.full)].arrive()
        self._end()

    def _add(self, warp: int) -> Agent:
        launch, count = self.launch, len(self.full)
        for i in range(warp, len(self.blocks), _WARPS):
            block = self.blocks[i]
            yield lambda i=i: self.full[i % count].passes(i // count % 2)
            turn = launch.turn(self.number, block)
            yield lambda b=block, t=turn: len(launch.sums.get(b, ())) == t
            for part in self.parts:
                part.read(i)
            self.empty.arrive()
            yield lambda: True
            launch.sums.setdefault(block, []).append(self.number)
        self._end()

    def _end(self) -> None:
        self.running -= 1
        if not self.running:
            self.launch.has_ended()
