"""The schedule of a ring: which scores each device computes in each step.

Device r of n holds queries, and at first its own keys. In step s it has the keys of
device j = r - s (mod n). What it computes then is a few blocks of scores, known before
anything runs: queries from..to of its own, keys from..to of those that are there, and a
window on their local positions. A block that a mask empties is in no plan, a step
without blocks is left out, and keys go straight to the next step.

**Contiguous order.** Device r holds positions r T to (r + 1) T. A causal mask leaves
nothing of steps with j > r: the first device is idle in all steps but one, while the
last one computes in all of them.

**Zigzag order.** The sequence is cut into 2n chunks, of which device r holds r and
2n - 1 - r. In step 0 it computes plain causal attention: its positions increase. Later
it meets the chunks j and 2n - 1 - j:

    j < r   both of its chunks follow j and precede 2n - 1 - j, as r < n <= 2n - 1 - r
            and 2n - 1 - r < 2n - 1 - j: all queries see the front half of the keys.
    j > r   chunk r precedes both, and chunk 2n - 1 - r follows both: the back half of
            the queries sees all keys.

Both are two of four pairs of chunks, without a mask, so all devices have equal work in
every step. With an odd number of local positions the front chunks have one more.

Sources: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for
Near-Infinite Context" (2023) for the ring; Brandon et al., "Striped Attention: Faster
Ring Attention for Causal Transformers" (2023) for equal causal work by another order of
the sequence; chunks from both ends are how Llama 3 was trained ("The Llama 3 Herd of
Models", 2024, section 3.3.2, context parallelism).

Positions here are integers; no JAX is in this module. Caller: ``attend``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

Order = Literal["contiguous", "zigzag"]
ORDERS: tuple[Order, ...] = ("contiguous", "zigzag")

Range = tuple[int, int]  # from the first position to the one after the last


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Query i sees keys i - left <= j <= i + right; None for a side without limit."""

    left: int | None = None
    right: int | None = None

    def moved(self, ahead: int) -> Window:
        """The same on local positions, where query 0 is ``ahead`` positions ahead of
        key 0."""
        left = None if self.left is None else self.left - ahead
        right = None if self.right is None else self.right + ahead
        return Window(left=left, right=right)

    def within(self, queries: int, keys: int) -> Window:
        """Without the sides that exclude nothing of so many queries and keys."""
        left, right = self.left, self.right
        return Window(
            left=None if left is None or left >= queries - 1 else left,
            right=None if right is None or right >= keys - 1 else right,
        )

    def scores(self, queries: int, keys: int) -> int:
        """How many pairs of so many queries and keys see each other."""

        def up_to(ahead: int) -> int:  # pairs with j - i <= ahead
            return triangle(queries + ahead) - triangle(ahead)

        def triangle(x: int) -> int:  # the sum of min(t, keys) for t = 1 .. x
            rows = min(max(x, 0), keys)
            return rows * (rows + 1) // 2 + max(x - keys, 0) * keys

        right = keys if self.right is None else self.right
        before = -queries if self.left is None else -self.left - 1
        return max(up_to(right) - up_to(before), 0)

    def hides_rows(self, queries: int, keys: int) -> bool:
        """Whether some of so many queries see none of the keys."""
        left, right = self.left, self.right
        if right is not None and right < 0:
            return True  # query 0
        if left is not None and left < queries - keys:
            return True  # the last query
        return left is not None and right is not None and left + right < 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Positions that follow each other, on one device.

    Attributes:
      start: the first one's place among those of the device.
      position: its place in the whole sequence.
      size: how many there are.
    """

    start: int
    position: int
    size: int

    @property
    def range(self) -> Range:
        return self.start, self.start + self.size


def chunks(order: Order, rank: int, devices: int, length: int) -> tuple[Chunk, ...]:
    """The chunks of one device, which has ``length`` positions; none is empty."""
    front = length if order == "contiguous" else -(-length // 2)
    back = length - front
    behind = devices * front + (devices - 1 - rank) * back
    first = Chunk(start=0, position=rank * front, size=front)
    second = Chunk(start=front, position=behind, size=back)
    if first.position + front == behind:  # they touch
        second = dataclasses.replace(second, size=0)
        first = dataclasses.replace(first, size=length)
    return tuple(chunk for chunk in (first, second) if chunk.size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Scores that one call computes.

    Attributes:
      queries, keys: which of those on the device.
      window: on their positions in the block.
    """

    queries: Range
    keys: Range
    window: Window

    @property
    def shape(self) -> tuple[int, int]:
        (first, last), (start, stop) = self.queries, self.keys
        return last - first, stop - start

    @property
    def scores(self) -> int:
        """How many of its scores are seen."""
        return self.window.scores(*self.shape)

    @property
    def hides_rows(self) -> bool:
        """Whether the window hides all keys of the block from some query."""
        return self.window.hides_rows(*self.shape)


