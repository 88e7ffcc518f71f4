"""Neighbours: tuned problems that differ from one in nothing but their extents.

Which sizes are extents, a problem's class says. The distance of two problems is the
Euclidean one of the binary logarithms of their extents, so it counts octaves: 1 if one
extent is twice the other's.

``interpolate`` makes answers from them, and a tuner begins with their configs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tracea_jax import catalogue
from tracea_jax.device import Device
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.tuning.answers.legality import current, current_best
from tracea_jax.tuning.answers.times import Timed, timed
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import canonical, problem_key
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.readers import Readers
from tracea_jax.tuning.store.records import Best, Observation

NEAREST = 8  # neighbours that are looked at
FARTHEST = 4.0  # octaves; beyond, nothing is learnt about which config is best


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Neighbour:
    """A problem near the one that was asked, and what is known about it.

    Attributes:
      problem: the neighbour.
      distance: in octaves, see the module.
      origin: "tuned" on this machine or "shipped".
      best: its answer; None if its tuning was never finished, or its kernels changed.
      observations: all that was measured of kernels as they are.
      times: what ``answers.timed`` makes of both, if that is known already.
    """

    problem: Problem
    distance: float
    origin: str
    best: Best | None
    observations: tuple[Observation, ...]
    times: tuple[Timed, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Point at which something is known about a problem.

    Attributes:
      position: binary logarithms of its extents.
      name: of its entry or journal.
      problem: ``Problem.to_json()``.
      reader: index of the first reader that has it.
    """

    position: tuple[float, ...]
    name: Name
    problem: dict[str, Any]
    reader: int


class Nearby:
    """The problems of one op that some readers know of, as they were when looked at.

    Names are read once, and an entry when it is first one of the nearest.
    """

    def __init__(
        self,
        readers: Readers,
        environment: str,
        op: str,
        device: Device,
        *,
        journals: bool = False,
    ) -> None:
        """Reads all heads.

        Args:
          readers: the first one that knows a problem counts.
          environment: its key.
          op: of the problems.
          device: where the answer is to run.
          journals: whether tunings that were not finished count.
        """
        self._readers = readers
        self._device = device
        self._journals = journals
        self._families: dict[str, dict[Name, Place]] = {}
        self._read: dict[Name, Neighbour | None] = {}
        for i, (_, reader) in enumerate(readers):
            for name, problem in reader.problems(environment, op, journals=journals):
                if (split := _split(problem)) is not None:
                    family, position = split
                    place = Place(
                        position=position, name=name, problem=problem, reader=i
                    )
                    self._families.setdefault(family, {}).setdefault(name, place)

    def of(self, problem: Problem, limit: int = NEAREST) -> tuple[Neighbour, ...]:
        """The nearest problems that can still be read."""
        found: list[Neighbour] = []
        for distance, place in self._nearest(problem.to_json()):
            if len(found) == limit:
                break
            if place.name not in self._read:
                known = self._neighbour(place)
                self._read.setdefault(place.name, known)
            if (known := self._read[place.name]) is not None:
                found.append(dataclasses.replace(known, distance=distance))
        return tuple(found)

    def _neighbour(self, place: Place) -> Neighbour | None:
        """The neighbour stored at a place; None if it cannot be read."""
        origin, reader = self._readers[place.reader]
        try:
            entry = reader.read(place.name, complete=True)
            problem = problem_from_json(place.problem)
        except (ValueError, TypeError):  # damaged, or of a newer version
            return None
        # The key tells a file that was renamed.
        if problem_key(place.problem) != place.name.problem:
            return None
        best = current_best(entry.best, problem, self._device) if entry else None
        observed = entry.observations if entry else ()
        if self._journals and isinstance(reader, Store):
            observed = reader.observations(place.name)
        observed = current(observed, problem, self._device)
        if best is None and not (self._journals and observed):
            return None
        return Neighbour(
            problem=problem,
            distance=0.0,
            origin=origin,
            best=best,
            observations=observed,
            times=timed(best, observed),
        )

    def _nearest(self, problem: dict[str, Any]) -> list[tuple[float, Place]]:
        """(distance, place) of other problems, the nearest first; ties by name."""
        if (split := _split(problem)) is None:
            return []
        family, position = split
        places = self._families.get(family, {}).values()
        near = [(math.dist(position, place.position), place) for place in places]
        near = [(d, place) for d, place in near if 0 < d <= FARTHEST]
        return sorted(near, key=lambda pair: (pair[0], pair[1].name.problem))


def _split(problem: dict[str, Any]) -> tuple[str, tuple[float, ...]] | None:
    """The fields that must be equal, and the extents in octaves; None without any."""
    try:
        extents = catalogue.get(problem["op"]).problem.extents
        position = tuple(math.log2(problem[name]) for name in extents)
    except (KeyError, TypeError, ValueError):  # an extent of 0, or another version's
        return None
    return canonical({k: v for k, v in problem.items() if k not in extents}), position


def octaves(problem: Problem) -> tuple[float, ...]:
    """Binary logarithms of the problem's extents."""
    return tuple(math.log2(getattr(problem, name)) for name in problem.extents)
