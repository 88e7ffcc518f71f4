"""The best-known time of each config of a problem, from its race and observations.

``recorded``, ``neighbours`` and ``interpolate`` rank configs by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from tracea_jax.tuning.store.records import Best, Observation, identity


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A time that was measured for one problem.

    Attributes:
      variant, config: of what, the config as plain data.
      code: what it compiled; see ``Observation``.
      time_us: of the last race if it was in one.
      is_verified: whether it is known to compute correctly. A config that was not
        verified may be fast and wrong.
      identity: equal for the same config; see ``records.identity``.
    """

    variant: str
    config: dict[str, Any]
    code: str
    time_us: float
    is_verified: bool
    identity: str


def timed(best: Best | None, observations: Iterable[Observation]) -> tuple[Timed, ...]:
    """The best-known time of each config, the fastest first.

    A time at which a measurement was given up does not count.
    """
    found: dict[str, Timed] = {}
    times = [] if best is None else _of_race(best)
    # Only what computed correctly comes into a race.
    times += [
        (o.variant, o.config, o.code, o.time_us, o.extra.get("protocol") == "race")
        for o in observations
        if not o.extra.get("abandoned")
    ]
    for variant, config, code, time_us, is_verified in times:
        if variant is None or not time_us:
            continue
        name = identity(variant, config)
        if name not in found:
            found[name] = Timed(
                variant=variant,
                config=config,
                code=code,
                time_us=time_us,
                is_verified=is_verified,
                identity=name,
            )
    return tuple(sorted(found.values(), key=lambda t: (t.time_us, t.identity)))


def _of_race(best: Best) -> list[tuple[Any, Any, Any, Any, bool]]:
    second = best.runner_up
    return [
        (best.variant, best.config, best.code, best.time_us, True),
        (
            second.get("variant"),
            second.get("config"),
            second.get("code", ""),
            second.get("time_us"),
            True,
        ),
        ("xla", {}, "", best.xla_us, True),
    ]
