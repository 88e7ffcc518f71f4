"""Answers that were measured for the very problem, here or on a kindred device.

``measured`` and ``inherited`` are sources of ``knowledge.Knowledge``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tracea_jax.policy import Choice
from tracea_jax.tuning.answers import kindred
from tracea_jax.tuning.answers.answer import Answer, Question
from tracea_jax.tuning.answers.evidence import Evidence
from tracea_jax.tuning.answers.legality import current, current_best
from tracea_jax.tuning.answers.times import timed
from tracea_jax.tuning.store.records import Best, Entry


def measured(question: Question, evidence: Evidence) -> Iterator[Answer | str]:
    """Tuned on this machine, else shared by a cache that is only read, else shipped."""
    return _known(question, evidence, question.environment.key)


def inherited(question: Question, evidence: Evidence) -> Iterator[Answer | str]:
    """Measured in kindred environments; without reasons why not."""
    for there in evidence.kin(question.problem.op, question.environment):
        for found in _known(question, evidence, there.key):
            if isinstance(found, Answer):
                yield kindred.adopted(found, there)


def _known(question: Question, evidence: Evidence, key: str) -> Iterator[Answer | str]:
    """What the environment of this key knows of the problem, or why that is no use.

    An entry's answer comes alone, unless the caller does not allow its variant: then
    the fastest that was measured of the allowed ones take its place.
    """
    problem, diagnosis = question.problem, question.diagnosis
    complete = not question.is_open
    for origin, entry in evidence.entries(problem, key, complete=complete):
        if isinstance(entry, str):
            yield entry
        elif (
            entry.best.variant in question.allowed
            or entry.best.variant not in diagnosis.candidates
        ):
            yield _answer(entry.best, origin, entry.tuner)
        else:
            yield from _observed(entry, origin, question)


def _observed(entry: Entry, origin: str, question: Question) -> Iterator[Answer]:
    """What is known to compute correctly, the fastest first."""
    problem, device = question.problem, question.device
    best = current_best(entry.best, problem, device)
    for t in timed(best, current(entry.observations, problem, device)):
        if t.is_verified and t.variant in question.allowed:
            found = Best(
                variant=t.variant,
                config=t.config,
                code=t.code,
                time_us=t.time_us,
                xla_us=entry.best.xla_us,
            )
            yield _answer(found, origin, {})


def _answer(best: Best, origin: str, tuner: Mapping[str, Any]) -> Answer:
    time_us, xla_us = best.decisive
    tried, legal = map(tuner.get, ("tried", "legal"))
    is_known = isinstance(tried, int) and isinstance(legal, int)
    return Answer(
        choice=Choice(variant=best.variant, config=best.config),
        origin=origin,
        time_us=time_us,
        xla_us=xla_us,
        ratio=best.ratio,
        code=best.code,
        tried=f"{tried} of {legal} configs tried" if is_known else "",
    )
