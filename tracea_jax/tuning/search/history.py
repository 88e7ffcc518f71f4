"""Knowledge from other shapes for a search: configs to begin with, and observations.

All shapes share one model of inefficiency, the time divided by the least time that the
problem can take on the device. So observations of a shape that takes a thousand times
as long still show which configs are good for this one. Which shapes are neighbours is
decided in ``answers.neighbours``; the caller is ``tuning.tuner``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tracea_jax import roofline, variants
from tracea_jax.device import Device
from tracea_jax.policy import Choice, space_of
from tracea_jax.problem import Problem
from tracea_jax.tuning import goals
from tracea_jax.tuning.answers.legality import legal_choice
from tracea_jax.tuning.answers.neighbours import Neighbour, octaves
from tracea_jax.tuning.search.batches import History
from tracea_jax.tuning.search.candidates import Candidates
from tracea_jax.tuning.store.records import Best

SEEDS = 6  # configs taken over from neighbours, and as many from other environments
SHAPE_SCALE = 4.0  # octaves (factors of two) in one unit of the shape features


def seeds(
    answers: Iterable[Best | None], problem: Problem, device: Device
) -> tuple[Choice, ...]:
    """The first answers' choices that are legal for the problem, ``SEEDS`` at most.

    Args:
      answers: of other problems or environments, the most relevant first.
    """
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
    """The neighbours' observations whose configs are candidates; None without any."""
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
    """The divisor of times: the roofline's bound in us, or 1 if none is known."""
    return roofline.floor_us(problem, device) or 1.0


def _rows(
    neighbour: Neighbour, device: Device, candidates: Candidates, goal: str
) -> Iterator[tuple[int, np.ndarray, float, float | None]]:
    """One row for each observation that counts.

    Yields:
      (candidate's index, shape features, time / bound, modelled time / bound or None).
    """
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
