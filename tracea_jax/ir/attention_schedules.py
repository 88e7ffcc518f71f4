"""Random schedules of attention's pipeline: one producer, consumers, and three rings.

Queries, keys and values have a ring each; a block of values is asked for one block
later than its keys. Tiles may see no block at all, and consumers may pass over some
blocks. Kernels: attention_sm90.cuh; the hazards are those of ``schedules``. Caller: the
tests.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Generator, Sequence

from tracea_jax.ir.pipeline import Ring
from tracea_jax.ir.schedules import Agent, Barrier, Condition, Hazard, Slot, run_agents


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The actions of the roles; some schedule exposes each broken rule.

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

    @property
    def announces(self) -> bool:
        """Returns whether a tile that sees no block is announced, too."""
        return bool(self.places) or (self.in_place and self.announces_blind)

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


class _Memory:
    """State shared by roles: rings of operands, places of tiles, turns of consumers."""

    def __init__(self, protocol: Protocol) -> None:
        p = protocol
        self.queries = _Operand(p.stages_q, p.consumers, parts=p.consumers)
        self.keys = _Operand(p.stages, p.consumers)
        self.values = _Operand(p.stages, p.consumers)
        self.places = [Slot() for _ in range(p.places)]
        self.turns = [_Turn() for _ in range(p.consumers)]

    def place(self, tile: int) -> Slot:
        return self.places[tile % len(self.places)]

    @property
    def is_unread(self) -> bool:
        """Returns whether something was copied whose readers are still to come."""
        operands = (self.queries, self.keys, self.values)
        return any(slot.unread for o in operands for stage in o.slots for slot in stage)


def run_tiles(protocol: Protocol, blocks: Sequence[int], seed: int) -> None:
    """Run one block of threads over tiles that see so many blocks of keys each.

    Raises:
      Hazard: the schedule is wrong.
    """
    memory = _Memory(protocol)
    agents: list[Agent] = []
    agents.append(_Producer(protocol, memory, agents).run(blocks))
    consumers = (_Consumer(protocol, memory, n) for n in range(protocol.consumers))
    agents.extend(consumer.run(blocks) for consumer in consumers)
    run_agents(agents, random.Random(seed))
    if memory.is_unread:
        raise Hazard("something was copied that nobody read")


class _Producer:
    """The warp that asks for copies; each is an agent of its own while in flight."""

    def __init__(
        self, protocol: Protocol, memory: _Memory, agents: list[Agent]
    ) -> None:
        self.protocol, self.memory, self.agents = protocol, memory, agents

    def run(self, blocks: Sequence[int]) -> Agent:
        tile = first = 0
        for count in blocks:
            if count:
                yield from self._load_tile(tile, first, count)
            elif self.protocol.announces:
                yield from self._hand_over(tile)
                yield from self._announce(tile)
            tile += bool(count) or self.protocol.announces
            first += count
        if self.protocol.places:  # the end
            yield from self._announce(tile)

    def _load_tile(self, tile: int, first: int, count: int) -> Agent:
        m = self.memory
        yield from self._load(m.keys, first)
        yield from self._hand_over(tile)
        yield from self._load(m.queries, tile, awaits=self.protocol.awaits_queries)
        for step in range(first + 1, first + count):
            yield from self._load(m.keys, step)
            yield from self._load(m.values, step - 1)
        yield from self._load(m.values, first + count - 1)

    def _load(self, operand: _Operand, step: int, *, awaits: bool = True) -> Agent:
        if awaits:
            yield lambda: operand.is_empty(step)
        operand.full[operand.ring.stage(step)].arrive(expect_bytes=1)
        self.agents.append(self._copy(operand, step))

    def _copy(self, operand: _Operand, step: int) -> Agent:
        yield lambda: True
        parts = operand.slots[operand.ring.stage(step)]
        for slot in parts:
            slot.write(step, self.protocol.consumers if len(parts) == 1 else 1)
            yield lambda: True
        operand.full[operand.ring.stage(step)].complete_bytes(1)

    def _hand_over(self, tile: int) -> Agent:
        if self.protocol.places:
            yield lambda: self.memory.queries.is_empty(tile)
            self.memory.place(tile).write(tile, self.protocol.consumers)

    def _announce(self, tile: int) -> Agent:
        """Without queries."""
        queries = self.memory.queries
        yield lambda: queries.is_empty(tile)
        queries.full[queries.ring.stage(tile)].arrive()


class _Consumer:
    """A warpgroup that multiplies its own part of each tile's queries."""

    def __init__(self, protocol: Protocol, memory: _Memory, number: int) -> None:
        self.protocol, self.memory, self.number = protocol, memory, number
        # A tile, and its last block, whose weights have yet to meet their values.
        self.opened: tuple[int, int] | None = None

    def run(self, blocks: Sequence[int]) -> Agent:
        p, m = self.protocol, self.memory
        if p.ping_pong and self.number == p.consumers - 1:
            m.turns[0].grant()
        tile = first = 0
        for count in blocks:
            yield from self._attend(tile, first, count)
            tile += bool(count) or p.announces
            first += count
        if p.places:
            yield lambda: m.queries.is_full(tile)
        yield from self._end_opened()

    def _attend(self, tile: int, first: int, count: int) -> Agent:
        """A tile that sees ``count`` blocks from ``first`` on."""
        p, queries = self.protocol, self.memory.queries
        announced = bool(count) or p.announces
        if announced:
            yield lambda: queries.is_full(tile)
        own = p.own(count, self.number)
        for step in range(first, first + own.start):
            yield from self._skip(step)
        last = yield from self._multiply_all(range(first + own.start, first + own.stop))
        if count:
            queries.slot(tile, self.number).read(tile)
        if last is None:
            yield from self._end_opened()
        if announced and not p.in_place:
            queries.release(tile)
        if last is None:
            yield from self._close(tile, announced)
        else:
            self.opened = tile, last
            if not p.follows:
                yield from self._end_opened()
        for step in range(first + own.stop, first + count):
            yield from self._skip(step)

    def _multiply_all(self, steps: range) -> Generator[Condition, None, int | None]:
        """Blocks of one tile, of which the last is returned; the opened tile closes."""
        before: int | None = None  # the block whose weights are there
        for step in steps:
            opened, self.opened = self.opened, None
            if opened:
                before = opened[1]
            yield from self._multiply(step, before)
            if opened:
                yield from self._close(opened[0])
            before = step
        return before

    def _multiply(self, step: int, before: int | None) -> Agent:
        """Queries and a block of keys; weights and values of the block before."""
        p, keys, values = self.protocol, self.memory.keys, self.memory.values
        in_turn = before is not None or p.follows or p.skips
        yield lambda: keys.is_full(step)
        if in_turn:
            yield from self._take_turn()
        if not p.releases_late:
            keys.release(step)
        yield lambda: True
        if before is not None:
            yield lambda: values.is_full(before)
        if in_turn:
            self._grant_turn()
        yield lambda: True
        keys.slot(step).read(step)
        if p.releases_late:
            keys.release(step)
        if before is not None:
            yield lambda: True
            values.slot(before).read(before)
            values.release(before)

    def _skip(self, step: int) -> Agent:
        """A block that others multiply."""
        keys, values = self.memory.keys, self.memory.values
        yield lambda: keys.is_full(step)
        yield from self._take_turn()
        self._grant_turn()
        yield lambda: values.is_full(step)
        keys.slot(step).read(step)
        values.slot(step).read(step)
        keys.release(step)
        values.release(step)

    def _take_turn(self) -> Agent:
        if self.protocol.ping_pong:
            turn = self.memory.turns[self.number]
            yield lambda: bool(turn.granted)
            turn.granted = 0

    def _grant_turn(self) -> None:
        if self.protocol.ping_pong:
            self.memory.turns[(self.number + 1) % self.protocol.consumers].grant()

    def _end_opened(self) -> Agent:
        """The last weights of the opened tile, if there is one, and its results."""
        if not self.opened:
            return
        (tile, last), values = self.opened, self.memory.values
        self.opened = None
        yield lambda: values.is_full(last)
        values.slot(last).read(last)
        values.release(last)
        yield from self._close(tile)

    def _close(self, tile: int, announced: bool = True) -> Agent:
        if self.protocol.places:
            yield lambda: True
            self.memory.place(tile).read(tile)
        if self.protocol.in_place:
            yield from self._stage(tile, announced)

    def _stage(self, tile: int, announced: bool) -> Agent:
        """Results take the queries' place, and are read by the store."""
        queries, awaits_store = self.memory.queries, self.protocol.awaits_store
        result = -2 - tile
        slot = queries.slot(tile, self.number)
        slot.write(result, 1)
        if announced and not awaits_store:
            queries.release(tile)
        yield lambda: True
        slot.read(result)
        if announced and awaits_store:
            queries.release(tile)
