"""Answers for shapes that were never measured, from neighbours that were.

    time(p, c) = model(p, c) exp(r(p, c))

The model is the variant's own, ``Space.modelled_us``. For XLA and variants without one
it is a floor that all good kernels are near to: the least modelled time of any variant,
or else the time of the problem's operations or bytes, whichever is longer, at the
highest rates that the neighbours reached. XLA has tiles of other sizes than we, which
may fit where ours are cut off at the edges, so its time is also predicted from the
device's roofline, and the shorter one counts. What a model misses, r, is interpolated
between the neighbours' observations by ordinary kriging, with a covariance that falls
with the distance of the shapes and with that of the configs.

Candidates are the neighbours' best and the policy's defaults, those that are legal for
the problem; the one of the least time is the answer, XLA being one of them. So it
depends on all neighbours, and the nearest one's answer is never just copied. A kernel
predicted less than 5 % faster than XLA is not chosen: predictions err by some percent.
One whose bits may differ from run to run gives way as ``steady`` says.
Neighbours that other variants can serve tell nothing: what rules a variant out, as rows
that are not aligned do, changes the times of XLA as well. Nor do those of an op that
says so (``Problem.only_between``) where all are smaller, or all larger: there the
policy's default stays.

``interpolated`` is a source of ``knowledge.Knowledge``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tracea_jax import roofline, variants
from tracea_jax.device import Device
from tracea_jax.diagnosis import Diagnosis, diagnose
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning.answers import kindred
from tracea_jax.tuning.answers.answer import Answer, Question
from tracea_jax.tuning.answers.evidence import Evidence
from tracea_jax.tuning.answers.kriging import features_of, krige
from tracea_jax.tuning.answers.legality import hashable, read_choice
from tracea_jax.tuning.answers.neighbours import Neighbour, octaves
from tracea_jax.tuning.answers.times import Timed, timed
from tracea_jax.tuning.store.records import identity
from tracea_jax.variants.steady import steadiest

REACH = 2.5  # octaves; if the nearest neighbour is farther, there is no answer
TOP = 3  # configs of each neighbour that are candidates

# By what factor XLA must be expected to be slower. Of 641 answers for an H200, each
# left out in turn (benchmarks/bench_interpolation.py), 50 of 362 that are a kernel of
# ours lose more than 2 % without it, 15 of 187 with it. Of 270 products of models with
# rows in between, raced on one (benchmarks/bench_untuned.py), 21 of 123 and 2 of 61.
CLEARLY = 1.05

Seen = tuple[Neighbour, Timed]  # a time, and the neighbour it was measured at


def interpolated(question: Question, evidence: Evidence) -> Iterator[Answer]:
    """From neighbours measured here, else from those of a kindred environment."""
    here, op = question.environment, question.problem.op
    found = answer(question, evidence.near(question, here.key))
    if found is not None:
        yield found
    for there in evidence.kin(op, here):
        found = answer(question, evidence.near(question, there.key))
        if found is not None:
            yield kindred.adopted(found, there)


def answer(question: Question, near: Sequence[Neighbour]) -> Answer | None:
    """The choice of the least predicted time; None if nothing is known near enough.

    A pure function. Times of the answer are predictions.

    Args:
      question: what is asked.
      near: finished neighbours, the nearest first.
    """
    diagnosis = question.diagnosis
    near = [n for n in near if _is_like(n.problem, diagnosis)]
    if not near or near[0].distance > REACH:
        return None
    if diagnosis.problem.only_between and not _is_between(diagnosis.problem, near):
        return None
    seen = [
        (n, t)
        for n in near
        for t in (timed(n.best, n.observations) if n.times is None else n.times)
    ]
    candidates = _candidates(diagnosis, near, seen)
    times = _predicted(diagnosis, seen, candidates)
    # Of equal ones the first: neighbours' configs before defaults, the nearest first.
    ranked = sorted(times, key=lambda choice: times[choice])
    allowed = [c for c in ranked if c.variant in question.allowed]
    if not allowed:
        return None
    chosen = allowed[0]
    if question.deterministic is None:
        varies = (c for c in allowed if question.varies(c) is not None)
        chosen = steadiest(allowed, times.__getitem__, set(varies).__contains__)
    xla = next((c for c in ranked if c.variant == "xla"), None)
    if question.allows_xla and xla is not None and times[xla] < CLEARLY * times[chosen]:
        chosen = xla
    return _answer(chosen, times[chosen], None if xla is None else times[xla], near)


def _answer(
    chosen: Choice, time_us: float, xla_us: float | None, near: Sequence[Neighbour]
) -> Answer:
    return Answer(
        choice=chosen,
        origin="interpolated",
        time_us=time_us,
        xla_us=xla_us,
        ratio=xla_us / time_us if xla_us else None,
        neighbours=len(near),
    )


def _is_like(problem: Problem, diagnosis: Diagnosis) -> bool:
    """Returns whether the same variants can serve a neighbour."""
    theirs = diagnose(problem, diagnosis.device, diagnosis.deterministic)
    return theirs.candidates == diagnosis.candidates


def _is_between(problem: Problem, near: Sequence[Neighbour]) -> bool:
    """Returns whether neighbours lie on both sides of the problem in every extent."""
    measured = np.array([octaves(n.problem) for n in near])
    here = octaves(problem)
    return bool((measured.min(0) <= here).all() and (here <= measured.max(0)).all())


def _candidates(
    diagnosis: Diagnosis, near: Sequence[Neighbour], seen: Sequence[Seen]
) -> tuple[Choice, ...]:
    """Legal choices: the best few of each neighbour, then the defaults, then XLA."""
    problem, device = diagnosis.problem, diagnosis.device
    failed = {o.identity for n in near for o in n.observations if o.failure}
    found: list[Choice | str] = []
    for neighbour in near:
        own = [
            t
            for n, t in seen
            if n is neighbour and t.is_verified and t.identity not in failed
        ]
        for t in [t for t in own if t.variant != "xla"][:TOP]:
            if t.variant in diagnosis.candidates:
                found.append(read_choice(t.variant, t.config, problem, device))
    for name in diagnosis.candidates:
        config = variants.get(problem.op, name).heuristic(problem, device)
        found.append(Choice(variant=name, config=config))
    legal = dict.fromkeys(c for c in found if isinstance(c, Choice))
    if diagnosis.deterministic:
        return tuple(
            c for c in legal if diagnosis.may_vary(c.variant, c.config) is None
        )
    return tuple(legal)


def _predicted(
    diagnosis: Diagnosis, seen: Sequence[Seen], candidates: Sequence[Choice]
) -> dict[Choice, float]:
    """Microseconds of each candidate that anything is known about."""
    problem, device = diagnosis.problem, diagnosis.device
    floors = _floors(diagnosis, seen)
    times: dict[Choice, float] = {}
    for name in dict.fromkeys(c.variant for c in candidates):
        variant = variants.get(problem.op, name)
        own = [c.config for c in candidates if c.variant == name]
        theirs = _comparable(variant, own, seen)
        has_model = _modelled(variant, problem, device)[1] is not None
        for floor in floors if name == "xla" else floors[:1]:
            model = _Model(variant, device, floor, has_model)
            for config, us in _of_variant(problem, own, theirs, model):
                choice = Choice(variant=name, config=config)
                times[choice] = min(us, times.get(choice, math.inf))
    return times


def _comparable(
    variant: Any, own: Sequence[Any], seen: Sequence[Seen]
) -> dict[Neighbour, list[tuple[Any, float]]]:
    """(config, time) of a variant at each neighbour, those that tell about ``own``.

    These are its configs themselves and whatever is good at a neighbour; how bad the
    others are is of no use, and the system of equations stays small.
    """
    found: dict[Neighbour, list[tuple[Any, float]]] = {}
    names = {identity(variant.name, dataclasses.asdict(config)) for config in own}
    for neighbour, t in seen:
        if t.variant != variant.name or not (t.is_verified or t.identity in names):
            continue
        try:
            config = variants.config_from_json(variant, hashable(t.config))
        except ValueError:  # of another version
            continue
        found.setdefault(neighbour, []).append((config, t.time_us))
    return found


def _of_variant(
    problem: Problem,
    own: Sequence[Any],
    theirs: dict[Neighbour, list[tuple[Any, float]]],
    model: _Model,
) -> list[tuple[Any, float]]:
    """(config, predicted time) for configs of one variant, from observations of it."""
    at, configs, missed = [], [], []
    for neighbour, times in theirs.items():
        modelled = model.us(neighbour.problem, [config for config, _ in times])
        for (config, time_us), us in zip(times, modelled, strict=True):
            if us > 0:
                at.append(octaves(neighbour.problem))
                configs.append(config)
                missed.append(math.log(time_us / us))
    modelled = model.us(problem, own)
    known = [(c, us) for c, us in zip(own, modelled, strict=True) if us > 0]
    if not missed or not known:
        return []
    features = features_of([*configs, *(c for c, _ in known)])
    here = np.array([octaves(problem)] * len(known))
    shift = krige(
        np.array(at),
        features[: len(at)],
        np.array(missed),
        here,
        features[len(at) :],
    )
    return [(c, us * math.exp(r)) for (c, us), r in zip(known, shift, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """Times of one variant, by its own model or else by the floor."""

    variant: Any
    device: Device
    floor: Callable[[Problem], float]
    has_model: bool

    def us(self, problem: Problem, configs: Sequence[Any]) -> list[float]:
        """Microseconds of each config; 0 if the model does not know it."""
        if not self.has_model:
            return [self.floor(problem)] * len(configs)
        columns, modelled = _modelled(self.variant, problem, self.device)
        if modelled is None:
            return [0.0] * len(configs)
        equal = np.ones((len(configs), len(modelled)), bool)
        for name, values in columns.items():
            wanted = np.array([getattr(config, name) for config in configs])
            equal &= wanted[:, None] == values
        return np.where(equal.any(1), modelled[equal.argmax(1)], 0.0).tolist()


def _floors(
    diagnosis: Diagnosis, seen: Sequence[Seen]
) -> tuple[Callable[[Problem], float], ...]:
    """Quantities that good times are about proportional to; the first for all.

    The least modelled time, if a variant has a model of this problem: it knows that the
    last wave of tiles may be short, from which all kernels with such tiles suffer
    alike. Then also the device's roofline, that of kernels whose tiles always fit.
    """
    problem, device = diagnosis.problem, diagnosis.device
    for name in diagnosis.candidates:
        variant = variants.get(problem.op, name)
        if _modelled(variant, problem, device)[1] is not None:
            least = functools.partial(_least_modelled, variant, device)
            return (least, lambda other: roofline.floor_us(other, device) or 0.0)
    work = [(n.problem, t.time_us) for n, t in seen]
    rate = max(p.flops / t for p, t in work)
    bandwidth = max(p.bytes / t for p, t in work)
    return (lambda other: max(other.flops / rate, other.bytes / bandwidth),)


def _least_modelled(variant: Any, device: Device, problem: Problem) -> float:
    _, modelled = _modelled(variant, problem, device)
    return 0.0 if modelled is None else float(modelled.min())


@functools.lru_cache(maxsize=128)  # neighbours are asked again for the next problem
def _modelled(
    variant: Any, problem: Problem, device: Device
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Columns of the variant's space, and modelled times if it has any."""
    space = variant.space(problem, device)
    modelled = space.modelled_us
    return space.columns, modelled if modelled is not None and len(modelled) else None
