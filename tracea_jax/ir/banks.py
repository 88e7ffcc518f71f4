"""Bank conflicts of one warp-wide shared-memory access.

Shared memory has 32 banks of 4-byte words: bank(a) = (a div 4) mod 32. A warp's access
is served in phases of 128 bytes:

    bytes per lane     phases x lanes
    1, 2, 4            1 x 32
    8                  2 x 16
    16, ldmatrix,      4 x 8
    stmatrix           (a matrix is a phase: its lanes supply eight rows of 16 bytes)

The degree of a phase is the largest number of *distinct* words in one bank: the same
word asked for twice is a broadcast, not a conflict. (CUDA C++ Programming Guide,
"Shared Memory"; checked against the textbook cases in tests/test_ir_banks.py.)
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable

from tracea_jax.ir.address import Address

BANKS = 32
WORD_BYTES = 4
WARP_LANES = 32

_LANES_PER_PHASE = {1: 32, 2: 32, 4: 32, 8: 16, 16: 8}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conflicts:
    """The conflict degree of each phase of an access."""

    degrees: tuple[int, ...]

    @property
    def cost(self) -> int:
        """Transactions needed."""
        return sum(self.degrees)

    @property
    def ideal(self) -> int:
        """Transactions needed without conflicts: the number of phases."""
        return len(self.degrees)

    @property
    def worst(self) -> int:
        """The largest degree; 1 means that the access is free of conflicts."""
        return max(self.degrees)

    @property
    def is_free(self) -> bool:
        return self.worst == 1

    def __str__(self) -> str:
        return f"{self.cost} transactions for {self.ideal} (degrees {self.degrees})"


def simulate(
    address: Callable[[int], int], *, width: int, lanes: int = WARP_LANES
) -> Conflicts:
    """Conflicts of an access of ``width`` bytes for each of the first ``lanes`` lanes.

    Args:
      address: lane -> byte address, a multiple of ``width``.
      width: 1, 2, 4, 8 or 16 bytes for each lane. ldmatrix and stmatrix of n matrices
        are accesses of 16 bytes by 8 n lanes.
      lanes: number of active lanes, the first ones of the warp.

    Raises:
      ValueError: ``width`` or ``lanes`` is not allowed, or an address is misaligned.
    """
    if width not in _LANES_PER_PHASE:
        raise ValueError(f"{width=} must be one of {sorted(_LANES_PER_PHASE)} bytes")
    if not 1 <= lanes <= WARP_LANES:
        raise ValueError(f"{lanes=} must be in 1 .. {WARP_LANES}")
    starts = [address(lane) for lane in range(lanes)]
    for lane, start in enumerate(starts):
        if start % width:
            raise ValueError(
                f"lane {lane} accesses {width} bytes at {start}; the address must be a "
                f"multiple of {width}"
            )
    size = _LANES_PER_PHASE[width]
    phases = [starts[first : first + size] for first in range(0, lanes, size)]
    return Conflicts(degrees=tuple(_degree(phase, width) for phase in phases))


def verified(address: Address, *, width: int, lanes: int = WARP_LANES) -> Address:
    """The address itself, once its simulation shows no conflict.

    Only an ``Address`` can be verified: what ``cxx()`` prints is what was evaluated.

    Raises:
      ValueError: the access conflicts.
    """
    conflicts = simulate(address, width=width, lanes=lanes)
    if not conflicts.is_free:
        raise ValueError(
            f"{address.cxx()} has bank conflicts: {conflicts}; every degree must be 1"
        )
    return address


def _degree(starts: Iterable[int], width: int) -> int:
    words_of_bank: dict[int, set[int]] = defaultdict(set)
    for start in starts:
        for word in range(start // WORD_BYTES, (start + width - 1) // WORD_BYTES + 1):
            words_of_bank[word % BANKS].add(word)
    return max(len(words) for words in words_of_bank.values())
