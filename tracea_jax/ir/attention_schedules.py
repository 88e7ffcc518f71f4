"""Random schedules of attention's pipeline: one producer, consumers, and three rings.

Queries, keys and values have a ring each; a block of values is asked for one block
later than its keys. Tiles may see no block at all, and consumers may pass over some
blocks. Kernels: attention_sm90.cuh; the hazards are those of ``schedules``. Caller: the
tests.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from tracea_jax.ir.pipeline import Ring
from tracea_jax.ir.schedules import Agent, Barrier, Hazard, Slot, run_agents


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What the roles do; each rule that is broken is caught by some schedule.

    Attributes:
      stages: of the rings of keys and of values.
      consumers: warpgroups, each with queries and results of its own.
      stages_q: tiles of queries that there is room for.
      follows: whether the last weights of a tile meet their values while the next tile
        begins, which has its queries by then.
      skips: whether the first blocks of a tile are seen by its last consumers only, and
        the last blocks by its first.
      ping_pong: whether a turn goes round among consumers, for each block but a tile's
        first; also for that where a tile follows the one before or blocks are skipped.
      in_place: whether results are staged where the queries were.
      awaits_queries: whether the producer waits until queries were read.
      awaits_store: whether results in place are stored before queries may come.
      announces_blind: whether, in place, a tile that sees no block is announced too.
      places: where the producer hands tiles over if only it knows what they see; 0 if
        consumers know. Each tile is then announced, and the end.
      releases_late: whether keys are released when they were multiplied, not before.
    """

    stages: int
    consumers: int
    stages_q: int = 1
    follows: bool = False
    skips: bool = False
    ping_pong: bool = True
    in_place: bool = False
    awaits_queries: bool = True
    awaits_store: bool = True
    announces_blind: bool = True
    places: int = 0
    releases_late: bool = True

    def own(self, count: int, consumer: int) -> range:
        """Which of a tile's blocks a consumer multiplies."""
        last = consumer * self.skips
        first = min(count, (self.consumers - 1) * self.skips - last)
        return range(first, max(first, count - last))


class _Operand:
    """A ring in shared memory: barriers, and what its stages hold."""

    def __init__(self, stages: int, readers: int, parts: int = 1) -> None:
        self.ring = Ring(stages=stages)
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(readers) for _ in range(stages)]
        self.slots = [[Slot() for _ in range(parts)] for _ in range(stages)]

    def is_full(self, step: int) -> bool:
        stage, parity = self.ring.stage(step), self.ring.consumer_parity(step)
        return self.full[stage].passes(parity)

    def is_empty(self, step: int) -> bool:
        stage, parity = self.ring.stage(step), self.ring.producer_parity(step)
        return self.empty[stage].passes(parity)

    def slot(self, step: int, part: int = 0) -> Slot:
        return self.slots[self.ring.stage(step)][part]

    def release(self, step: int) -> None:
        self.empty[self.ring.stage(step)].arrive()


class _Turn:
    """A named barrier that one consumer waits at and the one before it grants."""

    def __init__(self) -> None:
        self.granted = 0

    def grant(self) -> None:
        if self.granted:
            raise Hazard("a turn is granted again before it was taken")
        self.granted = 1


