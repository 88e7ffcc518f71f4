"""Which answer runs where the fastest one may give other bits from run to run.

By default equal bits are worth a little time (docs/settings.md, ``deterministic``).
Callers: ``tuning.answers`` and ``model.decision``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

# By what factor a choice whose bits may differ must be faster than one whose bits do
# not: what ``options(deterministic=None)`` promises.
WORTH = 1.03

T = TypeVar("T")


def steadiest(
    ranked: Sequence[T],
    time_us: Callable[[T], float | None],
    varies: Callable[[T], bool],
) -> T:
    """The first one, or one of equal bits that is hardly slower.

    Args:
      ranked: at least one, the fastest first.
      time_us: measured or predicted; None if it is not known.
      varies: whether bits of its results may differ from run to run.
    """
    first = ranked[0]
    fastest_us = time_us(first)
    if fastest_us is None or not varies(first):
        return first
    most_us = WORTH * fastest_us
    close = (x for x in ranked if (us := time_us(x)) is not None and us <= most_us)
    return next((x for x in close if not varies(x)), first)
