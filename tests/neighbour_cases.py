"""Problems that are neighbours of each other, and what was measured of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from synthetic_bench import PROBLEM

from tracea_jax.problem import GemmProblem
from tracea_jax.tuning.answers import neighbours
from tracea_jax.tuning.answers.neighbours import Neighbour
from tracea_jax.tuning.store.records import Best, Observation, union


def rows(neighbour: Any) -> int:
    return neighbour.problem.m


def shaped(m=96, n=80, k=64, **other) -> GemmProblem:
    return dataclasses.replace(PROBLEM, m=m, n=n, k=k, **other)


def observed(tile, time_us, raced=True):
    extra = {"protocol": "race" if raced else "steady"}
    return Observation(
        variant="tiled",
        config={"tile": tile},
        time_us=time_us,
        repeats=9,
        extra=extra,
    )


def near(problem, times, *, to=PROBLEM, xla_us=1e9, extra=()):
    """A neighbour with the times of its tiles, all of which raced."""
    best = min(times, key=times.__getitem__)
    shift = np.subtract(neighbours.octaves(problem), neighbours.octaves(to))
    return Neighbour(
        problem=problem,
        distance=float(np.linalg.norm(shift)),
        origin="tuned",
        best=Best(
            variant="tiled",
            config={"tile": best},
            time_us=times[best],
            xla_us=xla_us,
        ),
        observations=union([*(observed(t, us) for t, us in times.items()), *extra]),
    )
