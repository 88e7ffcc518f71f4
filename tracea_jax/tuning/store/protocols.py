"""Which of its measured times decided a race, and how an answer came into it.

The times themselves are in ``store.records``. Callers: records, ``tuning.goals`` and
whatever prints answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# How answers came into their race, for people, by ``Best.origin``.
ORIGINS = {
    "hero": "default config",
    "search": "tuned config",
    "portfolio": "shared config",
    "xla": "XLA",
}
# The remark of a tuning that has the times of what runs untuned, in the last race.
UNTUNED = "untuned"
_TIMES = ("time_us", "cold_us", "kernel_us")
_PROTOCOLS = {"throughput": "steady", "latency": "cold", "balanced": "balanced"}


def deciding(goal: str, *, has_cold: bool) -> str:
    """The protocol by which a race with this goal is decided.

    Without cold times it is "steady", whatever the goal.
    """
    return _PROTOCOLS.get(goal, "steady") if has_cold else "steady"


def by_protocol(
    protocol: str, steady: float | None, cold: float | None
) -> float | None:
    """The time by "steady", "cold" or "balanced"; None if one that it needs is None.

    "balanced" is the geometric mean of both.
    """
    if protocol == "steady":
        return steady
    if protocol == "cold" or steady is None or cold is None:
        return cold
    return math.sqrt(steady * cold)


def untuned_us(tuner: Mapping[str, Any], protocol: str) -> float | None:
    """The time, in the last race, of what runs untuned; None if it is unknown.

    Args:
      tuner: the remarks of the tuning, as of an entry.
      protocol: as ``Best.protocol``.
    """
    seen = tuner.get(UNTUNED)
    steady, cold, kernel = (
        us if isinstance(us, float | int) else None
        for us in map((seen if isinstance(seen, dict) else {}).get, _TIMES)
    )
    return kernel if protocol == "kernels" else by_protocol(protocol, steady, cold)
