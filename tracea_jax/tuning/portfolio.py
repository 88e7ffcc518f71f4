"""The fewest configs that serve several problems almost as well as their own best.

A set cover: a config covers a problem if its time is at most (1 + fraction) x the time
of the problem's own best config. The cover is chosen greedily; configs that the others
make superfluous are then dropped. Here is only the computation, without measurements:
``tuning.sharing`` measures missing times and records the result. ``campaign.text``
prints a portfolio.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from tracea_jax.problem import Problem

P = TypeVar("P", bound=Hashable)

Times = Mapping[P, Mapping[str, float]]  # problem -> identity of a config -> its time
Best = Mapping[P, float]  # problem -> time of its own answer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A config of the portfolio.

    Attributes:
      op, variant, config: name the choice; the config is plain data.
      problems: problems whose answer the config is.
      worst: largest ratio, over the problems, of the config's time to the time of the
        problem's own best; at least 1.
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
    """Few configs that serve every problem whose answer is one of our kernels.

    Attributes:
      fraction: how much slower than its own best a problem may be served; 0.02 is 2 %.
      configs: the config that serves most problems first.
      measured: number of (config, problem) times that were missing and were measured.
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
    """True if a time is close enough to the best; a missing time (None) is not."""
    return time_us is not None and time_us <= (1 + fraction) * best_us


def covered(times: Times[P], best: Best[P], fraction: float) -> dict[str, list[P]]:
    """The problems that each config covers; configs that cover none are left out."""
    found: dict[str, list[P]] = {}
    for problem, row in times.items():
        for config, time_us in sorted(row.items()):
            if covers(time_us, best[problem], fraction):
                found.setdefault(config, []).append(problem)
    return found


def cover(times: Times[P], best: Best[P], fraction: float) -> tuple[str, ...]:
    """Configs that cover every problem, as few as a greedy choice needs.

    Args:
      times: of each problem by config; the problem's own answer must be among them.
      best: time of each problem's own answer.
      fraction: how much slower than the best is good enough; 0.02 is 2 %.

    Returns:
      The configs' identities, the one that serves most problems first. Among configs
      that serve equally many, the lower sum of relative times goes first, then the
      order of identities.

    Raises:
      ValueError: if no config covers one of the problems.
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
    """The pairs (problem, config) that are worth measuring.

    The config covers another problem and has no time for this one. Configs that cover
    the most problems come first.
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
