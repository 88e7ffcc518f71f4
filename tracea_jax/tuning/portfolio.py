"""The fewest configs that serve several problems almost as well as their own best.

A set cover: a config covers a problem if it takes at most 1 + fraction of the time of
the problem's best. Greedy, then without what others make superfluous.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from tracea_jax.problem import Problem

P = TypeVar("P", bound=Hashable)

Times = Mapping[P, Mapping[str, float]]  # of each problem, by the config's identity
Best = Mapping[P, float]  # the time of each problem's own answer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A config of the portfolio.

    Attributes:
      op, variant, config: what it is, the config as plain data.
      problems: whose answer it is.
      worst: its time by the best of the problem for which that is most, at least 1.
    """

    op: str
    variant: str
    config: dict[str, Any]
    problems: tuple[Problem, ...]
    worst: float

    def to_json(self) -> dict[str, Any]:
        problems = [problem.to_json() for problem in self.problems]
        return {**dataclasses.asdict(self), "problems": problems}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Portfolio:
    """Few configs that serve all problems that XLA does not serve best.

    Attributes:
      fraction: how much slower than its own best a problem may be served.
      configs: see ``Shared``; the one that serves most problems first.
      measured: how many times of a config on a problem were missing and were taken.
    """

    fraction: float
    configs: tuple[Shared, ...]
    measured: int

    @property
    def problems(self) -> int:
        return sum(len(shared.problems) for shared in self.configs)

    def to_json(self) -> dict[str, Any]:
        configs = [shared.to_json() for shared in self.configs]
        return {
            "fraction": self.fraction,
            "measured": self.measured,
            "configs": configs,
        }


def covers(time_us: float | None, best_us: float, fraction: float) -> bool:
    """Whether a time is close enough to the best; what was not measured is not."""
    return time_us is not None and time_us <= (1 + fraction) * best_us


def covered(times: Times[P], best: Best[P], fraction: float) -> dict[str, list[P]]:
    """The problems that each config covers, of configs that cover any."""
    found: dict[str, list[P]] = {}
    for problem, row in times.items():
        for config, time_us in sorted(row.items()):
            if covers(time_us, best[problem], fraction):
                found.setdefault(config, []).append(problem)
    return found


def cover(times: Times[P], best: Best[P], fraction: float) -> tuple[str, ...]:
    """Configs that cover every problem, as few as a greedy choice needs.

    Args:
      times: a problem's own answer must be among them.
      best: see above.
      fraction: how much slower than the best is good enough; 0.02 is 2 %.

    Returns:
      Their identities, the one that serves most problems first. Ties go to the lower
      sum of relative times, then to the order of identities.

    Raises:
      ValueError: if nothing covers one of the problems.
    """
    groups = covered(times, best, fraction)
    left = dict.fromkeys(times)
    chosen: list[str] = []

    def merit(config: str) -> tuple[int, float, str]:
        served = [p for p in groups[config] if p in left]
        slowness = sum(times[p][config] / best[p] for p in served)
        return -len(served), slowness, config

    while left:
        config = min(groups, key=merit, default=None)
        served = [] if config is None else [p for p in groups[config] if p in left]
        if config is None or not served:
            raise ValueError(f"nothing covers {', '.join(map(str, left))}")
        chosen.append(config)
        left = {p: None for p in left if p not in served}
    return _without_superfluous(chosen, groups, list(times))


def gaps(times: Times[P], best: Best[P], fraction: float) -> list[tuple[P, str]]:
    """What is worth measuring: (problem, config) that covers others, unmeasured here.

    Configs that cover more problems already come first.
    """
    groups = covered(times, best, fraction)
    ranked = sorted(groups, key=lambda config: (-len(groups[config]), config))
    return [(p, config) for config in ranked for p in times if config not in times[p]]


def _without_superfluous(
    chosen: list[str], groups: Mapping[str, list[P]], problems: list[P]
) -> tuple[str, ...]:
    for config in reversed(chosen):
        rest = [other for other in chosen if other != config]
        if all(any(p in groups[other] for other in rest) for p in problems):
            chosen = rest
    return tuple(chosen)