def run_tiles(protocol: Protocol, blocks: Sequence[int], seed: int) -> None:
    """Run one block of threads over tiles that see so many blocks of keys each.

    Raises:
      Hazard: the schedule is wrong.
    """
    p = protocol
    queries = _Operand(p.stages_q, p.consumers, parts=p.consumers)
    keys, values = (_Operand(p.stages, p.consumers) for _ in range(2))
    places = [Slot() for _ in range(p.places)]
    announces = bool(p.places) or (p.in_place and p.announces_blind)
    turns = [_Turn() for _ in range(p.consumers)]
    agents: list[Agent] = []

    def copy(operand: _Operand, step: int) -> Agent:
        yield lambda: True
        parts = operand.slots[operand.ring.stage(step)]
        for slot in parts:
            slot.write(step, p.consumers if len(parts) == 1 else 1)
            yield lambda: True
        operand.full[operand.ring.stage(step)].complete_bytes(1)

    def load(operand: _Operand, step: int, *, awaits: bool = True) -> Agent:
        if awaits:
            yield lambda: operand.is_empty(step)
        operand.full[operand.ring.stage(step)].arrive(expect_bytes=1)
        agents.append(copy(operand, step))

    def hand_over(tile: int) -> Agent:
        if p.places:
            yield lambda: queries.is_empty(tile)
            places[tile % p.places].write(tile, p.consumers)

    def produce() -> Agent:
        tile = first = 0
        for count in blocks:
            if count:
                yield from load(keys, first)
                yield from hand_over(tile)
                yield from load(queries, tile, awaits=p.awaits_queries)
                for step in range(first + 1, first + count):
                    yield from load(keys, step)
                    yield from load(values, step - 1)
                yield from load(values, first + count - 1)
            elif announces:
                yield from hand_over(tile)
                yield lambda tile=tile: queries.is_empty(tile)
                queries.full[queries.ring.stage(tile)].arrive()
            tile += bool(count) or announces
            first += count
        if p.places:
            yield lambda: queries.is_empty(tile)
            queries.full[queries.ring.stage(tile)].arrive()

    def consume(consumer: int) -> Agent:
        tile = first = 0
        opened: tuple[int, int] | None = None  # a tile and its last block
        if p.ping_pong and consumer == p.consumers - 1:
            turns[0].grant()
        for count in blocks:
            announced = bool(count) or announces
            if announced:
                yield lambda tile=tile: queries.is_full(tile)
            own = p.own(count, consumer)
            for step in range(first, first + own.start):
                yield from skip(consumer, step)
            before: int | None = None  # the block whose weights are there
            for step in range(first + own.start, first + own.stop):
                if before is None and opened:
                    before = opened[1]
                yield from multiply(consumer, step, before)
                if opened:
                    yield from close(consumer, opened[0])
                    opened = None
                before = step
            if count:
                queries.slot(tile, consumer).read(tile)
            if not own and opened:
                yield from end(opened[1])
                yield from close(consumer, opened[0])
                opened = None
            if announced and not p.in_place:
                queries.release(tile)
            if before is None:
                yield from close(consumer, tile, announced=announced)
            elif p.follows:
                opened = tile, before
            else:
                yield from end(before)
                yield from close(consumer, tile)
            for step in range(first + own.stop, first + count):
                yield from skip(consumer, step)
            tile += announced
            first += count
        if p.places:
            yield lambda: queries.is_full(tile)
        if opened:
            yield from end(opened[1])
            yield from close(consumer, opened[0])

    def take_turn(consumer: int) -> Agent:
        if p.ping_pong:
            yield lambda: bool(turns[consumer].granted)
            turns[consumer].granted = 0

    def grant_turn(consumer: int) -> None:
        if p.ping_pong:
            turns[(consumer + 1) % p.consumers].grant()

    def multiply(consumer: int, step: int, before: int | None) -> Agent:
        """Queries and a block of keys; weights and values of the block before."""
        in_turn = before is not None or p.follows or p.skips
        yield lambda: keys.is_full(step)
        if in_turn:
            yield from take_turn(consumer)
        if not p.releases_late:
            keys.release(step)
        yield lambda: True
        if before is not None:
            yield lambda: values.is_full(before)
        if in_turn:
            grant_turn(consumer)
        yield lambda: True
        keys.slot(step).read(step)
        if p.releases_late:
            keys.release(step)
        if before is not None:
            yield lambda: True
            values.slot(before).read(before)
            values.release(before)

    def skip(consumer: int, step: int) -> Agent:
        """A block that others multiply."""
        yield lambda: keys.is_full(step)
        yield from take_turn(consumer)
        grant_turn(consumer)
        yield lambda: values.is_full(step)
        keys.slot(step).read(step)
        values.slot(step).read(step)
        keys.release(step)
        values.release(step)

    def end(last: int) -> Agent:
        yield lambda: values.is_full(last)
        values.slot(last).read(last)
        values.release(last)

    def close(consumer: int, tile: int, announced: bool = True) -> Agent:
        if p.places:
            yield lambda: True
            places[tile % p.places].read(tile)
        if p.in_place:
            yield from stage(consumer, tile, announced)

    def stage(consumer: int, tile: int, announced: bool) -> Agent:
        """Results take the queries' place, and are read by the store."""
        result = -2 - tile
        slot = queries.slot(tile, consumer)
        slot.write(result, 1)
        if announced and not p.awaits_store:
            queries.release(tile)
        yield lambda: True
        slot.read(result)
        if announced and p.awaits_store:
            queries.release(tile)

    agents += [produce(), *(consume(c) for c in range(p.consumers))]
    run_agents(agents, random.Random(seed))
    if any(slot.unread for o in (queries, keys, values) for s in o.slots for slot in s):
        raise Hazard("something was copied that nobody read")


def run_sums(
    tiles: Sequence[Sequence[int]],
    seed: int,
    *,
    resident: int = 2,
    launches_in_order: bool = True,
    barriers: int = 2,
) -> dict[int, list[int]]:
    """Run tiles of keys that add to the sums of blocks of queries, in order.

    Of each tile two consumers stage a part for each block, and two warps, every second
    block each, add both parts when all earlier tiles that see the block have. Kernel:
    tile/attention_sums.cuh.

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
    sums: dict[int, list[int]] = {}
    order = range(len(tiles)) if launches_in_order else reversed(range(len(tiles)))
    agents: list[Agent] = []
    waiting, running = list(order), [0]

    def start() -> None:
        while waiting and running[0] < resident:
            tile = waiting.pop(0)
            running[0] += 1
            agents.extend(_adding(tile))

    def _adding(tile: int) -> list[Agent]:
        blocks = tiles[tile]
        full = [Barrier(2) for _ in range(barriers)]
        empty, parts = Barrier(1), [Slot(), Slot()]
        left = [4]

        def end() -> None:
            left[0] -= 1
            if not left[0]:
                running[0] -= 1
                start()

        def consume(consumer: int) -> Agent:
            for i in range(len(blocks)):
                yield lambda i=i: empty.passes(i % 2 ^ 1)
                parts[consumer].write(i, 1)
                yield lambda: True
                full[i % barriers].arrive()
            end()

        def add(warp: int) -> Agent:
            for i in range(warp, len(blocks), 2):
                barrier = full[i % barriers]
                yield lambda i=i, b=barrier: b.passes(i // barriers % 2)
                block = blocks[i]
                turn = sum(block in other for other in tiles[:tile])
                yield lambda b=block, t=turn: len(sums.get(b, ())) == t
                for part in parts:
                    part.read(i)
                empty.arrive()
                yield lambda: True
                sums.setdefault(block, []).append(tile)
            end()

        return [*map(consume, range(2)), *map(add, range(2))]

    start()
    run_agents(agents, random.Random(seed))
    return sums
