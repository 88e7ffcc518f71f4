"""Answers: remembered choices that are legal for the problem that was asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from tracea_jax import variants
from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.schema import check_types
from tracea_jax.tuning.store.environment import Environment
from tracea_jax.tuning.store.records import Best, Observation, identity


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A choice, legal for the problem that was asked, and how it is known.

    Attributes:
      choice: variant and config.
      origin: "tuned" on this machine, "shared" by a cache that is only read, "shipped"
        with the package, "inherited" from a kindred device, or "interpolated" from
        other shapes.
      time_us, xla_us, ratio: as in ``Best``; predicted if the answer is interpolated.
      neighbours: how many tuned problems an interpolated answer was predicted from.
      measured_in: the environment that all this is known from, if it is another one.
    """

    choice: Choice
    origin: str
    time_us: float | None
    xla_us: float | None
    ratio: float | None
    neighbours: int = 0
    measured_in: Environment | None = None

    @property
    def is_exact(self) -> bool:
        """Whether this very problem was measured in this environment."""
        return self.origin in ("tuned", "shared", "shipped")


def legal(best: Best, origin: str, problem: Problem, device: Device) -> Answer | str:
    """The answer that ``best`` stands for, or why it may not be used any more."""
    choice = legal_choice(best.variant, best.config, problem, device)
    if isinstance(choice, str):
        return f"the {origin} answer {best.variant} {choice}"
    return Answer(
        choice=choice,
        origin=origin,
        time_us=best.time_us,
        xla_us=best.xla_us,
        ratio=best.ratio,
    )


def legal_choice(
    variant: str, config: dict[str, Any], problem: Problem, device: Device
) -> Choice | str:
    """The choice of a recorded config, or why it cannot run, as a phrase."""
    try:
        found = variants.get(problem.op, variant)
        value = variants.config_from_json(found, hashable(config))
        if (reason := found.why_not(problem, device)) is not None:
            return f"cannot run: {reason}"
        found.check(problem, value, device)
        check_types(value)
    # Values of a wrong type raise whatever they meet.
    except (ValueError, TypeError, AttributeError, ArithmeticError, LookupError) as e:
        return f"is not legal: {e}"
    return Choice(variant=variant, config=value)


def hashable(config: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where configs have tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A time that was measured for one problem.

    Attributes:
      variant, config: of what, the config as plain data.
      time_us: of the last race if it was in one.
      is_verified: whether it is known to compute correctly. What is not may be fast and
        wrong.
      identity: equal for the same config; see ``records.identity``.
    """

    variant: str
    config: dict[str, Any]
    time_us: float
    is_verified: bool
    identity: str


def timed(best: Best | None, observations: Iterable[Observation]) -> tuple[Timed, ...]:
    """The best-known time of each config, the fastest first.

    A time at which a measurement was given up is none.
    """
    found: dict[str, Timed] = {}
    times = [] if best is None else _of_race(best)
    # Only what computed correctly comes into a race.
    times += [
        (o.variant, o.config, o.time_us, o.extra.get("protocol") == "race")
        for o in observations
        if not o.extra.get("abandoned")
    ]
    for variant, config, time_us, is_verified in times:
        if variant is None or not time_us:
            continue
        name = identity(variant, config)
        if name not in found:
            found[name] = Timed(
                variant=variant,
                config=config,
                time_us=time_us,
                is_verified=is_verified,
                identity=name,
            )
    return tuple(sorted(found.values(), key=lambda t: (t.time_us, t.identity)))


def _of_race(best: Best) -> list[tuple[Any, Any, Any, bool]]:
    second = best.runner_up
    return [
        (best.variant, best.config, best.time_us, True),
        (second.get("variant"), second.get("config"), second.get("time_us"), True),
        ("xla", {}, best.xla_us, True),
    ]
