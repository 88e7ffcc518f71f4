"""What other shapes teach a search: configs to begin with, and observations.

Shapes share a model of inefficiency: the time by what the problem takes at least on the
device. So observations of one shape, which may take a thousand times as long, tell
which configs are good for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tracea_jax import variants
from tracea_jax.device import Device
from tracea_jax.policy import Choice, space_of
from tracea_jax.problem import Problem
from tracea_jax.tuning import goals, roofline
from tracea_jax.tuning.answers.legality import legal_choice
from tracea_jax.tuning.answers.neighbours import Neighbour, octaves
from tracea_jax.tuning.search.batches import History
from tracea_jax.tuning.search.candidates import Candidates
from tracea_jax.tuning.store.records import Best

SEEDS = 6  # configs that are taken over from neighbours, or from other environments
SHAPE_SCALE = 4.0  # octaves that make a unit of the surrogate's shape features


def seeds(
    answers: Iterable[Best | None], problem: Problem, device: Device
) -> tuple[Choice, ...]:
    """The configs of the first answers, of whatever shape or place, legal here."""
    found = (
        legal_choice(best.variant, best.config, problem, device)
        for best in answers
        if best is not None and best.variant != "xla"
    )
    legal = dict.fromkeys(c for c in found if isinstance(c, Choice))
    return tuple(legal)[:SEEDS]


def of(
    near: Sequence[Neighbour],
    problem: Problem,
    device: Device,
    candidates: Candidates,
    goal: str,
) -> History | None:
    """The neighbours' observations of configs that are candidates here."""
    rows = [row for n in near for row in _rows(n, device, candidates, goal)]
    if not rows:
        return None
    places, shapes, values, modelled = zip(*rows, strict=True)
    is_modelled = candidates.log_prior is not None and None not in modelled
    return History(
        features=candidates.features[list(places)],
        shapes=np.array(shapes),
        values=np.log(values),
        shape=_shape(problem),
        log_prior=np.log(modelled) if is_modelled else None,
    )


def floor_us(problem: Problem, device: Device) -> float:
    """What times are divided by: a bound for the device, or 1 if none is known."""
    return roofline.floor_us(problem, device) or 1.0


def _rows(
    neighbour: Neighbour, device: Device, candidates: Candidates, goal: str
) -> Iterator[tuple[int, np.ndarray, float, float | None]]:
    """(candidate, shape, time and modelled time by the bound) of each observation."""
    problem = neighbour.problem
    shape, floor = _shape(problem), floor_us(problem, device)
    for observation in neighbour.observations:
        score = goals.score_us(observation, goal)
        place = candidates.place(observation.identity)
        if score and place is not None and not observation.extra.get("abandoned"):
            modelled = _modelled_us(problem, device, candidates.choices[place])
            yield place, shape, score / floor, modelled and modelled / floor


def _modelled_us(problem: Problem, device: Device, choice: Choice) -> float | None:
    variant = variants.get(problem.op, choice.variant)
    space = space_of(variant, problem, device)
    place = space.index(choice.config)
    if space.modelled_us is None or place is None:
        return None
    return float(space.modelled_us[place])


def _shape(problem: Problem) -> np.ndarray:
    return np.array(octaves(problem)) / SHAPE_SCALE