Case = tuple[Block, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a ring.

    Attributes:
      shift: device r has the keys of device r - shift.
      cases: the blocks of a device, each that occurs once.
      case_of: which of them each device computes.
    """

    shift: int
    cases: tuple[Case, ...]
    case_of: tuple[int, ...]

    def of(self, rank: int) -> Case:
        return self.cases[self.case_of[rank]]


@functools.lru_cache(maxsize=256)
def plan(
    order: Order, devices: int, q_len: int, kv_len: int, window: Window
) -> tuple[Step, ...]:
    """The steps in which any device computes anything.

    Args:
      order: of queries and keys.
      devices: how many there are.
      q_len, kv_len: queries and keys of each device.
      window: of the whole sequence.
    """
    queries = [chunks(order, rank, devices, q_len) for rank in range(devices)]
    keys = [chunks(order, rank, devices, kv_len) for rank in range(devices)]
    steps = list[Step]()
    for shift in range(devices):
        cases = [_blocks(queries[r], keys[r - shift], window) for r in range(devices)]
        unique = tuple(dict.fromkeys(cases))
        if any(unique):
            case_of = tuple(map(unique.index, cases))
            steps.append(Step(shift=shift, cases=unique, case_of=case_of))
    return tuple(steps)


def longest(steps: tuple[Step, ...]) -> int:
    """Scores that are computed one after another: in each step the most of a device."""
    return sum(
        max(sum(block.scores for block in case) for case in step.cases)
        for step in steps
    )


def _blocks(
    queries: tuple[Chunk, ...], keys: tuple[Chunk, ...], window: Window
) -> Case:
    """What queries compute of keys, in as few blocks as are easily found."""
    if queries == keys and window == Window(right=0):
        every = (0, sum(chunk.size for chunk in queries))
        return (Block(queries=every, keys=every, window=window),)
    blocks = list[Block]()
    for own in queries:
        for other in keys:
            ahead = own.position - other.position
            local = window.moved(ahead).within(own.size, other.size)
            block = Block(queries=own.range, keys=other.range, window=local)
            if block.scores:
                blocks.append(block)
    return _joined(blocks)


def _joined(blocks: list[Block]) -> Case:
    """The blocks, those that touch and are seen whole as one."""
    found = list[Block]()
    for block in blocks:  # of one chunk of queries, keys follow each other
        last = found[-1] if found else None
        if last and _touch(last, block) and last.queries == block.queries:
            keys = last.keys[0], block.keys[1]
            found[-1] = dataclasses.replace(last, keys=keys)
        else:
            found.append(block)
    rows = list[Block]()
    for block in found:
        above = [b for b in rows if b.keys == block.keys and _touch(b, block)]
        if above:
            (one,) = above
            queries = one.queries[0], block.queries[1]
            rows[rows.index(one)] = dataclasses.replace(one, queries=queries)
        else:
            rows.append(block)
    return tuple(rows)


def _touch(first: Block, second: Block) -> bool:
    """Whether both are seen whole, and the second begins where the first one ends."""
    whole = first.window == second.window == Window()
    beside = first.keys[1] == second.keys[0] and first.queries == second.queries
    below = first.queries[1] == second.queries[0] and first.keys == second.keys
    return whole and (beside or below)
